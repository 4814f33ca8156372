"""Products of e4m3 rows with e4m3 weights: interpreted, compiled for an H200, and on a GPU.

Two truths: what the quantised rows give, tightly, and what the rows give, as loosely as e4m3 is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax import ops
from mla_jax.errors import UnsupportedError
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.fp8_matmul import ref, xla
from mla_jax.pallas.grouped_matmul import tiles
from mla_jax.pallas.registry import Problem
from mla_jax.types import BlockScaled
from tests import aot
from tests.cases import draw
from tests.pallas.experts import missing, module_of, truth
from tests.pallas.test_fp8_matmul import experts, weight, wide

mosaic = module_of("fp8_matmul.mosaic")  # its rows are quantised in Triton

F8 = ml_dtypes.float8_e4m3fn
TIGHT, LOOSE = 0.006, 0.05
"""Relative errors: of bf16 results and the tensor core's 13 bits, and of rows with 3 digits."""


def quantised(x):
    """``(values, scales [spans, rows])`` of rows, as the kernels make them."""
    x = np.asarray(x, np.float32)
    spans = x.reshape(len(x), -1, 128)
    top = np.abs(spans).max(axis=2)
    scale = np.where(top == 0, np.float32(1), top / np.float32(448))
    return (spans / scale[:, :, None]).reshape(x.shape).astype(F8), scale.T


def dequantised(x):
    values, scale = quantised(x)
    return values.astype(np.float64) * np.repeat(scale.T, 128, axis=1)


def error(got, want):
    got = np.asarray(got).astype(np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_rows_are_quantised_only_where_asked_for():
    """By the kernel of many rows, from so many on."""
    pytest.importorskip("triton")
    facts: dict = {"dtype": "bfloat16", "into": 7168, "out": 1536}
    facts |= {"groups": 1, "group_outputs": 0}
    for tokens, exact, quantised in (
        (64, "triton", "xla"), (65, "xla", "xla"), (511, "xla", "xla"), (512, "xla", "mosaic"),
    ):  # fmt: skip
        for flag, name in ((False, exact), (True, quantised)):
            problem = Problem.of("matmul_fp8", tokens=tokens, quantise_rows=flag, **facts)
            assert ops.REGISTRY.choose(problem, aot.H200).name == name
    fewer = Problem.of("matmul_fp8", tokens=511, quantise_rows=True, **facts)
    with pytest.raises(UnsupportedError, match=r"tokens=511 not in \[512, …\]"):
        ops.REGISTRY.choose(fewer, aot.H200, "mosaic")
    unasked = Problem.of("matmul_fp8", tokens=512, quantise_rows=False, **facts)
    with pytest.raises(UnsupportedError, match=r"quantise_rows=False not in {True}"):
        ops.REGISTRY.choose(unasked, aot.H200, "mosaic")
    facts = {"experts": 256, "topk": 8, "hidden": 7168, "width": 2048, "tokens": 8192}
    facts |= {"dtype": "bfloat16", "rows_each": 256}
    for flag, name in ((False, "triton"), (True, "mosaic")):
        problem = Problem.of("routed_experts_fp8", **facts, quantise_rows=flag)
        assert ops.REGISTRY.choose(problem, aot.H200).name == name


def test_quantised_rows_on_any_device(rng):
    """``ref`` and ``xla`` round rows as the kernels do; another span of channels is not touched."""
    w = weight(rng, 200, 640, std=640**-0.5)
    x = draw(rng, 33, 640)
    x[:, :128] *= 30
    x[5] = 0
    want = dequantised(x) @ wide(w).T
    for backend in (ref.matmul_fp8, xla.matmul_fp8):
        got = jax.jit(functools.partial(backend, quantise_rows=True))(jnp.asarray(x), w)
        assert error(got, want) < 1e-6 and not np.asarray(got)[5].any()
    low = x.astype(ml_dtypes.bfloat16)
    got = ops.matmul_fp8(jnp.asarray(low), w, quantise_rows=True, backend="xla")
    assert error(got, dequantised(low) @ wide(w).T) < TIGHT


def test_rows_of_tiny_numbers():
    """A 448th of 1e-36 is no normal float32: no scale may become 0."""
    w = BlockScaled(values=jnp.ones((8, 128), jnp.float8_e4m3fn), scale=jnp.ones((1, 1)))
    x = jnp.full((1, 128), 1e-36)
    for backend in (ref.matmul_fp8, xla.matmul_fp8):
        got = jax.jit(functools.partial(backend, quantise_rows=True))(x, w)
        assert error(got, np.full((1, 8), 1.28e-34)) < 0.05


@pytest.mark.parametrize("limit", [None, 0.7])
def test_quantised_experts_on_any_device(limit, rng):
    c, args = experts(rng, 30, experts=4, topk=2, hidden=256, width=128, dtype="float32")
    want = _as_kernels_do(c, limit)
    for backend in (ref.routed_experts_fp8, xla.routed_experts_fp8):
        run = functools.partial(backend, limit=limit, then=None, quantise_rows=True)
        assert error(jax.jit(run)(*args), want) < TIGHT
    assert error(ref.routed_experts_fp8(*args, limit=limit), want) > 2 * TIGHT


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
def test_interpreted_with_race_detection(cluster, gated, rng, monkeypatch):
    """Control flow, barriers, races and scales on a CPU; not asynchrony of products."""
    from mla_jax.pallas.fp8_matmul import mosaic_sm90
    from mla_jax.pallas.grouped_matmul.mosaic_sm90 import Sizes

    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    rows, channels, columns = 96, 256, 128 if gated else 320
    x = draw(rng, rows, channels)
    x[:, :128] *= 30
    values, scales = quantised(x)
    w = [weight(rng, 2, columns, channels, std=channels**-0.5) for _ in range(1 + gated)]
    # expert, first tile of the group, tiles of it, row / 8, size
    alone = [[0, 0, 1, 0, 0], [1, 1, 2, 4, 0], [1, 1, 2, 8, 0], [-1] * 5]
    pairs = [[0, 0, 2, 0, 0], [0, 0, 2, 0, -1], [1, 2, 2, 4, 0], [1, 2, 2, 8, 0], [-1] * 5]
    table = np.array((alone, pairs)[cluster - 1], np.int32)
    used, sizes = (
        len(table) - 1,
        Sizes(most=32, step=32, stages=2, workers=2 * cluster, cluster=cluster),
    )
    table = np.pad(table, ((0, 0), (0, tiles.FIELDS - 5)))
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    got = mosaic_sm90.multiply(
        jnp.asarray(values), jnp.asarray(scales), tuple(w), jnp.asarray(table),
        jnp.asarray([used], jnp.int32), sizes=sizes, out_dtype=jnp.bfloat16,
        interpret=params,
    )  # fmt: skip
    assert not get_races().races_found
    owner = np.repeat([0, 1], [32, 64])
    parts = [np.einsum("rc,roc->ro", dequantised(x), wide(m)[owner]) for m in w]
    want = parts[0] / (1 + np.exp(-parts[0])) * parts[1] if gated else parts[0]
    assert error(got, want) < TIGHT


@pytest.mark.slow
@pytest.mark.parametrize("multipliers", [2, 3])
def test_one_matrix_interpreted_with_race_detection(multipliers, rng, monkeypatch):
    """Tiles that end within rows and columns, several of a thread block, slots used again."""
    from mla_jax.pallas.fp8_matmul import matrix_sm90

    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    rows, channels, columns = 264, 384, 320
    x = draw(rng, rows, channels)
    x[:, :128] *= 30
    values, scales = quantised(x)
    w = weight(rng, columns, channels, std=channels**-0.5)
    sizes = matrix_sm90.Sizes(multipliers=multipliers, stages=2, workers=2, together=2)
    got = matrix_sm90.multiply(
        jnp.asarray(values), jnp.asarray(scales), w, sizes=sizes, out_dtype=jnp.bfloat16,
        interpret=plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4),
    )  # fmt: skip
    assert not get_races().races_found
    assert error(got, dequantised(x) @ wide(w).T) < TIGHT


@pytest.mark.skipif(mosaic is None, reason=missing("triton") or "installed")
def test_two_or_three_multipliers():
    """Those whose busiest thread block ends first."""

    def multipliers(tokens, columns):
        return mosaic.sizes_of(tokens, columns, workers=132).multipliers

    assert multipliers(4096, 7168) == 3  # ten turns of 192 rows, or fourteen of 128
    assert multipliers(1024, 4096) == 2  # two turns in both cases
    assert multipliers(4096, 2112) == 3  # three turns, or five


def test_scales_of_a_step_begin_where_the_copy_engine_writes():
    """At multiples of 128 bytes, whatever the rows of a tile."""
    from mla_jax.pallas.fp8_matmul import mosaic_sm90
    from mla_jax.pallas.grouped_matmul.mosaic_sm90 import Sizes

    for rows in range(8, 97, 8):
        sizes = Sizes(most=rows, step=8, stages=4, workers=132)
        scales = mosaic_sm90.scratch(sizes, jnp.bfloat16)["x_scale"]
        assert scales.shape[1] >= rows and 4 * scales.shape[1] % 128 == 0


AOT = aot.available() or missing("triton")


def scaled(*shape):
    blocks = *shape[:-2], -(-shape[-2] // 128), shape[-1] // 128
    s: Any = jax.ShapeDtypeStruct
    return BlockScaled(values=s(shape, jnp.float8_e4m3fn), scale=s(blocks, jnp.float32))


def judged(fn, *args, launches):
    compiled, reports = aot.compile_sm90(fn, *args)
    for report in reports:
        assert not report.spilled and not report.serialized, report.log
        assert not report.register_limits_ignored and report.shared <= 232448, report.log
    assert compiled.as_text().count("custom-call(") == launches


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(("tokens", "out"), [(4096, 7168), (1000, 576), (1024, 2112)])
def test_compiles_a_product(tokens, out, monkeypatch):
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    x = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)
    judged(lambda *a: ops.matmul_fp8(*a, quantise_rows=True), x, scaled(out, 2048), launches=2)


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
def test_compiles_the_experts(monkeypatch):
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    s = jax.ShapeDtypeStruct
    judged(
        lambda *a: ops.routed_experts_fp8(*a, limit=10.0, quantise_rows=True),
        s((2048, 7168), jnp.bfloat16), scaled(32, 2048, 7168), scaled(32, 2048, 7168),
        scaled(32, 7168, 2048), s((2048, 8), jnp.float32), s((2048, 8), jnp.int32),
        launches=7,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "out", "into"),
    [(512, 256, 128), (1001, 576, 512), (7, 192, 256), (1024, 2112, 256), (4097, 2112, 256)],
)
def test_a_product_on_the_device(tokens, out, into, dtype, rng):
    """Rows and columns that end within a tile; two multipliers, and three."""
    w = weight(rng, out, into, std=into**-0.5)
    x = draw(rng, tokens, into, dtype=dtype)
    x[:, :128] *= 30
    x[tokens // 2] = 0
    got = jax.jit(mosaic.matmul_fp8)(jnp.asarray(x), w)
    assert got.dtype == x.dtype and got.shape == (tokens, out)
    assert error(got, dequantised(x) @ wide(w).T) < TIGHT
    assert error(got, x.astype(np.float64) @ wide(w).T) < LOOSE
    assert not np.asarray(got)[tokens // 2].any()


@pytest.mark.gpu
def test_a_row_is_its_own_on_the_device(rng):
    w, x = weight(rng, 256, 512, std=0.05), jnp.asarray(draw(rng, 300, 512, dtype="bfloat16"))
    run = jax.jit(mosaic.matmul_fp8)
    whole = np.asarray(run(x, w))
    order = rng.permutation(300)
    assert np.asarray(run(x[order], w)).tobytes() == whole[order].tobytes()
    poisoned = x.at[17].set(jnp.nan)
    rest = np.arange(300) != 17
    assert np.asarray(run(poisoned, w))[rest].tobytes() == whole[rest].tobytes()
    assert np.isnan(np.asarray(run(poisoned, w))[17].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("tokens", [3, 400])
def test_experts_on_the_device(tokens, limit, rng):
    """Padding poisoned. As far from the truth as rows and gated products in e4m3 are by themselves;
    a gated product whose bf16 rounds the other way may get another code, hence three times TIGHT.
    """
    c, args = experts(rng, tokens, experts=8, topk=3, hidden=512, width=256)
    choices = np.where(c.experts == 5, -1, c.experts)
    choices[tokens // 2] = -1, 8, 1000
    c = c.with_choices(choices)
    c.x[tokens // 2] = np.nan
    args = jnp.asarray(c.x), *args[1:5], jnp.asarray(choices)
    got = np.asarray(jax.jit(functools.partial(mosaic.routed_experts_fp8, limit=limit))(*args))
    assert not got[tokens // 2].any()
    real = c.valid.any(axis=1)
    honest = dataclasses.replace(c, x=np.where(real[:, None], c.x, 0))
    quantised, exact = _as_kernels_do(honest, limit)[real], truth(honest, limit)[real]
    assert error(got[real], exact) < 1.1 * error(quantised, exact)
    assert error(got[real], quantised) < 3 * TIGHT


def _as_kernels_do(c, limit):
    out = np.zeros(c.x.shape)
    x = dequantised(c.x)
    for t, k in zip(*np.nonzero(c.valid), strict=True):
        e = c.experts[t, k]
        g, u = x[t] @ c.gate[e], x[t] @ c.up[e]
        if limit is not None:
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        h = (g / (1 + np.exp(-g)) * u).astype(c.x.dtype)
        out[t] += c.weights[t, k] * (dequantised(h[None])[0] @ c.down[e])
    return out


def test_the_widened_weights_are_the_definition(rng):
    """Quantised rows differ from the definition by what e4m3 rounds, and no more."""
    w, x = weight(rng, 256, 512, std=0.05), draw(rng, 40, 512)
    want = np.asarray(ref.matmul_fp8(jnp.asarray(x), w), np.float64)
    assert 0.01 < error(dequantised(x) @ wide(w).T, want) < LOOSE
