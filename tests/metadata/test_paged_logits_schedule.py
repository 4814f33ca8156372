"""The paged-logits schedule: examples, coverage, and who takes the remainder."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.compat.paged_logits_schedule import paged_mqa_logits_schedule


def last_column(lens, queries=1):
    column = jnp.array(lens, jnp.int32)[:, None]
    return jnp.concatenate([jnp.zeros((len(lens), queries - 1), jnp.int32), column], axis=1)


@pytest.mark.parametrize(
    ("lens", "queries", "sms", "rows"),
    [
        ([100, 600, 257], 1, 4, [(0, 0), (1, 1), (2, 0), (2, 1), (3, 0)]),
        ([300, 512], 2, 3, [(0, 0), (1, 0), (1, 1), (2, 0)]),
        ([601, 102], 4, 3, [(0, 0), (1, 0), (2, 0), (4, 0)]),
        ([1000], 1, 4, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]),
        ([10, 20], 1, 4, [(0, 0), (1, 0), (2, 0), (2, 0), (2, 0)]),
        ([300, 0, 300, 0], 1, 3, [(0, 0), (2, 0), (2, 1), (4, 0)]),
        ([0, 0], 1, 4, [(2, 0)] * 5),
        ([9, 8, 10, 7, 9, 10, 11, 12], 1, 4, [(0, 0), (2, 0), (4, 0), (6, 0), (8, 0)]),
    ],
)
def test_examples(lens, queries, sms, rows):
    got = paged_mqa_logits_schedule(last_column(lens, queries), num_sms=sms)
    np.testing.assert_array_equal(got, rows)


def test_remainder_to_the_last():
    got = paged_mqa_logits_schedule(last_column([100, 600, 257]), num_sms=4, remainder="last")
    np.testing.assert_array_equal(got, [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)])


def test_requests_are_runs_of_equal_numbers():
    """Padding rows are those of request 0 again, without keys."""

    def schedule(lens, request):
        return paged_mqa_logits_schedule(
            last_column(lens), num_sms=3, item="token", request=jnp.array(request, jnp.int32)
        )

    want = schedule([300, 301, 600, 0, 0], [0, 0, 1, 2, 2])
    assert want[0].tolist() == [0, 0]
    np.testing.assert_array_equal(schedule([300, 301, 600, 0, 0], [0, 0, 1, 0, 0]), want)
    assert not schedule([], []).any()


def test_token_items():
    got = paged_mqa_logits_schedule(last_column([300, 512], 2), num_sms=3, item="token")
    np.testing.assert_array_equal(got, [(0, 0), (0, 1), (2, 1), (4, 0)])


def test_no_rows():
    got = paged_mqa_logits_schedule(jnp.zeros((0, 1), jnp.int32), num_sms=2)
    np.testing.assert_array_equal(got, [(0, 0)] * 3)


@given(
    st.lists(st.integers(0, 1500), min_size=5, max_size=5),
    st.sampled_from([1, 4]),
    st.sampled_from(["first", "last"]),
)
def test_every_item_once_and_even_loads(lens, queries, remainder):
    got = paged_mqa_logits_schedule(last_column(lens, queries), num_sms=7, remainder=remainder)
    atoms = -(-queries // 2)
    items = [
        (i * atoms + a, s)
        for i, n in enumerate(lens)
        for a in range(atoms)
        for s in range(-(-n // 256))
    ]
    places = [
        items.index(tuple(row)) if tuple(row) in items else len(items) for row in got.tolist()
    ]
    assert places[0] == 0 or not items
    assert places[-1] == len(items)
    loads = np.diff(places)
    assert loads.min() >= 0
    assert loads.max() - loads.min() <= 1
    ordered = np.sort(loads)
    np.testing.assert_array_equal(loads, ordered[::-1] if remainder == "first" else ordered)


def test_padding_rows_own_no_work():
    lens = [300, 20, 600]
    here = np.asarray(paged_mqa_logits_schedule(last_column(lens), num_sms=4))
    padded = paged_mqa_logits_schedule(last_column([*lens, 0, 0]), num_sms=4)
    np.testing.assert_array_equal(
        np.where((here == (3, 0)).all(axis=1, keepdims=True), (5, 0), here), padded
    )
