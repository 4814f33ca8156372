"""Products with block-scaled e4m3 weights: every backend against the widened weights in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.ops import matmul_fp8, routed_experts_fp8
from mla_jax.pallas import problems
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.fp8_matmul import ref
from mla_jax.types import BlockScaled
from tests import aot
from tests.cases import draw, run
from tests.compare import within
from tests.pallas.experts import case, judge, missing

OP = "matmul_fp8"  # the other has the same backends
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def weight(rng, *shape, std=1.0) -> BlockScaled:
    """Random bytes, subnormal ones too, and a random scale for each block."""
    blocks = *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)
    values = (rng.normal(size=shape) * rng.choice([100, 0.01], size=shape)).clip(-448, 448)
    scale = (std / 70 * rng.uniform(0.2, 2, size=blocks)).astype(np.float32)
    return BlockScaled(
        values=jnp.asarray(values.astype(ml_dtypes.float8_e4m3fn)), scale=jnp.asarray(scale)
    )


def wide(w: BlockScaled) -> np.ndarray:
    """In float64, block by block."""
    out = np.asarray(w.values).astype(np.float64)
    scale = np.asarray(w.scale, np.float64)
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            block = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            out[block] *= scale[..., i : i + 1, j : j + 1]
    return out


def experts(rng, tokens, *, hidden=256, width=128, dtype="bfloat16", **facts):
    """A case of ``tests.pallas.experts`` with the widened weights, and the weights."""
    c = case(rng, tokens, hidden=hidden, width=width, dtype=dtype, **facts)
    count = len(c.gate)
    gate, up = (weight(rng, count, width, hidden, std=hidden**-0.5) for _ in range(2))
    down = weight(rng, count, hidden, width, std=width**-0.5)
    names = {"gate": gate, "up": up, "down": down}
    c = dataclasses.replace(c, **{k: wide(w).swapaxes(1, 2) for k, w in names.items()})
    args = *map(jnp.asarray, (c.x,)), gate, up, down, *map(jnp.asarray, (c.weights, c.experts))
    return c, args


@DTYPES
@pytest.mark.parametrize("shape", [(128, 128), (192, 256), (576, 384), (24, 128), (200, 2688)])
@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_a_product(tokens, shape, dtype, backend, rng):
    w = weight(rng, *shape, std=shape[1] ** -0.5)
    x = draw(rng, tokens, shape[1], dtype=dtype)
    got = np.asarray(run(matmul_fp8, jnp.asarray(x), w, backend=backend))
    assert got.dtype == x.dtype
    true = x.astype(np.float64) @ wide(w).T
    honest = x.astype(np.float64) @ wide(w).astype(x.dtype).astype(np.float64).T
    within(got, true, honest.astype(x.dtype), floor=1e-5)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_groups_of_outputs_have_their_own_channels(tokens, dtype, backend, rng):
    groups, each, into = 3, 192, 256
    w = weight(rng, groups * each, into, std=into**-0.5)
    x = draw(rng, tokens, groups * into, dtype=dtype)
    got = np.asarray(run(matmul_fp8, jnp.asarray(x), w, groups=groups, backend=backend))

    def product(matrix):
        rows = x.astype(np.float64).reshape(tokens, groups, into)
        matrices = matrix.reshape(groups, each, into)
        return np.einsum("tgi,goi->tgo", rows, matrices).reshape(tokens, -1)

    honest = product(wide(w).astype(x.dtype).astype(np.float64)).astype(x.dtype)
    within(got, product(wide(w)), honest, floor=1e-5)


@pytest.mark.gpu
def test_bits_of_a_row_do_not_depend_on_the_others(rng):
    """Nor on how many there are: channels are cut into the same pieces."""
    x = jnp.asarray(draw(rng, 64, 2688, dtype="bfloat16"))
    w = weight(rng, 200, 2688, std=2688**-0.5)
    whole = np.asarray(run(matmul_fp8, x, w, backend="triton"))
    for rows in (slice(5, 6), slice(3, 12), slice(0, 17)):
        alone = run(matmul_fp8, x[rows], w, backend="triton")
        np.testing.assert_array_equal(np.asarray(alone), whole[rows])


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton") or "available")
@pytest.mark.parametrize("shape", [(7168, 1536), (200, 2688), (2112, 7168), (96, 1024)])
@pytest.mark.parametrize("tokens", [1, 17, 40, 64])
def test_programs_cover_everything_once(tokens, shape, rng, monkeypatch):
    """The launch, with programs in numpy that read what a program of the kernel reads."""
    from mla_jax.pallas.fp8_matmul import triton

    w = weight(rng, *shape, std=shape[1] ** -0.5)
    x = jnp.asarray(draw(rng, tokens, shape[1]))
    launches = []

    def call(kernel, x, values, scale, count, *, out, grid, SIZES, TILE, **_):
        launches.append(grid)
        given, weights = np.asarray(x, np.float64), wide(w)
        (into, columns_out, groups), (rows, columns, each) = SIZES, TILE
        blocks, steps = -(-columns_out // columns), into // 128
        pieces, found = -(-steps // each), np.full(out.shape, np.nan)
        assert pieces == out.shape[0] and (pieces - 1) * each < steps
        for pid in range(grid):
            block, rest = pid % blocks, pid // blocks
            piece, row = rest % pieces, rest // pieces * rows
            k = slice(piece * each * 128, min((piece + 1) * each, steps) * 128)
            r, c = slice(row, row + rows), slice(block * columns, (block + 1) * columns)
            assert np.isnan(found[piece, r, c]).all()
            group = block * columns * groups // columns_out
            rows_of_it = given[r].reshape(-1, groups, into)[:, group]
            found[piece, r, c] = rows_of_it[:, k] @ weights[c, k].T
        return jnp.asarray(found, out.dtype)

    monkeypatch.setattr(triton.triton_lib, "call", call)
    got = triton.matmul_fp8(x, w)
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ wide(w).T, atol=1e-5)
    assert launches[0] <= 1024 * -(-tokens // 16) * 2


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_experts_against_the_truth(tokens, dtype, backend, rng):
    c, args = experts(rng, tokens, dtype=dtype)
    judge(run(routed_experts_fp8, *args, backend=backend), c)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [256, 3584])
def test_a_plan_changes_no_bit(hidden, rng):
    """Pieces have programs of their own without a plan, and one after the other with it."""
    _, args = experts(rng, 45, hidden=hidden)  # tiles of 32 rows
    few = args[0][:7], *args[1:4], args[4][:7], args[5][:7]
    many, alone = (run(routed_experts_fp8, *a, backend="triton") for a in (args, few))
    assert np.asarray(many[:7]).tobytes() == np.asarray(alone).tobytes()


def test_the_definition(rng):
    c, args = experts(rng, 9, dtype="float32")
    judge(ref.routed_experts_fp8(*args), c)
    x = jnp.asarray(draw(rng, 3, 256))
    w = weight(rng, 200, 256)
    np.testing.assert_allclose(
        ref.matmul_fp8(x, w), np.asarray(x) @ wide(w).T, rtol=2e-5, atol=1e-4
    )


@pytest.mark.parametrize("limit", [None, 0.7])
def test_padding_is_no_expert(limit, backend, rng):
    c, args = experts(rng, 12)
    choices = c.experts.copy()
    choices[[2, 5, 11]] = -1, 6, 1000
    c = c.with_choices(choices)
    x = c.x.copy()
    x[[2, 5, 11]] = np.nan
    c = dataclasses.replace(c, x=x)
    args = jnp.asarray(x), *args[1:5], jnp.asarray(choices)
    judge(run(routed_experts_fp8, *args, limit=limit, backend=backend), c, limit)


def test_no_tokens(backend, rng):
    _, args = experts(rng, 1)
    none = args[0][:0], *args[1:4], args[4][:0], args[5][:0]
    assert run(routed_experts_fp8, *none, backend=backend).shape == (0, 256)


def test_refusals(rng):
    w = weight(rng, 128, 256)
    x = jnp.zeros((2, 256), jnp.bfloat16)
    with pytest.raises(ArgumentError, match="weight: given ArrayImpl; allowed: BlockScaled"):
        problems.matmul_fp8(x, w.values)
    with pytest.raises(ArgumentError, match="shape of its scale"):
        problems.matmul_fp8(x, dataclasses.replace(w, scale=w.scale[:, :1]))
    with pytest.raises(ArgumentError, match="scaled by bfloat16"):
        problems.matmul_fp8(x, dataclasses.replace(w, scale=w.scale.astype(jnp.bfloat16)))
    with pytest.raises(ArgumentError, match="into=256"):
        problems.matmul_fp8(x[:, :128], w)
    with pytest.raises(ArgumentError, match="channels of x: given 256; allowed: 512: groups=2"):
        problems.matmul_fp8(x, w, groups=2)
    with pytest.raises(ArgumentError, match="groups: given 3; allowed: a divisor of out=128"):
        problems.matmul_fp8(jnp.tile(x, 3), w, groups=3)
    assert "xla: accepted" in ops.explain("matmul_fp8", x, w)


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(
    ("tokens", "hidden", "launches"), [(1, 1024, 2), (128, 1024, 3), (1024, 1024, 3), (1, 7168, 3)]
)
def test_compiles_for_sm90(tokens, hidden, launches, monkeypatch):
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    s = jax.ShapeDtypeStruct

    def scaled(*shape):
        blocks = *shape[:-2], shape[-2] // 128, shape[-1] // 128
        return BlockScaled(values=s(shape, jnp.float8_e4m3fn), scale=s(blocks, jnp.float32))

    compiled, _ = aot.compile_sm90(
        lambda *args: routed_experts_fp8(*args, backend="triton"),
        s((tokens, hidden), jnp.bfloat16),
        scaled(16, 512, hidden), scaled(16, 512, hidden), scaled(16, hidden, 512),
        s((tokens, 4), jnp.float32),
        s((tokens, 4), jnp.int32),
    )  # fmt: skip
    calls = compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"')
    assert calls == launches
    if tokens == 1:
        aot.compile_sm90(
            lambda *args: matmul_fp8(*args, backend="triton"),
            s((tokens, 1792), jnp.bfloat16),
            scaled(512, 1792),
        )
