"""Reordering a persistent batch: documented examples and laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.compat.reorder import (
    reorder_batch_to_four_regions,
    reorder_batch_to_split_decodes_and_prefills,
)


@pytest.mark.parametrize(
    ("ids", "scheduled", "threshold", "swaps", "result"),
    [
        ("abcde", [6, 6, 6, 1, 1], 1, [(0, 4), (1, 3)], "edcba"),
        ("abcde", [6, 1, 6, 1, 6], 1, [(0, 3)], "dbcae"),
        ("abcd", [8, 1, 1, 8], 1, [(0, 2)], "cbad"),
        ("abcdef", [8, 8, 1, 1, 8, 1], 1, [(0, 5), (1, 3)], "fdcbea"),
        ("abcde", [1, 1, 6, 6, 6], 1, [], "abcde"),  # edge 33
        ("abc", [3, 1, 2], 2, [(0, 2)], "cba"),
        ("", [], 1, [], ""),
    ],
)
def test_two_regions(ids, scheduled, threshold, swaps, result):
    got = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold)
    assert list(got.swaps) == swaps
    assert "".join(ids[i] for i in got.order) == result
    assert got.modified == bool(swaps)


@pytest.mark.parametrize(
    ("ids", "scheduled", "computed", "prompt", "threshold", "swaps", "result"),
    [
        ("abcde", [6, 6, 6, 1, 1], [0, 0, 0, 3, 3], [6, 6, 6, 3, 3], 1, [(3, 0), (4, 1)], "decab"),
        ("abcde", [1, 8, 1, 8, 1], [5, 0, 5, 8, 5], [5, 8, 5, 32, 5], 1, [(4, 1)], "aecdb"),
        ("ab", [1, 1], [0, 7], [1, 7], 1, [(1, 0)], "ba"),  # edge 4
        (
            "PQRSTU",
            [5, 1, 2, 4, 1, 1],
            [0, 9, 3, 8, 0, 4],
            [5, 9, 20, 30, 1, 9],
            2,
            [(1, 0), (1, 5)],
            "QURSTP",
        ),
    ],
)
def test_four_regions(ids, scheduled, computed, prompt, threshold, swaps, result):
    got = reorder_batch_to_four_regions(scheduled, computed, prompt, threshold)
    assert list(got.swaps) == swaps
    assert "".join(ids[i] for i in got.order) == result


requests = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 5)), max_size=12)


@given(requests, st.integers(1, 4))
def test_laws(rows, threshold):
    """A permutation made by its swaps; decodes first; the second call does nothing."""
    scheduled, computed, prompt = (list(x) for x in zip(*rows, strict=True)) if rows else ([],) * 3
    two = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold)
    four = reorder_batch_to_four_regions(scheduled, computed, prompt, threshold)
    for plan in (two, four):
        batch = list(range(len(rows)))

        def swap(i, j, batch=batch):
            batch[i], batch[j] = batch[j], batch[i]

        assert plan.apply(swap) == plan.modified == (batch != sorted(batch))
        assert batch == list(plan.order)
        assert sorted(batch) == list(range(len(rows)))
    s, n, p = (np.array(x)[list(four.order)].tolist() for x in (scheduled, computed, prompt))
    assert not reorder_batch_to_four_regions(s, n, p, threshold).modified
    s = np.array(scheduled)[list(two.order)].tolist()
    assert not reorder_batch_to_split_decodes_and_prefills(s, threshold).modified
    assert sorted(s, key=lambda x: x > threshold) == s


@given(requests, st.integers(1, 4))
def test_swaps_are_minimal(rows, threshold):
    scheduled = [r[0] for r in rows]
    decodes = sum(s <= threshold for s in scheduled)
    wrong = sum(s > threshold for s in scheduled[:decodes])
    plan = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold)
    assert len(plan.swaps) == wrong
