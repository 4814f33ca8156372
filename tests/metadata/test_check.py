"""Bad metadata is refused by field, index, value and bound, before anything is launched."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.check import check, check_host, check_slots
from mla_jax.metadata.common import HostBatch
from tests.metadata.batches import LARGE, RX, batches

BUCKET = CommonBucket(requests=6, tokens=8, pages=(4,))


def changed(array, index: int, value: int):
    array = np.array(array)
    array[index] = value
    return array


@given(batches())
def test_good_batches_pass(batch):
    tables = {"latent": batch.table}
    given = {"bucket": LARGE, "groups": (batch.group,), "num_pages": 10_000}
    check_host(batch.host, page_tables=tables, **given)
    check_host(batch.host, **given)
    starts, lens, _ = batch.host.padded_arrays(LARGE)
    padded = dataclasses.replace(batch.host, query_starts=starts, seq_lens=lens)
    check_host(padded, page_tables=tables, **given)


def padded() -> HostBatch:
    starts, lens, _ = RX.host.padded_arrays(BUCKET)
    return dataclasses.replace(RX.host, query_starts=starts, seq_lens=lens)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("query_starts", 0, 1, r"query_starts\[0\]: given 1; allowed: 0"),
        ("query_starts", 2, 0, r"query_starts\[2\]: given 0; allowed: not below"),
        ("query_starts", 6, 8, r"seq_lens\[5\]|query_lens\[5\]"),
        ("seq_lens", 2, 1, r"seq_lens\[2\]: given 1; allowed: at least the"),
        ("seq_lens", 2, 99, r"seq_lens\[2\]: given 99; allowed: 9"),
        ("seq_lens", 5, 3, r"seq_lens\[5\]: given 3; allowed: 0 on padding"),
    ],
)
def test_bad_input_is_named(field, index, value, message):
    host = padded()
    bad = dataclasses.replace(host, **{field: changed(getattr(host, field), index, value)})
    with pytest.raises(MetadataError, match=message):
        check_host(bad, bucket=BUCKET, groups=(RX.group,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_starts": np.zeros(7)}, "dtype of query_starts: given float64"),
        ({"query_starts": np.zeros(7, np.int64)}, "given int64; allowed: int32"),
        ({"query_starts": np.zeros(6, np.int32)}, "given 6 entries; allowed: 7"),
        ({"num_tokens": 9}, "tokens of a batch: given 9; allowed: at most 8"),
        ({"num_tokens": 6}, "num_tokens: given 6; allowed: at least 7"),
        ({"max_seq_len": 17}, "pages of a batch: given 5; allowed: at most 4"),
        ({"max_query_len": 2}, r"query_lens\[2\]: given 3; allowed: 2"),
    ],
)
def test_bad_shapes_types_and_counts(change, message):
    bad = dataclasses.replace(padded(), **change)
    with pytest.raises(MetadataError, match=message):
        check_host(bad, bucket=BUCKET, groups=(RX.group,))


def test_bad_page_tables():
    given = {"bucket": BUCKET, "groups": (RX.group,)}
    with pytest.raises(MetadataError, match=r"of latent\[1, 1\]: given 9; allowed: 0 to 8"):
        check_host(RX.host, page_tables={"latent": RX.table}, num_pages=9, **given)
    with pytest.raises(MetadataError, match=r"seq_lens\[1\]: given 9; allowed: at most 2 pages"):
        check_host(RX.host, page_tables={"latent": RX.table[:, :2]}, **given)
    with pytest.raises(MetadataError, match=r"of latent\[0, 0\]: given -1"):
        check_host(RX.host, page_tables={"latent": RX.table - 8}, **given)


def test_two_writers_of_one_slot():
    check_slots(np.array([3, -1, 4, -1]), 5)
    with pytest.raises(MetadataError, match=r"slots\[2\]: given 3; allowed: written by one token"):
        check_slots(np.array([3, -1, 3]))
    with pytest.raises(MetadataError, match=r"slots\[1\]: given 5; allowed: below 5"):
        check_slots(np.array([3, 5]), 5)
    with pytest.raises(MetadataError, match=r"slots\[0\]: given -2"):
        check_slots(np.array([-2]))


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("slots", 7, 3, r"slots\[7\]: given 3; allowed: -1"),
        ("slots", 0, 8, "written by one token only"),
        ("positions", 7, 2, r"positions\[7\]: given 2; allowed: 0 on padding"),
        ("requests", 7, 2, r"requests\[7\]: given 2; allowed: 0 on padding"),
        ("real", 7, 1, r"real\[7\]: given 1; allowed: whether"),
        ("seq_lens", 4, 2, r"seq_lens\[4\]: given 2; allowed: 0 on padding"),
        ("seq_lens", 1, 17, "at most 4 pages of 4"),
        ("page_tables", 5, 1, r"page_table of latent\[5, 0\]: given 1; allowed: 0 on padding"),
        ("query_starts", 6, 3, r"query_starts\[6\]: given 3; allowed: not below"),
    ],
)
def test_padding_that_could_do_harm(field, index, value, message):
    c = RX.common(BUCKET)
    check(c, num_pages=10)
    old = getattr(c, field)
    if isinstance(old, dict):
        bad = {"latent": jnp.asarray(changed(old["latent"], index, value))}
    else:
        bad = jnp.asarray(changed(old, index, value))
    with pytest.raises(MetadataError, match=message):
        check(dataclasses.replace(c, **{field: bad}), num_pages=10)


def test_unknown_objects_have_no_invariants():
    with pytest.raises(MetadataError, match="check: object: given dict; allowed: one of "):
        check({})
