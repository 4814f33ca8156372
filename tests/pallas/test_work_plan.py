"""The plan of dense decode: every block exactly once, shares balanced, splits as promised."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.types import cdiv

BLOCK = 64
BATCHES = st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 3)), min_size=1, max_size=12)


REQUESTS, TOKENS = 24, 80  # of every plan but one: a program for each number of workers


@functools.partial(jax.jit, static_argnames=("kind", "workers"))
def build(lens, starts, kind, workers):
    common = {"tokens": TOKENS, "block": BLOCK, "workers": workers}
    if kind == "balanced":
        return wp.balanced(lens, starts, split_cost=30, **common)
    return wp.batch_invariant(lens, starts, chunk=4, max_parts=4, **common)


def make(kind, batch, workers=4):
    """The plan of ``(keys, queries)`` pairs, padded with requests of keys but no queries."""
    batch = [*batch, *[(1000, 0)] * (REQUESTS - len(batch))]
    lens = jnp.asarray([n for n, _ in batch], jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *(q for _, q in batch)]), jnp.int32)
    return build(lens, starts, kind, workers)


def bounds_of(plan):
    """Where the pieces of each worker begin, and where they all end; a task says it as well."""
    tasks, pieces = np.asarray(plan.tasks), np.asarray(plan.pieces)
    assert not tasks[plan.workers :].any()
    tasks = tasks[: plan.workers]
    busy = tasks[:, wp.BEGIN] < tasks[:, wp.STOP]
    assert not tasks[~busy].any(), "without a piece: zeros"
    first = pieces[tasks[busy, wp.BEGIN]]
    np.testing.assert_array_equal(
        tasks[busy, wp.OF_REQUEST :], first[:, [wp.REQUEST, wp.FIRST, wp.END, wp.TOKEN, 7, 7]]
    )
    ends = np.maximum.accumulate(tasks[:, wp.STOP])
    starts = np.append(0, ends)
    np.testing.assert_array_equal(tasks[busy, wp.BEGIN], starts[:-1][busy])
    return starts


def pieces_of(plan):
    """Live pieces as rows, in the order of the keys."""
    table = np.asarray(plan.pieces)
    table = table[: bounds_of(plan)[-1]]
    return table[np.lexsort((table[:, wp.FIRST], table[:, wp.REQUEST]))]


def merges_of(plan):
    """Token to (first slot, pieces, query) of the tokens that no single piece finishes."""
    merges = np.asarray(plan.merges)
    listed = merges[1 : 1 + merges[0, 0]]
    assert len(set(listed[:, wp.TOKEN_OF])) == len(listed), "a token twice"
    assert not listed[:, 4:].any()
    assert not merges[1 + merges[0, 0] :].any(), "behind the list: zeros"
    return {int(token): tuple(rest) for *rest, token in listed[:, :4]}


@pytest.mark.parametrize("kind", ["balanced", "batch_invariant"])
@given(batch=BATCHES, workers=st.sampled_from([1, 4, 7]))
def test_every_block_exactly_once(kind, batch, workers):
    plan = make(kind, batch, workers)
    bounds, pieces = bounds_of(plan), pieces_of(plan)
    assert bounds[0] == 0
    assert (np.diff(bounds) >= 0).all()
    assert not np.asarray(plan.pieces)[len(pieces) :].any(), "behind the last piece: zeros"
    covered = {r: 0 for r, (_, q) in enumerate(batch) if q}
    for request, first, end, _, keys, token, queries, _ in pieces:
        assert first == covered[request]
        assert end > first
        assert (keys, queries) == batch[request]
        assert token == sum(q for _, q in batch[:request])
        covered[request] = end
    assert covered == {r: max(cdiv(n, BLOCK), 1) for r, (n, q) in enumerate(batch) if q}


@pytest.mark.parametrize("kind", ["balanced", "batch_invariant"])
@given(batch=BATCHES)
def test_slots_and_merges_agree(kind, batch):
    plan = make(kind, batch)
    pieces, merges = pieces_of(plan), merges_of(plan)
    slots = [s for s in pieces[:, wp.SLOT] if s >= 0]
    assert slots == list(range(len(slots)))
    assert len(slots) <= plan.slots
    token = 0
    for r, (_, queries) in enumerate(batch):
        mine = pieces[pieces[:, wp.REQUEST] == r]
        for j in range(queries):
            if len(mine) == 1:
                assert token not in merges
                assert mine[0, wp.SLOT] == -1
            else:
                base, count, query = merges.pop(token)
                assert (count, query) == (len(mine), j)
                assert mine[:, wp.SLOT].tolist() == list(range(base, base + count))
            token += 1
    assert sorted(merges) == list(range(token, TOKENS)), "padding tokens are listed as well"
    assert not any(count for _, count, _ in merges.values()), "but have no pieces"


@given(batch=BATCHES)
def test_balanced_shares(batch):
    """No worker has more than an eighth above the even share, and a block."""
    plan, workers = make("balanced", batch), 4
    pieces, bounds = np.asarray(plan.pieces), bounds_of(plan)
    work = pieces[:, wp.END] - pieces[:, wp.FIRST]
    real = [max(cdiv(n, BLOCK), 1) + wp.START_COST for n, q in batch if q]
    even = cdiv(sum(real), workers)
    for w in range(workers):
        assert work[bounds[w] : bounds[w + 1]].sum() <= even + 16 * max(1, even // 128)


def test_equal_requests_are_not_split():
    lens, starts = jnp.full((128,), 4096, jnp.int32), jnp.arange(129, dtype=jnp.int32)
    plan = wp.balanced(lens, starts, tokens=128, block=BLOCK, workers=132, split_cost=30)
    assert not merges_of(plan)


def test_few_equal_requests_have_equal_pieces():
    """32 requests of 128 blocks: four pieces each, one for a worker, none of them a remnant."""
    lens, starts = jnp.full((32,), 8192, jnp.int32), jnp.arange(33, dtype=jnp.int32)
    plan = wp.balanced(lens, starts, tokens=32, block=BLOCK, workers=132, split_cost=65)
    pieces = pieces_of(plan)
    assert (pieces[:, wp.END] - pieces[:, wp.FIRST]).tolist() == [32] * 128
    assert (np.diff(bounds_of(plan)) <= 1).all()


@given(batch=BATCHES, other=BATCHES)
def test_batch_invariant_cuts_do_not_see_the_neighbours(batch, other):
    def cuts(plan, request):
        pieces = pieces_of(plan)
        return pieces[pieces[:, wp.REQUEST] == request][:, [wp.FIRST, wp.END]].tolist()

    alone, among = make("batch_invariant", batch), make("batch_invariant", [*other, *batch])
    for r in range(len(batch)):
        assert cuts(alone, r) == cuts(among, len(other) + r)


@given(batch=BATCHES, workers=st.sampled_from([1, 4, 7]))
def test_batch_invariant_shares(batch, workers):
    """Dealt from the largest down: no two workers differ by more than the largest piece."""
    plan = make("batch_invariant", batch, workers)
    pieces, bounds = np.asarray(plan.pieces), bounds_of(plan)
    work = pieces[:, wp.END] - pieces[:, wp.FIRST]
    loads = [work[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert max(loads) - min(loads) <= work.max()


def test_ragged_batch_invariant_shares():
    """128 lengths up to 16,384: the longest share is within a tenth of the even one."""
    lens = jnp.asarray(np.random.default_rng(1).integers(1, 16385, 128), jnp.int32)
    starts = jnp.arange(129, dtype=jnp.int32)
    plan = wp.batch_invariant(
        lens, starts, tokens=128, block=BLOCK, workers=132, chunk=128, max_parts=2
    )
    pieces, bounds = np.asarray(plan.pieces), bounds_of(plan)
    work = pieces[:, wp.END] - pieces[:, wp.FIRST]
    loads = [work[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert max(loads) <= 1.1 * np.mean(loads)
