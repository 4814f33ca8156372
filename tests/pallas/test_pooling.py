"""V4's compressed states: every backend against numpy, however sequences are cut into steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache import LatentCache, RecordCache, StatePool
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.metadata.deepseek_v4 import PoolMetadata
from mla_jax.ops import gather_rows, pool_states
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import run
from tests.pallas import v4_steps
from tests.pallas.experts import missing
from tests.pallas.v4_steps import EPS, Memory, cuts, sequences

OP = "pool_states"
LENS = (40, 17, 3, 0, 8)
KINDS = {
    "overlap_fp32": dict(),
    "disjoint_fp32": dict(ratio=16, overlap=False),
    "overlap_two": dict(formats=("fp32", "fp32")),
    "overlap_bf16": dict(formats=("bf16", "bf16"), dtype="bfloat16"),
    "records": dict(formats=("v4", "index_key"), dtype="bfloat16"),
    "disjoint_records": dict(ratio=16, overlap=False, formats=("v4",), dtype="bfloat16"),
}


def walked(rng, memory, most, backend, *, tokens=48, layer=None):
    """The memory after the sequences came in random steps."""
    ring, caches = memory.ring, memory.caches
    facts = {} if layer is None else {"layer": layer}
    for done, take in cuts(rng, np.array(memory.s.lens), most):
        step = memory.step(done, take, tokens=tokens)
        ring, caches = run(pool_states, *step.args(ring, caches), eps=EPS, backend=backend, **facts)
    return ring, caches


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_truth(kind, most, backend, rng):
    """Steps of one token and of up to nine: groups end within chunks, at their borders, in none."""
    s = sequences(rng, LENS, **KINDS[kind])
    memory = Memory(rng, s)
    _, caches = walked(rng, memory, most, backend)
    for i, cache in enumerate(caches):
        near = v4_steps.near(s.formats[i], s.dtype)
        for r in range(len(s.lens)):
            got = gather_rows(cache, jnp.asarray(memory.rows(r)), dtype=jnp.float32)
            np.testing.assert_allclose(got, s.truth(i, r), **near)
        if isinstance(cache, LatentCache):  # rows of nobody stay as they were
            rows = np.isnan(np.asarray(cache.pages, np.float32)).all(-1).reshape(-1)
            written = np.concatenate([memory.rows(r) for r in range(len(s.lens))])
            assert sorted(np.flatnonzero(~rows)) == sorted(written)


@pytest.mark.parametrize("kind", ["overlap_fp32", "disjoint_fp32", "records"])
def test_any_cut_gives_the_same_bits(kind, backend, rng):
    """Token by token, in small steps, and at once."""
    s = sequences(rng, LENS, **KINDS[kind])
    memory = Memory(rng, s)
    tokens = sum(s.lens)
    whole = memory.step([0] * len(LENS), list(LENS), tokens=tokens)
    given = whole.args(memory.ring, memory.caches)
    _, want = run(pool_states, *given, eps=EPS, backend=backend)
    for most in (1, 5):
        _, caches = walked(rng, memory, most, backend, tokens=tokens)
        for a, b in zip(want, caches, strict=True):
            np.testing.assert_array_equal(*(np.asarray(x.pages).view(np.uint8) for x in (a, b)))


def test_one_layer_of_a_stack(backend, rng):
    """The others stay; a layer that is not there stores nothing, in ring or cache."""
    s = sequences(rng, LENS)
    memory = Memory(rng, s, layers=3)
    step = memory.step([0] * len(LENS), list(LENS), tokens=80)
    given = step.args(memory.ring, memory.caches)

    def in_layer(ring, pools, meta, positions, angles, layer, *, backend):
        return pool_states(
            ring, pools, meta, positions, angles, eps=EPS, layer=layer, backend=backend
        )

    for layer in (0, 2, 3, -1):
        ring, (cache,) = run(in_layer, *given, jnp.int32(layer), backend=backend)
        for x in (ring, cache):
            changed = ~np.isnan(np.asarray(x.pages)).reshape(3, -1)
            assert changed.any(1).tolist() == [i == layer for i in range(3)]


def test_nothing_to_do(backend, rng):
    """Padding alone, and tokens that complete no group: no state, no row of a finished ring."""
    s = sequences(rng, (3, 3))
    memory = Memory(rng, s)
    step = memory.step([0, 0], [0, 0], tokens=6)
    ring, (cache,) = run(
        pool_states, *step.args(memory.ring, memory.caches), eps=EPS, backend=backend
    )
    assert np.isnan(np.asarray(ring.pages)).all() and np.isnan(np.asarray(cache.pages)).all()
    step = memory.step([0, 0], [2, 3], tokens=6)
    ring, (cache,) = run(
        pool_states, *step.args(memory.ring, memory.caches), eps=EPS, backend=backend
    )
    assert np.isnan(np.asarray(cache.pages)).all()
    rows = ~np.isnan(np.asarray(ring.pages)).all(-1).reshape(-1)
    assert rows.sum() == 5


def test_a_state_without_a_slot(backend, rng):
    """Slot -1 stores nothing; the others are stored all the same."""
    s = sequences(rng, (8, 8))
    memory = Memory(rng, s)
    step = memory.step([0, 0], [8, 8], tokens=16)
    slots = step.pools[0].slots.at[3].set(-1)
    pools = (dataclasses.replace(step.pools[0], slots=slots),)
    step = dataclasses.replace(step, pools=pools)
    _, (cache,) = run(pool_states, *step.args(memory.ring, memory.caches), eps=EPS, backend=backend)
    got = gather_rows(cache, jnp.asarray(memory.rows(0)), dtype=jnp.float32)
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1], s.truth(0, 0)[1], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_model_widths_past_31_bits(rng):
    """Groups of 128, in the last layer of rings of more than 2^31 elements, as records."""
    s = sequences(rng, (300, 130), ratio=128, overlap=False, formats=("v4",), dtype="bfloat16")
    memory = Memory(rng, s, layers=3, extra=5500)
    ring, caches = memory.ring, memory.caches
    assert ring.pages.size > 2**31
    memory.ring, memory.caches = None, (None,)

    @functools.partial(jax.jit, donate_argnums=(0, 1))  # 9 GB are there once
    def stepped(ring, caches, pools, meta, positions, angles, layer):
        pairs = zip(pools, caches, strict=True)
        pools = tuple(dataclasses.replace(p, cache=c) for p, c in pairs)
        facts = {"eps": EPS, "layer": layer, "backend": "triton"}
        return pool_states(ring, pools, meta, positions, angles, **facts)

    for done, take in cuts(rng, np.array(s.lens), 90):
        step = memory.step(done, take, tokens=180)
        rest = step.meta, step.common.positions, step.angles, jnp.int32(2)
        ring, caches = stepped(ring, caches, step.pools, *rest)
    (cache,) = caches
    for r in range(2):
        got = gather_rows(cache, jnp.asarray(memory.rows(r)), dtype=jnp.float32, layer=2)
        np.testing.assert_allclose(got, s.truth(0, r), **v4_steps.near("v4", "bfloat16"))


def test_refusals(rng, our_errors, monkeypatch):
    s = sequences(rng, (8,))
    memory = Memory(rng, s)
    step = memory.step([0], [8], tokens=8)
    ring, (pool,), *rest = step.args(memory.ring, memory.caches)

    def asked(ring=ring, backend=None, **changes):
        changed = dataclasses.replace(pool, **changes)
        return pool_states(ring, (changed,), *rest, eps=EPS, backend=backend)

    with pytest.raises(ArgumentError, match=r"pools\[0\]: gates.*tokens"):
        asked(gates=pool.gates[1:])
    with pytest.raises(ArgumentError, match="halves: given 1 for 8 places of groups of 4"):
        asked(values=pool.values[:, :1], gates=pool.gates[:, :1], bias=pool.bias[:, :1])
    with pytest.raises(ArgumentError, match="columns of the ring: given 95; allowed: 96"):
        asked(ring=dataclasses.replace(ring, pages=ring.pages[..., 1:]))
    cpu = DeviceInfo(platform="cpu", kind="cpu")
    monkeypatch.setattr(DeviceInfo, "current", lambda: cpu)
    with pytest.raises(UnsupportedError, match="sm80"):
        asked(backend="triton")


AOT = aot.available() or missing("triton")


def compiled_args(format, ratio):
    """A function of one call for 128 tokens of a stack of 8 layers, and its arguments."""
    halves, tokens, layers = (2 if ratio == 4 else 1), 128, 8
    dims = (512, 128) if ratio == 4 else (512,)
    formats = format, {"bf16": "bf16", "v4": "index_key"}[format]
    spec, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    span = ratio * halves

    def cache(format, dim):
        facts = {"num_pages": 64, "page": 64, "format": format, "layers": layers}
        if format == "bf16":
            return LatentCache.alloc(rank=dim - 64, rope=64, **facts)
        return RecordCache.alloc(**facts)

    def ring():
        columns = sum(2 * halves * d for d in dims)
        facts = {"num_pages": 128, "page": span, "format": "fp32", "layers": layers}
        return LatentCache.alloc(rank=columns, rope=0, **facts)

    pools = tuple(
        StatePool(
            cache=None,  # given apart, to be donated
            values=spec((tokens, halves, d), f32),
            gates=spec((tokens, halves, d), f32),
            bias=spec((ratio, halves, d), f32),
            gain=spec((d,), jnp.bfloat16),
            slots=spec((tokens,), i32),
        )
        for d in dims
    )
    meta = PoolMetadata(
        overlap=halves == 2,
        ends=spec((128,), i32),
        first=spec((128,), i32),
        tokens=spec((128, span), i32),
        kept=spec((128, span), i32),
        keep=spec((tokens,), i32),
    )

    def call(ring, caches, pools, meta, positions, cos, sin, layer):
        facts = {"eps": EPS, "layer": layer, "backend": "triton"}
        pairs = zip(pools, caches, strict=True)
        pools = tuple(dataclasses.replace(p, cache=c) for p, c in pairs)
        return pool_states(ring, pools, meta, positions, (cos, sin), **facts)

    angle = spec((128, 32), f32)
    rest = meta, spec((tokens,), i32), angle, angle, spec((), i32)
    caches = tuple(
        jax.eval_shape(lambda f=f, d=d: cache(f, d)) for f, d in zip(formats, dims, strict=False)
    )
    return call, (jax.eval_shape(ring), caches, pools, *rest)


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("format", ["bf16", "v4"])
def test_compiles_for_sm90_in_place(format, ratio, monkeypatch):
    """Two launches for each pool, and no copy of ring or caches."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    call, args = compiled_args(format, ratio)
    compiled, _ = aot.compile_sm90(call, *args, donate=(0, 1))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    launches = entry.count('custom_call_target="triton_kernel_call_ffi"')
    assert launches == 2 * len(args[1]), entry
    assert " copy(" not in entry and " fusion(" not in entry, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("ratio", [4, 128])
def test_compiles_for_older_devices(ratio, sm, monkeypatch):
    """No e4m3 in hardware before sm89; tracing compiles the programs."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: dataclasses.replace(aot.H200, sm=sm))
    call, args = compiled_args("v4", ratio)
    ring, caches = jax.eval_shape(call, *args)
    assert ring.pages.shape == args[0].pages.shape and len(caches) == len(args[1])
