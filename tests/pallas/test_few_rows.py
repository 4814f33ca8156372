"""Products of few rows: every backend against float64, with the norm, the gate and the residual."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.ops import project_rows
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import draw, run
from tests.pallas.experts import missing

OP = "project_rows"
EPS = 1e-6
KINDS = {
    "plain": dict(outs=(48,)),
    "two": dict(outs=(96, 32), norm=True),
    "gated": dict(outs=(64, 64), norm=True, gated=True),
    "onto": dict(outs=(80,), onto=True),
    "all": dict(outs=(32, 32), norm=True, gated=True, onto=True),
}
KIND = pytest.mark.parametrize("kind", KINDS)


def inputs(rng, tokens, into, outs, *, norm=False, onto=False, gated=False, dtype="bfloat16"):
    """Rows, weights, and keywords in numpy."""
    x = draw(rng, tokens, into, dtype=dtype)
    weights = [draw(rng, into, n, dtype=dtype, std=into**-0.5) for n in outs]
    facts: dict = {"gated": gated}
    if norm:
        facts |= {"gain": draw(rng, into, dtype=dtype), "eps": EPS}
    if onto:
        facts["onto"] = draw(rng, tokens, outs[0], dtype=dtype)
    return x, weights, facts


def truth(x, weights, facts):
    """In float64, and how large what is added up is: errors are relative to it."""
    x, *weights = (np.asarray(a, np.float64) for a in (x, *weights))
    if "gain" in facts:
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS)
        x = x * np.asarray(facts["gain"], np.float64)
    found = [x @ w for w in weights]
    if facts["gated"]:
        found = [found[0] / (1 + np.exp(-found[0])) * found[1]]
    if "onto" in facts:
        found[0] = found[0] + np.asarray(facts["onto"], np.float64)
    return found


def judge(got, x, weights, facts):
    step = float(ml_dtypes.finfo(x.dtype).eps)
    want = truth(x, weights, facts)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == x.dtype and a.shape == b.shape
        # One rounding of the result; rows of gain * x that were rounded add up as noise, which a
        # gate multiplies with the other product.
        noise = (6 if facts["gated"] else 2) * step
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=step, atol=noise)


def call(x, weights, arrays, **static):
    return project_rows(x, weights, **arrays, **static)


def solve(x, weights, facts, backend):
    arrays = {k: jnp.asarray(v) for k, v in facts.items() if k in ("gain", "onto")}
    static = {k: v for k, v in facts.items() if k not in arrays}
    weights = tuple(map(jnp.asarray, weights))
    return run(call, jnp.asarray(x), weights, arrays, **static, backend=backend)


@KIND
@pytest.mark.parametrize("into", [64, 320, 2048])
@pytest.mark.parametrize("tokens", [1, 8, 17, 32])
def test_against_the_truth(tokens, into, kind, backend, rng):
    x, weights, facts = inputs(rng, tokens, into, **KINDS[kind])
    judge(solve(x, weights, facts, backend), x, weights, facts)


@KIND
def test_a_row_alone_is_the_row_among_neighbours(kind, backend, rng):
    """Bit for bit, whatever its place, and with NaN in all others."""
    x, weights, facts = inputs(rng, 32, 512, **KINDS[kind])
    whole = [np.asarray(y) for y in solve(x, weights, facts, backend)]
    order = rng.permutation(32)
    more = {k: v[order] if k == "onto" else v for k, v in facts.items()}
    for a, b in zip(whole, solve(x[order], weights, more, backend), strict=True):
        assert a[order].tobytes() == np.asarray(b).tobytes()
    poisoned = np.full_like(x, np.nan)
    poisoned[11] = x[11]
    for a, b in zip(whole, solve(poisoned, weights, facts, backend), strict=True):
        assert a[11].tobytes() == np.asarray(b)[11].tobytes()


@pytest.mark.gpu
@KIND
def test_a_row_has_the_same_bits_in_any_number_of_rows(kind, rng):
    x, weights, facts = inputs(rng, 32, 2048, **KINDS[kind])
    whole = [np.asarray(y) for y in solve(x, weights, facts, "triton")]
    for n in (1, 8, 16, 17):
        more = {k: v[:n] if k == "onto" else v for k, v in facts.items()}
        for a, b in zip(whole, solve(x[:n], weights, more, "triton"), strict=True):
            assert a[:n].tobytes() == np.asarray(b).tobytes(), n


@KIND
def test_a_row_of_zeros(kind, backend, rng):
    """``eps`` keeps its norm from being a division by zero."""
    x, weights, facts = inputs(rng, 3, 64, **KINDS[kind])
    x[1] = 0
    first = np.asarray(solve(x, weights, facts, backend)[0], np.float32)[1]
    want = np.asarray(facts["onto"], np.float32)[1] if "onto" in facts else np.zeros_like(first)
    np.testing.assert_array_equal(first, want)


@KIND
def test_no_rows(kind, backend, rng):
    x, weights, facts = inputs(rng, 0, 64, **KINDS[kind])
    shapes = [y.shape for y in solve(x, weights, facts, backend)]
    assert shapes == [(0, n) for n in KINDS[kind]["outs"][: len(shapes)]]


def test_refusals(rng):
    x, weights, _ = inputs(rng, 4, 64, (32, 48))

    def explained(x=x, weights=tuple(weights), **facts):
        return ops.explain(OP, x, weights, **facts)

    with pytest.raises(ArgumentError, match="weights: given 3"):
        explained(weights=(*weights, weights[0]))
    with pytest.raises(ArgumentError, match="weights: given 1; allowed: 2"):
        explained(weights=tuple(weights[:1]), gated=True)
    with pytest.raises(ArgumentError, match=r"weights\[1\]"):
        explained(gated=True)
    with pytest.raises(ArgumentError, match="onto"):
        explained(onto=x[:, :32])
    with pytest.raises(ArgumentError, match="gain"):
        explained(gain=x[0, :32], eps=EPS)
    with pytest.raises(ArgumentError, match="dtypes"):
        explained(x=x.astype(np.float32))
    assert "xla: accepted" in explained()


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("tokens", [8, 32])
@pytest.mark.parametrize("kind", ["two", "gated", "onto"])
def test_compiles_for_sm90_from_stacks(kind, tokens, monkeypatch):
    """One launch a layer, and no weight is copied out of its stack."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, low = jax.ShapeDtypeStruct, jnp.bfloat16
    facts = KINDS[kind]
    outs = {"two": (3072, 576), "gated": (2816, 2816), "onto": (2048,)}[kind]
    stacks = tuple(spec((5, 2048, n), low) for n in outs)

    def step(x, gain, stacks):
        def layer(x, w):
            more = {"gain": gain, "eps": EPS} if "norm" in facts else {}
            more |= {"onto": x} if "onto" in facts else {}
            more |= {"gated": "gated" in facts, "backend": "triton"}
            return x, project_rows(x, w, **more)[0]

        return jax.lax.scan(layer, x, stacks)[1]

    options = {"xla_gpu_enable_dynamic_slice_fusion": True}
    args = spec((tokens, 2048), low), spec((2048,), low), stacks
    compiled, _ = aot.compile_sm90(step, *args, options=options)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 << 20
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
