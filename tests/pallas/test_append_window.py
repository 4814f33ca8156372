"""V4's new rows and queries: every backend against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.ops import append_window, gather_rows
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import draw, run
from tests.pallas import v4_steps
from tests.pallas.experts import missing
from tests.pallas.v4_steps import EPS, PAGE, PAGES

OP = "append_window"
SLOTS = PAGES * PAGE


def as_arrays(q, kv, gain, turn, slots):
    return *map(jnp.asarray, (q, kv, gain)), v4_steps.angles(turn), jnp.asarray(slots)


@pytest.mark.parametrize(("format", "dim", "pairs"), [("index_key", 128, 32), ("v4", 512, 16)])
def test_records_whose_rotary_channels_are_others(format, dim, pairs, rng):
    """A row is cut where the record's values end, wherever rotation begins."""
    cache = RecordCache.alloc(num_pages=2, page=4, format=format)
    q, kv, gain = rng.normal(size=(1, 2, dim)), rng.normal(size=(1, dim)), np.ones(dim)
    turn = rng.uniform(0, 6, size=(1, pairs))
    angles = jnp.asarray(np.cos(turn), jnp.float32), jnp.asarray(np.sin(turn), jnp.float32)
    given = *(jnp.asarray(x, jnp.float32) for x in (q, kv, gain)), angles, jnp.array([5])
    _, after = append_window(cache, *given, eps=EPS)
    exact = LatentCache.alloc(num_pages=2, page=4, rank=dim, rope=0, format="fp32")
    _, exact = append_window(exact, *given, eps=EPS)
    got, want = (gather_rows(c, jnp.array([5]), dtype="float32") for c in (after, exact))
    assert np.abs(got - want).max() < 0.07 * np.abs(want).max()


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "v4"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (9, 3), (30, 20)])
def test_against_the_truth(tokens, heads, format, backend, rng):
    dtype = {"fp16": "float16", "fp32": "float32"}.get(format, "bfloat16")
    cache, *rest, slots = v4_steps.window_inputs(rng, tokens, heads, format=format, dtype=dtype)
    slots[tokens // 2] = -1
    if tokens > 9:
        slots[3], slots[4] = SLOTS, -5
    before = np.asarray(cache.pages).copy()
    q, after = run(append_window, cache, *as_arrays(*rest, slots), eps=EPS, backend=backend)
    queries, rows = v4_steps.window_truth(*rest)
    near = v4_steps.near("fp32", dtype)
    np.testing.assert_allclose(np.asarray(q, np.float64), queries, **near)
    written = [t for t, s in enumerate(slots) if 0 <= s < SLOTS]
    got = gather_rows(after, jnp.asarray(slots[written]), dtype=jnp.float32)
    np.testing.assert_allclose(got, rows[written], **v4_steps.near(format, dtype))
    changed = (np.asarray(after.pages) != before).reshape(PAGES, -1)
    if isinstance(cache, LatentCache):
        changed = changed.reshape(SLOTS, -1)
        poison = np.isnan(np.asarray(after.pages, np.float32)).reshape(SLOTS, -1)
        changed = ~poison.all(1)
        assert sorted(np.flatnonzero(changed)) == sorted(slots[written])
    else:
        untouched = np.setdiff1d(np.arange(PAGES), slots[written] // PAGE)
        assert not changed[untouched].any()


def in_layer(cache, q, kv, gain, angles, slots, layer, *, backend):
    return append_window(cache, q, kv, gain, angles, slots, eps=EPS, layer=layer, backend=backend)


@pytest.mark.parametrize("format", ["bf16", "v4"])
@pytest.mark.parametrize("layer", [0, 2, 3, -1])
def test_one_layer_of_a_stack(layer, format, backend, rng):
    """The others stay; a layer that is not there stores nothing."""
    cache, *rest = v4_steps.window_inputs(rng, 6, 4, format=format, layers=3)
    given = as_arrays(*rest)
    _, after = run(in_layer, cache, *given, jnp.int32(layer), backend=backend)
    changed = [
        (np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)).any()
        for a, b in zip(cache.pages, after.pages, strict=True)
    ]
    assert changed == [i == layer for i in range(3)]
    if 0 <= layer < 3:
        alone = v4_steps.window_inputs(rng, 6, 4, format=format)[0]
        _, single = run(append_window, alone, *given, eps=EPS, backend=backend)
        got, want = (np.asarray(x).view(np.uint8) for x in (after.pages[layer], single.pages))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ["bf16", "v4"])
def test_poisoned_padding(format, backend, rng):
    """NaN in the rows of padding reaches no row of the cache, nor another token's queries."""
    cache, q, kv, gain, turn, slots = v4_steps.window_inputs(rng, 8, 4, format=format)
    slots[5:] = -1
    q[5:], kv[5:] = np.nan, np.nan
    given = as_arrays(q, kv, gain, turn, slots)
    got, after = run(append_window, cache, *given, eps=EPS, backend=backend)
    assert np.isfinite(np.asarray(got[:5], np.float32)).all()
    rows = gather_rows(after, given[-1][:5], dtype=jnp.float32)
    assert np.isfinite(rows).all()


def test_no_tokens(backend, rng):
    cache, *rest = v4_steps.window_inputs(rng, 0, 4)
    q, after = run(append_window, cache, *as_arrays(*rest), eps=EPS, backend=backend)
    assert q.shape == (0, 4, 48)
    assert np.isnan(np.asarray(after.pages, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("format", ["bf16", "v4"])
def test_model_widths_past_31_bits(format, rng):
    """64 heads of 512, into the last layer of more than 2^31 elements; twice the same bits."""
    tokens, pages = 300, 32768
    widths = {"rank": 448, "rope": 64} if format == "bf16" else {}
    alloc = LatentCache.alloc if widths else RecordCache.alloc
    q, kv = draw(rng, tokens, 64, 512, dtype="bfloat16"), draw(rng, tokens, 512, dtype="bfloat16")
    gain, turn = draw(rng, 512, dtype="bfloat16"), rng.uniform(-3, 3, (tokens, 32))
    slots = pages * 64 - 1 - rng.permutation(tokens).astype(np.int32)
    given = as_arrays(q, kv, gain, turn, slots)
    step = jax.jit(in_layer, static_argnames="backend", donate_argnums=0)
    queries, rows = v4_steps.window_truth(q, kv, gain, turn)
    found = []
    for _ in range(2):
        cache = alloc(num_pages=pages, page=64, format=format, layers=3, **widths)
        assert cache.pages.size > 2**31
        got, cache = step(cache, *given, jnp.int32(2), backend="triton")
        stored = gather_rows(cache, given[-1], dtype=jnp.float32, layer=2)
        near = v4_steps.near("fp32", "bfloat16")
        np.testing.assert_allclose(np.asarray(got, np.float64), queries, **near)
        np.testing.assert_allclose(stored, rows, **v4_steps.near(format, "bfloat16"))
        assert not gather_rows(cache, given[-1], dtype=jnp.float32, layer=0).any()
        found.append([np.asarray(got).view(np.uint8), np.asarray(stored)])
        del cache
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_refusals(rng, our_errors, monkeypatch):
    cache, q, kv, gain, turn, slots = v4_steps.window_inputs(rng, 4, 2)
    given = as_arrays(q, kv, gain, turn, slots)
    with pytest.raises(ArgumentError, match="kv"):
        append_window(cache, given[0], given[1][:, 1:], *given[2:], eps=EPS)
    cpu = DeviceInfo(platform="cpu", kind="cpu")
    monkeypatch.setattr(DeviceInfo, "current", lambda: cpu)
    with pytest.raises(UnsupportedError, match="sm80"):
        append_window(cache, *given, eps=EPS, backend="triton")
    assert "xla: accepted" in ops.explain(OP, cache, *given, eps=EPS)


AOT = aot.available() or missing("triton")


def compiled_args(format, heads):
    """A function of one call for 128 tokens of a stack of 8 layers, and its arguments."""
    facts = {"num_pages": 512, "page": 64, "format": format, "layers": 8}
    widths = {"rank": 448, "rope": 64} if format == "bf16" else {}
    alloc = LatentCache.alloc if widths else RecordCache.alloc
    cache = jax.eval_shape(lambda: alloc(**facts, **widths))
    spec, low = jax.ShapeDtypeStruct, jnp.bfloat16

    def call(cache, q, kv, gain, cos, sin, slots, layer):
        given = cache, q, kv, gain, (cos, sin), slots
        return append_window(*given, eps=EPS, layer=layer, backend="triton")

    angle = spec((128, 32), jnp.float32)
    rows = spec((128, heads, 512), low), spec((128, 512), low), spec((512,), low)
    return call, (
        cache, *rows, angle, angle, spec((128,), jnp.int32), spec((), jnp.int32),
    )  # fmt: skip


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("format", ["bf16", "v4"])
def test_compiles_for_sm90_in_place(format, heads, monkeypatch):
    """One launch, and no copy of the cache."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    call, args = compiled_args(format, heads)
    compiled, _ = aot.compile_sm90(call, *args, donate=(0,))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 1, entry
    assert " copy(" not in entry and " fusion(" not in entry, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("format", ["bf16", "v4"])
def test_compiles_for_older_devices(format, sm, monkeypatch):
    """No e4m3 in hardware before sm89; tracing compiles the program."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: dataclasses.replace(aot.H200, sm=sm))
    call, args = compiled_args(format, 64)
    q, cache = jax.eval_shape(call, *args)
    assert q.shape == (128, 64, 512) and cache.pages.shape == args[0].pages.shape
