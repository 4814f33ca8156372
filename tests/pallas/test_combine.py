"""The merge kernel of dense decode alone, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_decode import combine_sm90
from mla_jax.pallas.dense_decode.combine_sm90 import combine

HEADS, RANK, MOST = 2, 512, 150
SLOTS = MOST + 1 + combine_sm90.CHAINS
UNTOUCHED = 7.0
NO_SINKS = [-np.inf] * HEADS
SHAPES = [(1, 2), (4, 1)]
"""Thread blocks of a row, rows of a step of each of them."""


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def merged(request):
    """The merge in one of the shapes, of parts, their lse and a list: one program for all."""
    params = plgpu.InterpretGPUParams(num_tma_threads_per_device=4)

    @jax.jit
    def solve(part, lse, merges, sinks):
        return combine(
            jnp.full((2 * HEADS, RANK), UNTOUCHED, jnp.bfloat16),
            jnp.full((2 * HEADS,), UNTOUCHED),
            part,
            lse,
            merges,
            sinks,
            heads=HEADS,
            multiprocessors=1,
            early_launch=False,
            interpret=params,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine_sm90, "SHAPES", ((64, *request.param),))
        part, lse = (jnp.zeros((SLOTS, 1, 64, *more)) for more in ((RANK,), ()))
        compiled = solve.lower(
            part.astype(jnp.bfloat16), lse, jnp.zeros((3, 8), jnp.int32), jnp.zeros(HEADS)
        ).compile()

    def run(*args, sinks=NO_SINKS):
        return [np.asarray(x, np.float64) for x in compiled(*args, np.float32(sinks))]

    return run


@functools.cache
def first_bits(count):
    """Of the first shape that asks: all others must have the same."""
    return {}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 11, 40, MOST])
def test_merge_of_pieces(count, merged):
    """Slots 1 to ``count`` hold the pieces; their neighbours and unused rows are NaN. Every shape
    has the same bits."""
    rng = np.random.default_rng(count)
    part = np.full((SLOTS, 1, 64, RANK), np.nan, np.float32)
    lse = np.full((SLOTS, 1, 64), np.nan, np.float32)
    part[1 : count + 1, 0, HEADS : 2 * HEADS] = rng.normal(size=(count, HEADS, RANK))
    lse[1 : count + 1, 0, HEADS : 2 * HEADS] = 3 * rng.normal(size=(count, HEADS))
    if count > 2:
        lse[2, 0, HEADS] = -np.inf
    merges = np.zeros((3, 8), np.int32)
    merges[0, 0], merges[1, :4] = count != 1, (1, count, 1, 1)
    part = np.asarray(jnp.asarray(part, jnp.bfloat16))
    out, got = merged(part, lse, merges)
    assert (out[:HEADS] == UNTOUCHED).all()
    assert (got[:HEADS] == UNTOUCHED).all()
    if count == 1:
        assert (out == UNTOUCHED).all()
    elif count == 0:
        assert not out[HEADS:].any()
        assert np.isneginf(got[HEADS:]).all()
    else:
        l2 = lse[1 : count + 1, 0, HEADS : 2 * HEADS].astype(np.float64)
        weights = np.exp2(l2)
        values = part[1 : count + 1, 0, HEADS : 2 * HEADS].astype(np.float64)
        truth = np.einsum("ph,phd->hd", weights, values) / weights.sum(0)[:, None]
        np.testing.assert_allclose(out[HEADS:], truth, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(got[HEADS:], np.log(weights.sum(0)), rtol=1e-5, atol=1e-5)
    bits = first_bits(count)
    for name, x in (("out", out), ("lse", got)):
        np.testing.assert_array_equal(x, bits.setdefault(name, x))


@pytest.mark.parametrize("count", [2, 11])
@pytest.mark.parametrize("sinks", [(0.5, np.inf), (-np.inf, -3.0), (1e9, np.nan)])
def test_sinks_are_one_more_key_of_each_head(count, sinks, merged, rng):
    part, lse = np.zeros((SLOTS, 1, 64, RANK), np.float32), np.zeros((SLOTS, 1, 64), np.float32)
    part[1 : count + 1] = rng.normal(size=(count, 1, 64, RANK))
    lse[1 : count + 1] = rng.normal(size=(count, 1, 64))
    merges = np.zeros((3, 8), np.int32)
    merges[0, 0], merges[1, :4] = 1, (1, count, 0, 0)
    given = np.asarray(jnp.asarray(part, jnp.bfloat16)), lse, merges
    (plain, lses), (out, same) = merged(*given), merged(*given, sinks=sinks)
    np.testing.assert_array_equal(same, lses)
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(np.array(sinks) - lses[:HEADS]))
    np.testing.assert_allclose(out[:HEADS], share[:, None] * plain[:HEADS], rtol=2**-7, atol=1e-6)
