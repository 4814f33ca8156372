"""The merge kernel of dense decode alone, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_decode import combine_sm90
from mla_jax.pallas.dense_decode.combine_sm90 import combine

HEADS, RANK = 2, 256
UNTOUCHED = 7.0


def test_bits_do_not_depend_on_the_warpgroups(rng, monkeypatch):
    """One warpgroup for all chains of a row, or four, one each."""
    part = jnp.asarray(rng.normal(size=(41, 1, 64, RANK)), jnp.float32)
    lse = jnp.asarray(3 * rng.normal(size=(41, 1, 64)), jnp.float32)

    def solve(warpgroups):
        monkeypatch.setattr(combine_sm90, "SHAPES", ((64, warpgroups, 1),))
        out, got = combine(
            jnp.zeros((HEADS, RANK), jnp.bfloat16),
            jnp.zeros((HEADS,)),
            part,
            lse,
            jnp.asarray([[1, 0, 0, 0], [0, 41, 0, 0]], jnp.int32),
            heads=HEADS,
            early_launch=False,
            interpret=plgpu.InterpretGPUParams(num_tma_threads_per_device=4),
        )
        return np.asarray(out, np.float32), np.asarray(got)

    for one, four in zip(solve(1), solve(4), strict=True):
        np.testing.assert_array_equal(one, four)


@pytest.mark.parametrize("warpgroups", [1, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 40])
def test_merge_of_pieces(count, warpgroups, rng, monkeypatch):
    """Slots 1 to ``count`` hold the pieces; their neighbours and unused rows are NaN."""
    monkeypatch.setattr(combine_sm90, "SHAPES", ((64, warpgroups, 1),))
    monkeypatch.setattr(combine_sm90, "MULTIPROCESSORS", 1)
    part = np.full((count + 2, 1, 64, RANK), np.nan, np.float32)
    lse = np.full((count + 2, 1, 64), np.nan, np.float32)
    part[1 : count + 1, 0, HEADS : 2 * HEADS] = rng.normal(size=(count, HEADS, RANK))
    lse[1 : count + 1, 0, HEADS : 2 * HEADS] = 3 * rng.normal(size=(count, HEADS))
    if count > 2:
        lse[2, 0, HEADS] = -np.inf
    out, got = combine(
        jnp.full((2 * HEADS, RANK), UNTOUCHED, jnp.bfloat16),
        jnp.full((2 * HEADS,), UNTOUCHED),
        jnp.asarray(part),
        jnp.asarray(lse),
        jnp.asarray([[count != 1, 0, 0, 0], [1, count, 1, 1], [0, 0, 0, 0]], jnp.int32),
        heads=HEADS,
        early_launch=False,
        interpret=plgpu.InterpretGPUParams(num_tma_threads_per_device=4),
    )
    out, got = np.asarray(out, np.float64), np.asarray(got, np.float64)
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
        truth = np.einsum("ph,phd->hd", weights, part[1 : count + 1, 0, HEADS : 2 * HEADS])
        truth /= weights.sum(0)[:, None]
        np.testing.assert_allclose(out[HEADS:], truth, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(got[HEADS:], np.log(weights.sum(0)), rtol=1e-5, atol=1e-5)
