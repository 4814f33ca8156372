"""A step's new rows: every backend against numpy, and against the operations that it fuses."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import LatentCache, ops
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.model import mla
from mla_jax.ops import append_latent
from mla_jax.pallas.device import DeviceInfo
from tests import aot, traffic
from tests.cases import draw, run
from tests.pallas.experts import missing

OP = "append_latent"
RANK, NOPE, ROPE, PAGE, PAGES, EPS = 96, 48, 16, 8, 5, 1e-6
POISON = 7.0


def inputs(rng, tokens, heads, *, dtype, format="bf16", layers=None):
    """Arguments; the cache is full of one value, so that every write is seen."""
    cache = LatentCache.alloc(
        num_pages=PAGES, page=PAGE, rank=RANK, rope=ROPE, format=format, layers=layers,
        scale=0.25 if format.startswith("fp8") else 1.0,
    )  # fmt: skip
    cache = dataclasses.replace(cache, pages=jnp.full_like(cache.pages, POISON))
    angle = rng.uniform(-3, 3, (tokens, ROPE // 2)).astype(np.float32)
    slots = rng.permutation(PAGES * PAGE)[:tokens].astype(np.int32)
    return (
        cache,
        draw(rng, tokens, heads, NOPE + ROPE, dtype=dtype),
        draw(rng, tokens, RANK + ROPE, dtype=dtype),
        draw(rng, RANK, dtype=dtype),
        (np.cos(angle), np.sin(angle)),
        slots,
    )


def rotated(x, cos, sin, interleaved):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    out = np.empty_like(x)
    left, right = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        out[..., 0::2], out[..., 1::2] = left, right
    else:
        out[..., : x.shape[-1] // 2], out[..., x.shape[-1] // 2 :] = left, right
    return out


def truth(q, kv, gain, angles, interleaved):
    """Queries and rows in float64, not rounded."""
    q, kv, gain, cos, sin = (np.asarray(a, np.float64) for a in (q, kv, gain, *angles))
    latent = kv[:, :RANK]
    latent = gain * latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + EPS)
    key = rotated(kv[:, RANK:], cos, sin, interleaved)
    q_rope = rotated(q[..., NOPE:], cos[:, None], sin[:, None], interleaved)
    return q[..., :NOPE], q_rope, np.concatenate([latent, key], axis=1)


def step_of(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp8_e4m3"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (9, 3), (30, 40)])
def test_against_the_truth(tokens, heads, format, interleaved, backend, rng):
    dtype = {"fp16": "float16", "fp32": "float32"}.get(format, "bfloat16")
    cache, *rest, slots = inputs(rng, tokens, heads, dtype=dtype, format=format)
    slots[tokens // 2] = -1
    if tokens > 9:
        slots[3], slots[4] = PAGES * PAGE, -5
    q_nope, q_rope, after = run(
        append_latent, cache, *map(as_arrays, rest), jnp.asarray(slots),
        eps=EPS, interleaved=interleaved, backend=backend,
    )  # fmt: skip
    want = truth(*rest, interleaved)
    np.testing.assert_array_equal(np.asarray(q_nope, np.float64), want[0])
    near = dict(rtol=1.1 * step_of(dtype), atol=2e-6)
    np.testing.assert_allclose(np.asarray(q_rope, np.float64), want[1], **near)
    rows = np.asarray(after.pages.astype(jnp.float32), np.float64).reshape(PAGES * PAGE, -1)
    rows = rows * float(cache.scale)
    stored = step_of(cache.pages.dtype) * 1.1 + near["rtol"]
    small = 0.25 * 2.0**-10 if format.startswith("fp8") else 2e-6
    written = [t for t, s in enumerate(slots) if 0 <= s < PAGES * PAGE]
    np.testing.assert_allclose(rows[slots[written]], want[2][written], rtol=stored, atol=small)
    others = np.setdiff1d(np.arange(PAGES * PAGE), slots[written])
    assert (rows[others] == POISON * float(cache.scale)).all(), "a row that nobody names"


def test_a_row_of_zeros_stays_zero(backend, rng):
    """``eps`` keeps its norm from being a division by zero."""
    cache, q, kv, gain, angles, slots = inputs(rng, 3, 4, dtype="float32", format="fp32")
    kv = np.zeros_like(kv)
    args = map(as_arrays, (q, kv, gain, angles, slots))
    _, _, after = run(append_latent, cache, *args, eps=EPS, interleaved=True, backend=backend)
    rows = np.asarray(after.pages).reshape(PAGES * PAGE, -1)
    assert not rows[slots].any()


def as_arrays(x):
    return jax.tree.map(jnp.asarray, x)


def in_layer(cache, q, kv, gain, angles, slots, layer, *, backend):
    return append_latent(
        cache, q, kv, gain, angles, slots, eps=EPS, interleaved=True, layer=layer, backend=backend
    )


@pytest.mark.parametrize("layer", [0, 2, 3, -1])
def test_one_layer_of_a_stack(layer, backend, rng):
    """The others stay; a layer that is not there stores nothing."""
    cache, *rest = inputs(rng, 6, 4, dtype="bfloat16", layers=3)
    rest = [*map(as_arrays, rest)]
    _, _, after = run(in_layer, cache, *rest, jnp.int32(layer), backend=backend)
    alone = dataclasses.replace(cache, pages=cache.pages[0], scale=cache.scale[0])
    _, _, single = run(append_latent, alone, *rest, eps=EPS, interleaved=True, backend=backend)
    want = np.full(cache.pages.shape, POISON, np.float32)
    if 0 <= layer < 3:
        want[layer] = np.asarray(single.pages, np.float32)
    np.testing.assert_array_equal(np.asarray(after.pages, np.float32), want)


def test_poisoned_padding(backend, rng):
    """NaN in the rows of padding reaches no row of the cache, nor another token's queries."""
    cache, q, kv, gain, angles, slots = inputs(rng, 8, 4, dtype="bfloat16")
    slots[5:] = -1
    q[5:], kv[5:] = np.nan, np.nan
    given = [*map(as_arrays, (q, kv, gain, angles, slots))]
    q_nope, q_rope, after = run(
        append_latent, cache, *given, eps=EPS, interleaved=True, backend=backend
    )
    for x in (q_nope[:5], q_rope[:5], after.pages):
        assert np.isfinite(np.asarray(x, np.float32)).all()


def absorbing(cache, q, kv, gain, angles, slots, up_k, *, backend):
    return append_latent(
        cache, q, kv, gain, angles, slots, eps=EPS, interleaved=True, up_k=up_k, backend=backend
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (5, 3), (16, 16), (17, 3)])
def test_queries_meet_the_up_projection(tokens, heads, dtype, backend, rng):
    """Its product is float64's, rounded once; rotated queries and rows are the same bits."""
    cache, *rest = inputs(rng, tokens, heads, dtype=dtype)
    rest[-1][tokens // 2] = -1
    up_k = draw(rng, heads, NOPE, RANK, dtype=dtype)
    rest = [*map(as_arrays, rest)]
    q_latent, *others = run(absorbing, cache, *rest, jnp.asarray(up_k), backend=backend)
    _, *same = run(append_latent, cache, *rest, eps=EPS, interleaved=True, backend=backend)
    q, up_k = np.asarray(rest[0], np.float64), up_k.astype(np.float64)
    want = np.einsum("thd,hdr->thr", q[..., :NOPE], up_k)
    assert q_latent.dtype == dtype and q_latent.shape == (tokens, heads, RANK)
    near = dict(rtol=0.51 * step_of(dtype), atol=2e-5)
    np.testing.assert_allclose(np.asarray(q_latent, np.float64), want, **near)
    for a, b in zip(*map(jax.tree.leaves, (others, same)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_poisoned_padding_meets_the_up_projection(backend, rng):
    cache, q, kv, gain, angles, slots = inputs(rng, 8, 4, dtype="bfloat16")
    slots[5:] = -1
    q[5:], kv[5:] = np.nan, np.nan
    up_k = draw(rng, 4, NOPE, RANK, dtype="bfloat16")
    given = [*map(as_arrays, (q, kv, gain, angles, slots, up_k))]
    q_latent, q_rope, after = run(absorbing, cache, *given, backend=backend)
    for x in (q_latent[:5], q_rope[:5], after.pages):
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("absorbed", [False, True])
def test_no_tokens(absorbed, backend, rng):
    cache, *rest = inputs(rng, 0, 4, dtype="bfloat16")
    up_k = jnp.zeros((4, NOPE, RANK), jnp.bfloat16) if absorbed else None
    first, q_rope, after = run(absorbing, cache, *map(as_arrays, rest), up_k, backend=backend)
    assert first.shape == (0, 4, RANK if absorbed else NOPE) and q_rope.shape == (0, 4, ROPE)
    assert (np.asarray(after.pages, np.float32) == POISON).all()


def test_a_cache_without_rotary_channels(rng):
    cache = LatentCache.alloc(num_pages=2, page=4, rank=8, rope=0, format="fp32")
    q, kv = jnp.asarray(draw(rng, 3, 2, 6)), jnp.asarray(draw(rng, 3, 8))
    angles = jnp.zeros((3, 0)), jnp.zeros((3, 0))
    given = cache, q, kv, jnp.ones(8), angles, jnp.arange(3, dtype=jnp.int32)
    nope, rope, cache = append_latent(*given, eps=1e-6, interleaved=True)
    np.testing.assert_array_equal(nope, q)
    assert rope.shape == (3, 2, 0)
    want = kv / np.sqrt(np.mean(np.square(kv), axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(cache.pages[0, :3], want, rtol=1e-5)


def test_refusals(rng):
    cache, q, kv, gain, angles, slots = inputs(rng, 4, 2, dtype="bfloat16")

    def explained(q=q, kv=kv, angles=angles, up_k=None):
        given, facts = (cache, q, kv, gain, angles, slots), {"eps": EPS, "interleaved": True}
        return ops.explain(OP, *given, **facts, up_k=up_k)

    with pytest.raises(ArgumentError, match="kv"):
        explained(kv=kv[:, 1:])
    with pytest.raises(ArgumentError, match="dtypes"):
        explained(q=q.astype(np.float32))
    with pytest.raises(ArgumentError, match="cos"):
        explained(angles=(angles[0][:, 1:], angles[1]))
    assert "xla: accepted" in explained()
    up_k = draw(rng, 2, NOPE, RANK, dtype="bfloat16")
    for wrong in (up_k[1:], up_k[:, 1:], up_k[..., 1:], up_k[0]):
        with pytest.raises(ArgumentError, match="up_k"):
            explained(up_k=wrong)
    with pytest.raises(ArgumentError, match=r"dtypes.*up_k float32"):
        explained(up_k=up_k.astype(np.float32))
    assert "xla: accepted" in explained(up_k=up_k)


def test_the_model_takes_it_where_it_qualifies(rng, monkeypatch):
    """None: only where the kernel can run. Its name: always, and the call says what is missing."""
    given = inputs(rng, 4, 2, dtype="bfloat16")
    up_k = jnp.asarray(draw(rng, 2, NOPE, RANK, dtype="bfloat16"))
    facts = {"eps": EPS, "interleaved": True, "up_k": up_k}
    assert ops.in_one_kernel(OP, *given, backend="triton", **facts)
    assert not ops.in_one_kernel(OP, *given, backend="xla", **facts)
    cpu = DeviceInfo(platform="cpu", kind="cpu")
    monkeypatch.setattr(DeviceInfo, "current", lambda: cpu)
    assert not ops.in_one_kernel(OP, *given, **facts)
    with pytest.raises(UnsupportedError, match="sm89"):
        append_latent(*map(as_arrays, given), backend="triton", **facts)


@pytest.mark.parametrize("fewest", [8, 0])
def test_small_steps_of_the_model_absorb_in_it(fewest, monkeypatch):
    """Steps of decodes alone, of few tokens; the tokens that come are the same."""
    asked, call = [], ops.append_latent

    def recorded(*args, **facts):
        asked.append((len(args[1]), facts["up_k"] is not None))
        return call(*args, **facts)

    model, prompts = traffic.model(), [[1, 2, 3], [4, 5]]
    want = traffic.engine(model).generate(prompts)
    monkeypatch.setattr(mla, "FEWEST_ROWS", fewest)
    monkeypatch.setattr(ops, "in_one_kernel", lambda *_, **__: True)  # as on GPUs
    monkeypatch.setattr(ops, "append_latent", recorded)
    got = traffic.engine(model).generate(prompts)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert set(asked) == {(traffic.MOST, traffic.MOST <= fewest)}


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(
    ("tokens", "heads", "absorbed"),
    [(128, 16, False), (128, 128, False), (8, 16, True), (16, 128, True)],
)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_compiles_for_sm90_in_place(format, tokens, heads, absorbed, monkeypatch):
    """One launch, with the product of few tokens too, and no copy of the cache."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    cache = jax.eval_shape(
        lambda: LatentCache.alloc(
            num_pages=512, page=64, rank=512, rope=64, format=format, layers=8
        )
    )
    spec = jax.ShapeDtypeStruct
    low = jnp.bfloat16

    def call(cache, q, kv, gain, cos, sin, slots, layer, up_k=None):
        return append_latent(
            cache, q, kv, gain, (cos, sin), slots,
            eps=EPS, interleaved=True, layer=layer, up_k=up_k, backend="triton",
        )  # fmt: skip

    more = (spec((heads, 128, 512), low),) if absorbed else ()
    compiled, _ = aot.compile_sm90(
        call, cache, spec((tokens, heads, 192), low), spec((tokens, 576), low), spec((512,), low),
        spec((tokens, 32), jnp.float32), spec((tokens, 32), jnp.float32),
        spec((tokens,), jnp.int32), spec((), jnp.int32), *more, donate=(0,),
    )  # fmt: skip
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 1, entry
    assert " copy(" not in entry and " fusion(" not in entry, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
