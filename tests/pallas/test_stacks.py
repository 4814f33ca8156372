"""A layer of a stacked cache is the cache of one layer, bit for bit, and no other layer counts.

Every registered backend through ``ops``; the kernels also interpreted, and compiled for an H200.
"""

import dataclasses
import functools
import re

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
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import V2_LITE, decode_case, draw, paged, stacked, starts
from tests.compare import same_bits

OP = "mla_decode"
H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)
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
    with pytest.raises(ArgumentError, match=r"swap_blocks: src: given .*'layers': 2"):
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
@pytest.mark.parametrize("few", [False, True])
@FORMAT
def test_interpreted_decode(format, few, rng):
    dims = dataclasses.replace(V2_LITE, heads=8)
    more = {"page": 32, "format": format, "cache_scale": scale_of(format)}
    case = decode_case(rng, dims=dims, seq_lens=[70, 1, 0], **more)
    q_latent, q_rope, cache, meta = case.args
    found = decode.heuristic(8, 1, FORMATS[format].quantised, workers=2)
    tuning = dataclasses.replace(found, few=few, prefetch=found.defer and not few)
    plan = decode.make_plan(
        meta.seq_lens, meta.query_starts, tokens=len(q_latent), heads=8, max_query_len=1,
        page=cache.page, width=meta.page_table.shape[1], tuning=tuning,
    )  # fmt: skip

    def solve(cache, **more):
        return decode.attend(
            q_latent, q_rope, cache.pages, cache.scale, meta.page_table, plan, scale=case.scale,
            format=cache.format, tuning=tuning, interpret=interpreted(), **more,
        )  # fmt: skip

    alone = solve(cache)
    for layer in range(LAYERS):
        same_bits(alone, solve(stacked(cache, layer), layer=jnp.int32(layer)))
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


# --- the kernels, compiled for an H200 ----------------------------------------------------------

spec = jax.ShapeDtypeStruct
int32 = functools.partial(spec, dtype=jnp.int32)
STACK, PAGE, TOKENS, WIDTH = (27, 20_000), 64, 32, 64  # 40 GB of bfloat16


def stack_specs(format, heads=16):
    """Stack, scales, queries, new rows, slots, page table, lengths, starts."""
    dtype = jnp.dtype(FORMATS[format].dtype)
    rows = (spec((TOKENS, n), jnp.bfloat16) for n in (512, 64))
    queries = (spec((TOKENS, heads, n), jnp.bfloat16) for n in (512, 64))
    index = ((TOKENS,), (TOKENS, WIDTH), (TOKENS,), (TOKENS + 1,))
    pages = spec((*STACK, PAGE, 576), dtype)
    return pages, spec(STACK[:1], jnp.float32), *queries, *rows, *map(int32, index)


def no_copy_of_the_stack(compiled, pages, largest):
    """Results take the stack's memory; nothing as large as a layer is copied or made."""
    memory = compiled.memory_analysis()
    size = pages.size * pages.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 50 * 10**6 < size / STACK[0]
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start)\(", compiled.as_text())
    elements = [np.prod([int(n) for n in shape.split(",")]) for shape in copies]
    assert max(elements, default=0) <= largest


def through_layers(loop, backend, format, pages, scale, ql, qr, kv, kr, slots, table, lens, at):
    """A step of a model: in each layer the new rows are written, then all are attended to."""
    cache = LatentCache(pages=pages, scale=scale, rank=512, format=FORMATS[format])
    meta = DecodeMetadata(max_query_len=1, page_table=table, seq_lens=lens, query_starts=at)
    sizes = {"tokens": TOKENS, "heads": ql.shape[1], "dtype": ql.dtype}
    plan = ops.plan_decode(meta, cache, **sizes, backend=backend)

    def layer(i, carry):
        q, cache = carry
        cache = ops.write_latent(cache, kv, kr, slots, layer=i, backend=backend)
        more = {"layer": i, "backend": backend, "plan": plan}
        state = ops.mla_decode(q, qr, cache, meta, scale=0.1, **more)
        return state.out, cache

    if loop == "fori":
        q, cache = jax.lax.fori_loop(0, STACK[0], layer, (ql, cache))
    else:
        numbers = jnp.arange(STACK[0], dtype=jnp.int32)
        (q, cache), _ = jax.lax.scan(lambda c, i: (layer(i, c), None), (ql, cache), numbers)
    return q, cache.pages


@AOT
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "name", "format"),
    [
        ("scan", "mosaic", "bf16"),
        ("fori", "mosaic", "fp8_e4m3"),
        ("scan", "xla", "bf16"),
        ("scan", "xla", "fp8_e4m3"),
    ],
)
def test_a_loop_over_layers_compiles_for_sm90(loop, name, format, monkeypatch):
    """The donated stack is the result: nothing of its size, nor of a layer's, is copied or made."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    fn = functools.partial(through_layers, loop, name, format)
    args = stack_specs(format)
    compiled, reports = aot.compile_sm90(fn, *args, donate=(0,))
    assert len(reports) == (4 if name == "mosaic" else 0), [r.name for r in reports]
    no_copy_of_the_stack(compiled, args[0], args[2].size)  # queries are carried, and copied


def chunks_of_context(backend, format, pages, scale, kv, kr, slots, table, lens, at, chunks):
    """In each layer new rows are written, then a loop gathers the context chunk by chunk."""
    cache = LatentCache(pages=pages, scale=scale, rank=512, format=FORMATS[format])

    def layer(cache, i):
        more = {"layer": i, "backend": backend}
        cache = ops.write_latent(cache, kv, kr, slots, **more)

        def chunk(c, total):
            rows = ops.gather_latent(
                cache, table, lens + c, at, rows=TOKENS, dtype=jnp.bfloat16, **more
            )
            return total + rows.astype(jnp.float32)

        return cache, jax.lax.fori_loop(0, chunks, chunk, jnp.zeros((TOKENS, 576)))

    cache, sums = jax.lax.scan(layer, cache, jnp.arange(STACK[0], dtype=jnp.int32))
    return cache.pages, sums


@AOT
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"), [("mosaic", "bf16"), ("mosaic", "fp8_e4m3"), ("xla", "bf16")]
)
def test_a_loop_within_the_loop_compiles_for_sm90(name, format, monkeypatch):
    """The inner loop reads the stack that the outer one has written."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    pages, scale, _, _, *rest = stack_specs(format)
    fn = functools.partial(chunks_of_context, name, format)
    compiled, reports = aot.compile_sm90(fn, pages, scale, *rest, int32(()), donate=(0,))
    assert len(reports) == (2 if name == "mosaic" else 0), [r.name for r in reports]
    no_copy_of_the_stack(compiled, pages, TOKENS * 576)


@AOT
@pytest.mark.slow
@pytest.mark.parametrize("layer", [None, 3])
@FORMAT
def test_pages_move_in_place_for_sm90(format, layer):
    """In all layers at once: what moves is read, then written, and nothing else is touched."""
    pages, scale, *_ = stack_specs(format)

    def move(pages, scale, pairs):
        cache = LatentCache(pages=pages, scale=scale, rank=512, format=FORMATS[format])
        return ops.copy_blocks(cache, pairs, layer=layer, backend="xla").pages

    compiled, _ = aot.compile_sm90(move, pages, scale, int32((8, 2)), donate=(0,))
    no_copy_of_the_stack(compiled, pages, 8 * STACK[0] * PAGE * 576)


@AOT
@pytest.mark.slow
@FORMAT
def test_gather_and_write_of_a_layer_compile_for_sm90(format):
    """No register more than a cache of one layer is given: full occupancy."""
    pages, scale, _, _, kv, kr, slots, *_ = stack_specs(format)
    more = {"format": FORMATS[format]}

    def gather(layer, *args):
        kwargs = {"rows": 5000, "dtype": jnp.bfloat16, "layer": layer}
        return cache_io.gather_latent(*args, **kwargs, **more)

    index = int32((200, 40)), int32((200,)), int32((201,))
    _, (report,) = aot.compile_sm90(gather, int32(()), pages, scale, *index)
    assert report.spilled == 0 and report.registers <= 32, report.log

    def write(pages, layer, *args):
        return cache_io.write_latent(pages, *args, layer=layer, **more)

    args = pages, int32(()), scale, kv, kr, slots
    compiled, (report,) = aot.compile_sm90(write, *args, donate=(0,))
    assert report.spilled == 0, report.log
    assert compiled.memory_analysis().temp_size_in_bytes < 10**6
    assert " copy(" not in compiled.as_text()


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "format"), [(16, "bf16"), (128, "bf16"), (16, "fp8_e4m3"), (128, "fp8_e4m3")]
)
def test_a_step_through_the_stack_on_device(heads, format, rng):
    """Write and attend in each layer, inside a donated scan: the bits of layers one by one."""
    case = decode_case(
        rng, dims=dataclasses.replace(V2_LITE, heads=heads), seq_lens=[700, 1, 0, 64, 2000],
        page=64, format=format, cache_scale=scale_of(format), pad_tokens=0,
    )  # fmt: skip
    q_latent, q_rope, cache, meta = case.args
    tokens = q_latent.shape[0]
    new = jnp.asarray(draw(rng, LAYERS, tokens, 576, dtype="bfloat16"))
    last = np.maximum(np.asarray(meta.seq_lens) - 1, 0)
    page_id = np.asarray(meta.page_table)[np.arange(len(last)), last // 64]
    slots = np.where(np.asarray(meta.seq_lens) > 0, page_id * 64 + last % 64, -1)[:tokens]
    slots = jnp.asarray(slots, jnp.int32)
    caches = [
        dataclasses.replace(cache, pages=jnp.roll(cache.pages, 0, axis=0)) for _ in range(LAYERS)
    ]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *caches)

    def layer(cache, x, **more):
        more = {"backend": "mosaic", **more}
        cache = ops.write_latent(cache, x[:, :512], x[:, 512:], slots, **more)
        state = ops.mla_decode(q_latent, q_rope, cache, meta, scale=case.scale, **more)
        return cache, state

    alone = [jax.jit(layer)(c, x) for c, x in zip(caches, new, strict=True)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(stack, new):
        numbers = jnp.arange(LAYERS, dtype=jnp.int32)
        return jax.lax.scan(lambda c, ix: layer(c, ix[1], layer=ix[0]), stack, (numbers, new))

    where = stack.pages.unsafe_buffer_pointer()
    stack, states = step(stack, new)
    assert stack.pages.unsafe_buffer_pointer() == where
    for i, (cache, state) in enumerate(alone):
        np.testing.assert_array_equal(bits(stack.pages[i]), bits(cache.pages))
        same_bits(state, jax.tree.map(lambda x, i=i: x[i], states))


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@FORMAT
def test_layers_behind_two_to_the_32_elements(format, rng):
    """Small pages of a few tokens in the last layer: written, gathered, attended to."""
    num_pages, layers = 2**20 // 64, 9
    sizes = {"num_pages": num_pages, "page": 64, "rank": 512, "rope": 64}
    stack = LatentCache.alloc(**sizes, layers=layers, format=format, scale=scale_of(format))
    small = LatentCache.alloc(**(sizes | {"num_pages": 2}), format=format, scale=scale_of(format))
    assert (layers - 1) * num_pages * 64 * 576 > 2**32
    x = jnp.asarray(draw(rng, 100, 576, dtype="bfloat16"))
    q = jnp.asarray(draw(rng, 1, 16, 576, dtype="bfloat16"))
    found = []
    for cache, first, more in ((stack, num_pages - 2, {"layer": layers - 1}), (small, 0, {})):
        more = {"backend": "mosaic", **more}
        table = jnp.asarray([[first + 1, first]], jnp.int32)
        slots = jnp.arange(100, dtype=jnp.int32)
        slots = table[0, slots // 64] * 64 + slots % 64
        write = jax.jit(functools.partial(ops.write_latent, **more), donate_argnums=0)
        cache = write(cache, x[:, :512], x[:, 512:], slots)
        ends = jnp.asarray([0, 100], jnp.int32)
        rows = ops.gather_latent(cache, table, ends[:1], ends, rows=100, dtype=jnp.bfloat16, **more)
        meta = DecodeMetadata(
            max_query_len=1, page_table=table, seq_lens=ends[1:],
            query_starts=jnp.asarray([0, 1], jnp.int32),
        )  # fmt: skip
        state = ops.mla_decode(q[..., :512], q[..., 512:], cache, meta, scale=0.1, **more)
        found.append((rows, state))
    (rows, state), (want_rows, want) = found
    np.testing.assert_array_equal(bits(rows), bits(want_rows))
    same_bits(state, want)
