"""Bad metadata is refused by field, index, value and bound, before anything is launched."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.check import check, check_host, check_slots
from tests.metadata.batches import LARGE, RX, batches

BUCKET = CommonBucket(requests=6, tokens=8, pages=4)


def changed(array, index: int, value: int):
    array = np.array(array)
    array[index] = value
    return array


@given(batches())
def test_good_batches_pass(batch):
    host = batch.host.pad_to(LARGE)
    check_host(host, bucket=LARGE, page=batch.page, page_table=batch.table, num_pages=10_000)
    check_host(batch.host, bucket=LARGE, page=batch.page)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("query_start_loc_cpu", 0, 1, r"query_start_loc_cpu\[0\]: given 1; allowed: 0"),
        ("query_start_loc_cpu", 2, 0, r"query_start_loc_cpu\[2\]: given 0; allowed: not below"),
        ("query_start_loc_cpu", 6, 8, r"query_lens\[5\]: given 1; allowed: 0 on padding"),
        ("seq_lens_cpu_upper_bound", 2, 1, r"upper_bound\[2\]: given 1; allowed: at least the"),
        ("seq_lens_cpu_upper_bound", 2, 99, r"upper_bound\[2\]: given 99; allowed: 9"),
        ("seq_lens_cpu_upper_bound", 5, 3, r"upper_bound\[5\]: given 3; allowed: 0 on padding"),
        ("seq_lens_cpu", 0, 6, r"seq_lens_cpu\[0\]: given 6"),
    ],
)
def test_bad_input_is_named(field, index, value, message):
    host = RX.host.pad_to(BUCKET)
    bad = dataclasses.replace(host, **{field: changed(getattr(host, field), index, value)})
    if field == "query_start_loc_cpu" and index == 6:
        bad = dataclasses.replace(
            bad, seq_lens_cpu_upper_bound=changed(bad.seq_lens_cpu_upper_bound, 5, 1)
        )
        message = r"upper_bound\[5\]|query_lens\[5\]"
    with pytest.raises(MetadataError, match=message):
        check_host(bad, bucket=BUCKET, page=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc_cpu": np.zeros(7)}, "dtype of query_start_loc_cpu: given float64"),
        ({"query_start_loc_cpu": np.zeros(7, np.int64)}, "given int64; allowed: int32"),
        ({"query_start_loc_cpu": np.zeros(6, np.int32)}, "given 6 entries; allowed: 7"),
        ({"num_actual_tokens": 9}, "tokens of a batch: given 9; allowed: at most 8"),
        ({"num_actual_tokens": 6}, "num_actual_tokens: given 6; allowed: at least 7"),
        ({"max_seq_len": 17}, "pages of a batch: given 5; allowed: at most 4"),
        ({"max_query_len": 2}, r"query_lens\[2\]: given 3; allowed: 2"),
    ],
)
def test_bad_shapes_types_and_counts(change, message):
    bad = dataclasses.replace(RX.host.pad_to(BUCKET), **change)
    with pytest.raises(MetadataError, match=message):
        check_host(bad, bucket=BUCKET, page=4)


def test_bad_page_tables():
    host = RX.host
    with pytest.raises(MetadataError, match=r"page_table\[1, 1\]: given 9; allowed: 0 to 8"):
        check_host(host, bucket=BUCKET, page=4, page_table=RX.table, num_pages=9)
    with pytest.raises(MetadataError, match=r"seq_lens\[1\]: given 9; allowed: at most 2 pages"):
        check_host(host, bucket=BUCKET, page=4, page_table=RX.table[:, :2])
    with pytest.raises(MetadataError, match=r"page_table\[0, 0\]: given -1"):
        check_host(host, bucket=BUCKET, page=4, page_table=RX.table - 8)


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
        ("slot_mapping", 7, 3, r"slot_mapping\[7\]: given 3; allowed: -1"),
        ("slot_mapping", 0, 8, "written by one token only"),
        ("positions", 7, 2, r"positions\[7\]: given 2; allowed: 0 on padding"),
        ("seq_lens", 4, 2, r"seq_lens\[4\]: given 2; allowed: 0 on padding"),
        ("seq_lens", 1, 17, "at most 4 pages of 4"),
        ("block_table_tensor", 5, 1, r"block_table_tensor\[5, 0\]: given 1; allowed: 0 on padding"),
        ("query_start_loc", 6, 3, r"query_start_loc\[6\]: given 3; allowed: not below"),
    ],
)
def test_padding_that_could_do_harm(field, index, value, message):
    c = RX.common(BUCKET)
    check(c, page=4, num_pages=10)
    bad = jnp.asarray(changed(getattr(c, field), index, value))
    with pytest.raises(MetadataError, match=message):
        check(dataclasses.replace(c, **{field: bad}), page=4, num_pages=10)


def test_unknown_objects_have_no_invariants():
    with pytest.raises(TypeError, match="no invariants are known for dict"):
        check({})
