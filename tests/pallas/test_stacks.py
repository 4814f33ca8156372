"""A layer of a stacked cache is the cache of one layer, bit for bit, and no other layer counts.

Every registered backend through ``ops``; the kernels also interpreted, and compiled for an H200.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax import ops
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError, MetadataError, UnsupportedError
from mla_jax.metadata.mla import DecodeMetadata
from mla_jax.pallas.cache_io import mosaic as cache_io
from mla_jax.pallas.dense_decode import mosaic as decode
from tests import aot
from tests.cases import V2_LITE, decode_case, draw, paged, stacked, starts
from tests.compare import same_bits

OP = "dense_decode"
LAYERS = 3
LAYER = pytest.mark.parametrize("layer", range(LAYERS))
FORMAT = pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
SMALL = MLADims(heads=1, rank=64, nope=8, rope=64, v=8, q_rank=None)
AOT = pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")


def bits(x):
    """Raw bytes, so that NaNs compare."""
    return np.asarray(x).view(np.uint8)


def scale_of(format):
    return 0.5 if FORMATS[format].quantised else 1.0


def supported(op, *args, backend, **kwargs):
    try:
        return op(*args, backend=backend, **kwargs)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def write_args(rng, format, dims=SMALL, page=16):
    """``cache, kv_latent, k_rope, slots``: out of order, nowhere, behind the cache, surplus."""
    cache, _, _ = paged(rng, [30, 40], dims=dims, page=page, format=format, scale=scale_of(format))
    slots = np.array([3, -1, cache.num_slots - 1, 17, cache.num_slots, 2**31 - 1, 0], np.int32)
    x = jnp.asarray(draw(rng, len(slots) + 2, dims.row, dtype="bfloat16"))
    return cache, x[:, : dims.rank], x[:, dims.rank :], jnp.asarray(slots)


def gather_args(rng, format, dims=SMALL, page=16):
    lens, take = [37, 0, 20], [30, 0, 4]
    cache, table, _ = paged(rng, lens, dims=dims, page=page, format=format, scale=scale_of(format))
    first = jnp.asarray([7, 0, 1], jnp.int32)
    return (cache, table, first, jnp.asarray(starts(take))), {"rows": 40, "dtype": jnp.bfloat16}


def only(got, want, layer, before):
    """``layer`` of ``got`` is ``want``; every other layer is as it was."""
    np.testing.assert_array_equal(bits(got[layer]), bits(want))
    others = np.arange(LAYERS) != layer
    np.testing.assert_array_equal(bits(got)[others], bits(before)[others])


@LAYER
@FORMAT
def test_decode_of_a_layer(format, layer, backend, rng):
    more = {"page": 16, "format": format, "cache_scale": scale_of(format)}
    case = decode_case(rng, dims=V2_LITE, seq_lens=[70, 1, 0, 33], **more)
    q_latent, q_rope, cache, meta = case.args
    solve = functools.partial(supported, ops.mla_decode, q_latent, q_rope, backend=backend)
    alone = solve(cache, meta, scale=case.scale)
    stack = stacked(cache, layer)
    same_bits(alone, solve(stack, meta, scale=case.scale, layer=layer))
    traced = jax.jit(lambda stack, i: solve(stack, meta, scale=case.scale, layer=i))
    same_bits(alone, traced(stack, jnp.int32(layer)))


@LAYER
@FORMAT
def test_gather_of_a_layer(format, layer, backend, rng):
    (cache, *index), kwargs = gather_args(rng, format)
    alone = supported(ops.gather_latent, cache, *index, **kwargs, backend=backend)
    stack = stacked(cache, layer)
    for i in (layer, np.int64(layer), jnp.int32(layer), np.asarray(layer, np.int16)):
        i = i if isinstance(i, int) else jnp.asarray(i)
        got = ops.gather_latent(stack, *index, **kwargs, backend=backend, layer=i)
        np.testing.assert_array_equal(bits(got), bits(alone))


@LAYER
@FORMAT
def test_write_to_a_layer(format, layer, backend, rng):
    cache, *data = write_args(rng, format)
    alone = supported(ops.write_latent, cache, *data, backend=backend)
    stack = stacked(cache, layer)
    got = ops.write_latent(stack, *data, backend=backend, layer=layer)
    only(got.pages, alone.pages, layer, stack.pages)
    got = jax.jit(functools.partial(ops.write_latent, backend=backend))(
        stack, *data, layer=jnp.int32(layer)
    )
    only(got.pages, alone.pages, layer, stack.pages)


@FORMAT
def test_layers_that_do_not_exist(format, backend, rng):
    """A write to one is nothing; what is read is clamped."""
    cache, *data = write_args(rng, format)
    stack = stacked(cache, 0)
    for i in (-1, LAYERS, -(2**31), 2**31 - 1):
        given = {"backend": backend, "layer": jnp.int32(i)}
        got = supported(ops.write_latent, stack, *data, **given)
        np.testing.assert_array_equal(bits(got.pages), bits(stack.pages))
        (cache, *index), kwargs = gather_args(rng, format)
        nearest = 0 if i < 0 else LAYERS - 1
        got = ops.gather_latent(stacked(cache, nearest), *index, **kwargs, **given)
        want = ops.gather_latent(cache, *index, **kwargs, backend=backend)
        np.testing.assert_array_equal(bits(got), bits(want))


@FORMAT
def test_pages_move_in_all_layers_or_in_one(format, rng):
    cache, _, _ = paged(rng, [20], dims=SMALL, page=4, format=format, spare=0)
    other, _, _ = paged(rng, [8], dims=SMALL, page=4, format=format, spare=1)
    pairs = jnp.array([[0, 1], [1, 2], [0, 3], [-1, 4], [2, -1], [7, 0]], jnp.int32)
    stack = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), cache)
    want = ops.copy_blocks(cache, pairs).pages
    got = ops.copy_blocks(stack, pairs)
    np.testing.assert_array_equal(bits(got.pages), bits(jnp.stack([want] * LAYERS)))
    got = ops.copy_blocks(stack, pairs, layer=1)
    only(got.pages, want, 1, stack.pages)

    source = stacked(other, 2)
    want = ops.swap_blocks(other, cache, pairs).pages
    got = ops.swap_blocks(source, stack, pairs, layer=jnp.int32(2))
    only(got.pages, want, 2, stack.pages)
    source = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), other)
    got = ops.swap_blocks(source, stack, pairs)
    np.testing.assert_array_equal(bits(got.pages), bits(jnp.stack([want] * LAYERS)))


def refused(rng, layer, stack=True):
    cache, *data = write_args(rng, "bf16")
    return ops.write_latent(stacked(cache, 0) if stack else cache, *data, layer=layer)


@pytest.mark.parametrize(
    ("layer", "stack", "text"),
    [
        (None, True, "write_latent: layer: given None; allowed: 0 to 2"),
        (3, True, "given 3; allowed: 0 to 2, an int or a scalar integer array"),
        (-1, True, "given -1; allowed: 0 to 2"),
        (True, True, "given bool; allowed: 0 to 2"),
        (1.0, True, "given float; allowed: 0 to 2"),
        (jnp.zeros((1,), jnp.int32), True, r"given int32 of shape \(1,\); allowed: 0 to 2"),
        (jnp.float32(1), True, r"given float32 of shape \(\); allowed: 0 to 2"),
        (0, False, "given 0; allowed: None: this cache has one layer"),
    ],
)
def test_refusals(layer, stack, text, rng, our_errors):
    with pytest.raises(ArgumentError, match=text):
        refused(rng, layer, stack)


def test_every_operation_asks_for_the_layer(rng, our_errors):
    stack = stacked(paged(rng, [9], dims=SMALL, page=4)[0], 0)
    (_, *index), kwargs = gather_args(rng, "bf16")
    with pytest.raises(ArgumentError, match="gather_latent: layer: given None"):
        ops.gather_latent(stack, *index, **kwargs)
    case = decode_case(rng, dims=SMALL, seq_lens=[3])
    q_latent, q_rope, cache, meta = case.args
    with pytest.raises(ArgumentError, match="mla_decode: layer: given None"):
        ops.mla_decode(q_latent, q_rope, stacked(cache, 0), meta, scale=1.0)
    sizes = {"tokens": 3, "heads": 1, "dtype": jnp.bfloat16}
    assert ops.plan_decode(meta, stacked(cache, 0), **sizes, backend="xla") is None
    two = jax.tree.map(lambda x: x[:2], stack)
    with pytest.raises(ArgumentError, match="swap_blocks: src: given .*'layers': 2"):
        ops.swap_blocks(two, stack, jnp.zeros((1, 2), jnp.int32))
    single = dataclasses.replace(stack, scale=jnp.float32(1))
    with pytest.raises(ArgumentError, match=r"shape of cache.scale: given \(\); allowed: \(3,\)"):
        ops.copy_blocks(single, jnp.zeros((1, 2), jnp.int32))


def test_alloc():
    sizes = {"num_pages": 5, "page": 4, "rank": 16, "rope": 4}
    stack = LatentCache.alloc(**sizes, layers=7, format="fp8_e4m3", scale=0.5)
    assert (stack.pages.shape, stack.scale.shape) == ((7, 5, 4, 20), (7,))
    assert (stack.layers, stack.num_pages, stack.num_slots, stack.page) == (7, 5, 20, 4)
    assert (np.asarray(stack.scale) == 0.5).all()
    assert LatentCache.alloc(**sizes).layers is None
    with pytest.raises(MetadataError, match="layers=0; allowed: positive sizes"):
        LatentCache.alloc(**sizes, layers=0)


def test_too_many_rows_are_refused_before_anything_is_allocated(monkeypatch):
    """2.5 terabytes: neither host nor device is asked for any of it."""
    monkeypatch.setattr(jnp, "zeros", None)
    monkeypatch.setattr(jnp, "full", None)
    with pytest.raises(MetadataError, match=r"layers \* pages \* page: given 2147483648"):
        LatentCache.alloc(num_pages=2**20, page=64, rank=512, rope=64, layers=32)


# --- the kernels, interpreted -------------------------------------------------------------------


def interpreted():
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)


@pytest.mark.slow
@LAYER
@pytest.mark.parametrize("few", [False, True])
@FORMAT
def test_interpreted_decode(format, few, layer, rng):
    dims = dataclasses.replace(V2_LITE, heads=8)
    more = {"page": 32, "format": format, "cache_scale": scale_of(format)}
    case = decode_case(rng, dims=dims, seq_lens=[70, 1, 0], **more)
    q_latent, q_rope, cache, meta = case.args
    found = decode.heuristic(8, 1, FORMATS[format].quantised)
    tuning = dataclasses.replace(found, few=few, prefetch=found.defer and not few, workers=2)

    def solve(cache, **more):
        return decode.dense_decode(
            q_latent, q_rope, cache.pages, cache.scale, meta.page_table, meta.seq_lens,
            meta.query_starts, max_query_len=1, scale=case.scale, format=cache.format,
            out_dtype=q_latent.dtype, tuning=tuning, interpret=interpreted(), **more,
        )  # fmt: skip

    same_bits(solve(cache), solve(stacked(cache, layer), layer=jnp.int32(layer)))
    assert not get_races().races_found


@pytest.mark.slow
@LAYER
@FORMAT
def test_interpreted_gather(format, layer, rng):
    (cache, *index), kwargs = gather_args(rng, format)

    def solve(cache, **more):
        kwargs_ = {**kwargs, "format": cache.format, "interpret": interpreted(), **more}
        return cache_io.gather_latent(cache.pages, cache.scale, *index, **kwargs_)

    got = solve(stacked(cache, layer), layer=jnp.int32(layer))
    np.testing.assert_array_equal(bits(got), bits(solve(cache)))
    assert not get_races().races_found


@pytest.mark.slow
@pytest.mark.parametrize("layer", [*range(LAYERS), -1, LAYERS])
@FORMAT
def test_interpreted_write(format, layer, rng):
    cache, *data = write_args(rng, format)

    def solve(cache, **more):
        kwargs = {"format": cache.format, "interpret": interpreted(), **more}
        return cache_io.write_latent(cache.pages, cache.scale, *data, **kwargs)

    stack = stacked(cache, layer % LAYERS)
    got = solve(stack, layer=jnp.int32(layer))
    assert not get_races().races_found
    if layer in range(LAYERS):
        only(got, solve(cache), layer, stack.pages)
    else:
        np.testing.assert_array_equal(bits(got), bits(stack.pages))
