"""Work plans against the walk they are the closed form of, and the laws of a plan."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.compat.plan import (
    balanced_plan,
    dense_sm_parts,
    invariant_plan,
    sparse_row_lens,
    sparse_sm_parts,
)


@partial(jax.jit, static_argnames=("parts", "overhead"))
def plan_of(lens, num_rows=None, *, parts, overhead=5):
    plan = balanced_plan(lens, parts=parts, overhead=overhead, num_rows=num_rows)
    return plan.tile_scheduler_metadata, plan.num_splits


def walk(lens, parts, overhead=5):
    """One request or one part at a time, as the scheduler kernel does it."""
    blocks = [max(n - 1, 0) // 64 + 1 for n in lens]
    payload = -(-(sum(blocks) + len(lens) * overhead) // parts) + overhead
    i = done = pieces = total = 0
    splits, rows = [0], []
    for _ in range(parts):
        budget, begin = payload, (i, done, pieces)
        while i < len(lens) and budget >= blocks[i] - done + overhead:
            budget -= blocks[i] - done + overhead
            total += pieces + 1
            splits.append(total)
            i, done, pieces = i + 1, 0, 0
        if i < len(lens) and budget > overhead:
            done, pieces = done + budget - overhead, pieces + 1
        end = i if done else i - 1
        end_block = done if done else blocks[end] if lens[end] else 0
        first, last = begin[1] > 0, end_block != blocks[end] and lens[end] > 0
        if begin[0] == end:
            first = last = first or last
        rows.append([begin[0], end, begin[1], end_block, begin[2], first, last, 0])
    return np.array(rows, np.int32), np.array(splits, np.int32)


def covered(table, num_splits, lens):
    """Blocks of rows with keys in order, as ``(row, block)``, and the pieces that are written."""
    batch, seen, pieces = len(lens), [], set()
    blocks = [max(n - 1, 0) // 64 + 1 for n in lens]
    for begin, end, first, stop, split, *_ in table.tolist():
        for row in range(begin, end + 1) if begin < batch else ():
            lo = first if row == begin else 0
            hi = stop if row == end else blocks[row]
            seen += [(row, b) for b in range(lo, hi) if lens[row]]
            pieces.add(int(num_splits[row]) + (split if row == begin else 0))
    return seen, pieces


PARTS = st.sampled_from([2, 33])
LENS = st.lists(st.integers(0, 700), min_size=8, max_size=8)


@given(LENS, st.sampled_from([(2, 5), (33, 5), (5, 3)]))
def test_the_closed_form_is_the_walk(lens, size):
    parts, overhead = size
    table, splits = plan_of(jnp.array(lens, jnp.int32), parts=parts, overhead=overhead)
    rows, num_splits = walk(lens, parts, overhead)
    np.testing.assert_array_equal(table, rows)
    np.testing.assert_array_equal(splits, num_splits)


@given(LENS, PARTS)
def test_every_block_once_in_order_and_every_piece_named(lens, parts):
    table, splits = plan_of(jnp.array(lens, jnp.int32), parts=parts)
    seen, pieces = covered(np.asarray(table), np.asarray(splits), lens)
    blocks = [(i, b) for i, n in enumerate(lens) for b in range(-(-n // 64))]
    assert seen == blocks
    assert pieces == set(range(int(splits[-1])))
    assert int(splits[-1]) <= len(lens) + parts


@given(LENS, st.integers(0, 8))
def test_rows_left_out_change_nothing(lens, rows):
    parts = 5
    table, splits = plan_of(jnp.array(lens, jnp.int32), jnp.int32(rows), parts=parts)
    splits = np.asarray(splits)
    assert (splits[rows:] == splits[rows]).all()
    if rows == 0:
        assert (np.asarray(table)[:, 0] == len(lens)).all()
        return
    want, num_splits = walk(lens[:rows], parts)
    want[want[:, 0] == rows, 0] = len(lens)
    np.testing.assert_array_equal(table, want)
    np.testing.assert_array_equal(splits[: rows + 1], num_splits)


EXAMPLES = [
    ([64, 640], 3, [[0, 1, 0, 1, 0, 0, 1], [1, 1, 1, 8, 1, 1, 1], [1, 1, 8, 10, 2, 1, 1]]),
    ([0, 64, 200], 2, [[0, 1, 0, 1, 0, 0, 0], [2, 2, 0, 4, 0, 0, 0]]),
    ([1000, 64, 64], 3, [[0, 0, 0, 11, 0, 1, 1], [0, 1, 11, 1, 1, 1, 0], [2, 2, 0, 1, 0, 0, 0]]),
    ([64], 4, [[0, 0, 0, 1, 0, 0, 0]] + [[1, 0, 0, 1, 0, 0, 0]] * 3),
    ([0], 2, [[0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]),
    ([4, 4, 1, 1], 2, [[0, 1, 0, 1, 0, 0, 0], [2, 3, 0, 1, 0, 0, 0]]),
    ([4, 4], 2, [[0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]),
]


@pytest.mark.parametrize(("lens", "parts", "rows"), EXAMPLES)
def test_examples(lens, parts, rows):
    table, _ = plan_of(jnp.array(lens, jnp.int32), parts=parts)
    np.testing.assert_array_equal(table[:, :7], rows)


def test_one_long_row_on_many_parts():
    table, splits = plan_of(jnp.array([2560], jnp.int32), parts=4)
    np.testing.assert_array_equal(splits, [0, 4])
    np.testing.assert_array_equal(table[:, 2:4], [[0, 12], [12, 24], [24, 36], [36, 40]])
    assert bool((table[:, 5:7] == 1).all())


def test_no_rows():
    table, splits = plan_of(jnp.zeros((0,), jnp.int32), parts=3)
    np.testing.assert_array_equal(table[:, :2], [[0, -1]] * 3)
    np.testing.assert_array_equal(splits, [0])


def test_sparse_row_lens():
    main, extra = jnp.array([128, 100, 0, 5, 64]), jnp.array([512, 300, 0, 0, 1])
    np.testing.assert_array_equal(sparse_row_lens(main, extra), [640, 428, 64, 64, 65])
    np.testing.assert_array_equal(sparse_row_lens(main), [128, 100, 1, 5, 64])


def test_sm_parts():
    assert dense_sm_parts(132, queries=1, heads=128) == 66
    assert dense_sm_parts(132, queries=1, heads=16) == 132
    assert dense_sm_parts(132, queries=2, heads=128) == 33
    assert sparse_sm_parts(132, queries=1, heads=128) == 66
    assert sparse_sm_parts(132, queries=1, heads=16) == 132


invariant = jax.jit(partial(invariant_plan, blocks_per_piece=3, max_len=700))


@given(LENS, st.permutations(range(8)))
def test_invariant_plan_cuts_a_row_by_its_own_length(lens, order):
    here = invariant(jnp.array(lens, jnp.int32))
    table, splits = np.asarray(here.tile_scheduler_metadata), np.asarray(here.num_splits)
    seen, pieces = covered(table, splits, lens)
    assert seen == [(i, b) for i, n in enumerate(lens) for b in range(-(-n // 64))]
    assert pieces == set(range(int(splits[-1])))
    idle = table[:, 0] == len(lens)
    assert (table[~idle, 0] == table[~idle, 1]).all()

    there = invariant(jnp.array([lens[i] for i in order], jnp.int32))
    other = np.asarray(there.tile_scheduler_metadata)
    for at, row in enumerate(order):
        np.testing.assert_array_equal(other[other[:, 0] == at, 2:], table[table[:, 0] == row, 2:])
