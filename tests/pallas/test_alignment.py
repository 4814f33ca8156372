"""Operands that XLA could hand to a kernel as places inside of other arrays.

A contiguous slice of an array needs no copy for a custom call, and Mosaic refuses a place that is
not a multiple of 256 bytes: what came from a packed step did, depending on the batch size.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache import FORMATS
from mla_jax.pallas.cache_io import mosaic as cache_io
from mla_jax.pallas.dense_decode import mosaic as dense_decode
from mla_jax.pallas.dense_prefill import mosaic as dense_prefill
from mla_jax.pallas.device import DeviceInfo
from tests import aot

H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)
BF16, F32, I32 = jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("int32")
BEFORE = {BF16: 2, F32: 1, I32: 1}  # elements: one word
TOKENS, REQUESTS, HEADS, PAGE = 300, 3, 5, 16
STARTS = np.asarray([0, 100, 170, TOKENS], np.int32)
PAGES = np.zeros((40, PAGE, 576), np.float32), BF16
BFLOAT = FORMATS["bf16"]


def data(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape), BF16


def whole(x):
    return np.asarray(x), I32


def fp32(x):
    return np.asarray(x), F32


TABLE = whole(np.arange(REQUESTS * 13).reshape(REQUESTS, 13))
OPERATIONS = {
    "decode": (
        functools.partial(
            dense_decode.dense_decode, max_query_len=1, scale=0.1, format=BFLOAT, out_dtype=BF16,
            tuning=dense_decode.heuristic(HEADS, 1, workers=H200.sms),
        ),
        [
            data(REQUESTS, HEADS, 512), data(REQUESTS, HEADS, 64), data(40, PAGE, 576), fp32(1.0),
            TABLE, whole([200, 0, 77]), whole(np.arange(REQUESTS + 1)),
        ],
    ),
    "prefill": (
        functools.partial(
            dense_prefill.dense_prefill, scale=0.1, causal=True, out_dtype=BF16,
            tuning=dense_prefill.heuristic(
                TOKENS, TOKENS, HEADS, requests=len(STARTS) - 1, nope=128, rope=64, v=128,
                causal=True, device=H200,
            ),
        ),
        [
            data(TOKENS, HEADS, 192), data(TOKENS, HEADS, 256), data(TOKENS, 64),
            whole(STARTS), whole(STARTS),
        ],
    ),
    "gather": (
        functools.partial(cache_io.gather_latent, rows=TOKENS, dtype=BF16, format=BFLOAT),
        [data(40, PAGE, 576), fp32(1.0), TABLE, whole([3, 0, 17]), whole(STARTS)],
    ),
    "write": (
        functools.partial(cache_io.write_latent, format=BFLOAT),
        [
            PAGES, fp32(1.0), data(TOKENS, 512), data(TOKENS, 64),
            whole(np.random.default_rng(0).permutation(40 * PAGE)[:TOKENS]),
        ],
    ),
}  # fmt: skip


def inside(operation, arrays, extra):
    """Program and arguments: every operand a slice of a vector, every result put into one."""

    def run(vectors, room):
        operands = [
            v[BEFORE[d] : BEFORE[d] + x.size].reshape(x.shape)
            for v, (x, d) in zip(vectors, arrays, strict=True)
        ]
        results = jax.tree.leaves(operation(*operands))
        return [
            jax.lax.dynamic_update_slice(r.astype(x.dtype), x.ravel(), (BEFORE[x.dtype],))
            for r, x in zip(room, results, strict=True)
        ]

    shapes = jax.eval_shape(operation, *(jax.ShapeDtypeStruct(x.shape, d) for x, d in arrays))
    room = [extra(math.prod(s.shape) + 9, s.dtype) for s in jax.tree.leaves(shapes)]
    vectors = [extra(x.size + 9, d) for x, d in arrays]
    return run, vectors, room


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_get_arrays_of_their_own(name):
    operation, arrays = OPERATIONS[name]
    run, *args = inside(operation, arrays, lambda n, dtype: jax.ShapeDtypeStruct((n,), dtype))
    text = aot.compile_sm90(run, *args)[0].as_text()
    assert "mosaic_gpu" in text
    assert "dynamic-slice-fusion" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_places_inside_of_arrays_on_device(name):
    operation, arrays = OPERATIONS[name]
    operands = [jnp.asarray(x, d) for x, d in arrays]
    want = jax.tree.leaves(jax.jit(operation)(*operands))
    run, _, room = inside(operation, arrays, jnp.zeros)
    vectors = [jnp.pad(x.ravel(), (BEFORE[x.dtype], 9)) for x in operands]
    for x, got in zip(want, jax.jit(run)(vectors, room), strict=True):
        got = got[BEFORE[x.dtype] :][: x.size].reshape(x.shape)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32))
