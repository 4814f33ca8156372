"""The merge kernel of dense decode alone, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_decode import combine_sm90
from mla_jax.pallas.dense_decode.combine_sm90 import combine

HEADS, RANK = 2, 256
UNTOUCHED = 7.0


@pytest.mark.parametrize(("parts", "unrolls"), [(1, (2, 8)), (2, (4,))])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 40])
def test_merge_of_pieces(count, parts, unrolls, rng, monkeypatch):
    """Slots 1 to ``count`` hold the pieces; their neighbours and unused rows are NaN."""
    monkeypatch.setattr(combine_sm90, "SHAPES", ((64, parts, unrolls, 1),))
    monkeypatch.setattr(combine_sm90, "MULTIPROCESSORS", parts)
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
