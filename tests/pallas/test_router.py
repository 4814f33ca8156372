"""The router: every backend against one token at a time in float64."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.ops import RowNorm, matmul_float32, route_tokens
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import draw, run
from tests.pallas.experts import missing, module_of
from tests.pallas.routers import BELOW, MOES, below_zero, case, few_scores, judge, judge_few_scores

triton = module_of("router.triton")
MOST_CUT = 1024  # its own
OP = "route_tokens"
EPS = 1e-2
METHODS = pytest.mark.parametrize("moe", MOES.values(), ids=MOES)


def normed(x, kernel, bias, real, gain, *, moe, backend):
    norm = RowNorm(gain=gain, eps=EPS)
    return route_tokens(x, kernel, bias, real, moe=moe, norm=norm, backend=backend)


@METHODS
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_against_the_truth(tokens, moe, dtype, backend, rng):
    c = case(rng, tokens, moe, dtype=dtype)
    judge(run(route_tokens, *c.args, moe=moe, backend=backend), c)


@pytest.mark.parametrize("name", BELOW)
def test_choices_below_zero(name, backend, rng):
    c = below_zero(rng, 9, name)
    judge(run(route_tokens, *c.args, moe=c.moe, backend=backend), c)


def test_a_group_that_is_not_kept_gives_no_weight(backend):
    c = few_scores()
    judge_few_scores(run(route_tokens, *c.args, moe=c.moe, backend=backend))


@pytest.mark.parametrize("tokens", [0, 3, 9])
def test_what_comes_behind_the_logits_is_the_same(tokens, backend, rng):
    moe = MOES["v3"]
    c = case(rng, tokens, moe, dtype="bfloat16") if tokens else case(rng, 1, moe).take(slice(0))
    want = run(route_tokens, *c.args, moe=moe, backend=backend)
    *found, x = run(route_tokens, *c.args, moe=moe, first=True, backend=backend)
    for a, b in zip((*found, x), (*want, c.x), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("tokens", "hidden", "name"),
    [(0, 192, "v3"), (1, 192, "v2_lite"), (8, 2048, "v2_lite"), (9, 300, "v3"), (40, 192, "k2")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_normalised_first(tokens, hidden, name, dtype, backend, rng):
    """Each to its dtype's rounding; the choice is that of the rows which are returned."""
    c = case(rng, max(tokens, 1), MOES[name], hidden=hidden, dtype=dtype).take(slice(tokens))
    c.x[~c.real] = np.nan  # stays in its rows
    gain = draw(rng, hidden, dtype=dtype)
    *found, x = run(normed, *c.args, jnp.asarray(gain), moe=c.moe, backend=backend)
    wide = c.x[c.real].astype(np.float64)
    want = gain.astype(np.float64) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    step = float(jnp.finfo(dtype).eps)
    x, found = np.asarray(x), [np.asarray(a) for a in found]
    assert x.dtype == c.x.dtype and x.shape == c.x.shape
    np.testing.assert_allclose(x[c.real].astype(np.float64), want, rtol=step + 1e-6, atol=1e-6)
    assert (found[1][~c.real] == -1).all()
    if c.real.any():
        judge([a[c.real] for a in found], replace(c.take(c.real), x=x[c.real]))


@METHODS
def test_equal_scores_go_to_the_lower_index(moe, backend, rng):
    """All experts alike, in all groups."""
    c = case(rng, 3, moe)
    kernel = np.zeros_like(c.kernel)
    bias = None if c.bias is None else jnp.zeros(moe.experts, jnp.float32)
    real = jnp.ones(3, jnp.bool_)
    x = jnp.asarray(c.x)
    _, experts = run(route_tokens, x, jnp.asarray(kernel), bias, real, moe=moe, backend=backend)
    np.testing.assert_array_equal(np.asarray(experts), [list(range(moe.topk))] * 3)


def test_tokens_that_are_not_real(backend, rng):
    """NaN in their rows stays there."""
    moe = MOES["v3"]
    c = case(rng, 9, moe)
    c.x[~c.real] = np.nan
    _, experts = run(route_tokens, *c.args, moe=moe, backend=backend)
    assert (np.asarray(experts)[~c.real] == -1).all()
    judge(
        [np.asarray(a)[c.real] for a in run(route_tokens, *c.args, moe=moe, backend=backend)],
        c.take(c.real),
    )


def test_a_token_alone_is_the_token_among_neighbours(backend, rng):
    moe = MOES["v3"]
    c = case(rng, 40, moe, dtype="bfloat16")
    whole = [np.asarray(a) for a in run(route_tokens, *c.args, moe=moe, backend=backend)]
    order = rng.permutation(40)
    again = run(route_tokens, *c.take(order).args, moe=moe, backend=backend)
    for a, b in zip(whole, again, strict=True):
        assert a[order].tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", ["v2_lite", "v3", "k2"])
def test_many_tokens_choose_as_few_do(name, backend, rng):
    """A program of each piece, or one for all: the same sums in the same order."""
    moe = MOES[name]
    c = case(rng, MOST_CUT + 70, moe, dtype="bfloat16")
    many = run(route_tokens, *c.args, moe=moe, backend=backend)
    judge(many, c)
    few = run(route_tokens, *c.take(np.arange(99)).args, moe=moe, backend=backend)
    for a, b in zip(many, few, strict=True):
        np.testing.assert_allclose(np.asarray(a)[:99], np.asarray(b), rtol=1e-5)


@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_no_tokens(moe, backend):
    x, kernel = jnp.zeros((0, 64)), jnp.zeros((64, moe.experts))
    real = jnp.zeros(0, jnp.bool_)
    weights, experts = run(route_tokens, x, kernel, None, real, moe=moe, backend=backend)
    assert weights.shape == experts.shape == (0, moe.topk)


def test_products_of_few_columns(rng):
    """Within float32's own error of float64, also of 16-bit rows; pieces and all at once."""
    for backend in ("xla", "triton"):
        for dtype, tokens, out in (("bfloat16", 5, 24), ("float32", 3, 4), ("bfloat16", 1100, 64)):
            x, kernel = draw(rng, tokens, 1000, dtype=dtype), draw(rng, 1000, out)
            given = jnp.asarray(x), jnp.asarray(kernel)
            got = run(matmul_float32, *given, backend=backend)
            want = x.astype(np.float64) @ kernel.astype(np.float64)
            np.testing.assert_allclose(np.asarray(got), want, atol=2e-4)
        empty = run(matmul_float32, jnp.zeros((0, 8)), jnp.zeros((8, 3)), backend=backend)
        assert empty.shape == (0, 3)


@pytest.mark.skipif(triton is None, reason=missing("triton") or "installed")
def test_three_bfloat16_numbers_are_a_weight(rng):
    """Also where XLA compiles them: it may leave out a cast to fewer bits and back."""
    kernel = jnp.asarray(draw(rng, 96, 24))
    parts = jax.jit(triton._parts)(kernel)
    assert parts.dtype == jnp.bfloat16
    np.testing.assert_allclose(parts.astype(jnp.float32).sum(axis=0), kernel, rtol=2**-23)
    assert (jnp.abs(parts[0]) > 64 * jnp.abs(parts[1])).all()


def test_refusals(rng):
    c = case(rng, 4, MOES["v3"])
    x, kernel, bias, real = c.args

    def explained(*args, moe=c.moe, norm=None):
        return ops.explain(OP, *args, moe=moe, norm=norm)

    with pytest.raises(ArgumentError, match="kernel"):
        explained(x, kernel[:, :5], bias, real)
    with pytest.raises(ArgumentError, match="real"):
        explained(x, kernel, bias, real.astype(jnp.int32))
    with pytest.raises(ArgumentError, match="norm: given"):
        explained(x, kernel, bias, real, norm=1.0)
    with pytest.raises(ArgumentError, match="gain"):
        explained(x, kernel, bias, real, norm=RowNorm(gain=jnp.ones(3), eps=1e-6))
    with pytest.raises(ArgumentError, match="choice_bias"):
        explained(x, kernel[:, :64], bias[:64], real, moe=MOES["v2_lite"])
    assert "xla: accepted" in explained(x, kernel, bias, real)


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
@pytest.mark.parametrize("tokens", [1, 128, 2048])
def test_compiles_for_sm90_with_two_launches(tokens, moe, monkeypatch):
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec = jax.ShapeDtypeStruct
    bias = (spec((moe.experts,), jnp.float32),) if moe.biased else ()
    compiled, _ = aot.compile_sm90(
        lambda x, kernel, real, *b: route_tokens(
            x, kernel, b[0] if b else None, real, moe=moe, backend="triton"
        ),
        spec((tokens, 7168), jnp.bfloat16),
        spec((7168, moe.experts), jnp.float32),
        spec((tokens,), jnp.bool_),
        *bias,
    )
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 2, entry


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (16, 2), (17, 3)])
def test_compiles_for_sm90_with_the_norm(tokens, launches, monkeypatch):
    """In the launch of the logits, of up to 16 tokens; of more it is XLA's."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, moe = jax.ShapeDtypeStruct, MOES["v2_lite"]

    def layer(h, gain, kernel, real):
        norm = RowNorm(gain=gain, eps=1e-6)
        return route_tokens(h, kernel, None, real, moe=moe, norm=norm, backend="triton")

    shapes = (tokens, 5120), (5120,), (5120, moe.experts), (tokens,)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bool_
    compiled, _ = aot.compile_sm90(layer, *map(spec, shapes, dtypes))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    kernels = re.findall(r" = .* (?:custom-call|fusion)\(", entry)
    assert len(kernels) == launches, entry


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
def test_compiles_for_sm90_without_a_copy_of_what_comes_behind(monkeypatch):
    """What reads x reads the memory that the first launch was given, and waits for it."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, moe = jax.ShapeDtypeStruct, MOES["v3"]

    def layer(h, kernel, real, bias):
        facts = {"moe": moe, "first": True, "backend": "triton"}
        weights, chosen, x = route_tokens(2 * h, kernel, bias, real, **facts)
        return weights, chosen, x + 1

    shapes = (8, 7168), (7168, moe.experts), (8,), (moe.experts,)
    dtypes = jnp.bfloat16, jnp.float32, jnp.bool_, jnp.float32
    compiled, _ = aot.compile_sm90(layer, *map(spec, shapes, dtypes))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert " copy(" not in entry, entry
    (same,) = re.findall(r"(%\S+) = bf16\[8,7168\]\S* get-tuple-element", entry)
    assert f"fusion({same})" in entry, entry


@pytest.mark.skipif(triton is None, reason=missing("triton") or "installed")
def test_pieces():
    assert triton.MOST_CUT == MOST_CUT
    assert triton.piece_depth(64) == triton.piece_depth(2048) == 128
    assert triton.piece_depth(7168) == 256


@pytest.mark.skipif(triton is None, reason=missing("triton") or "installed")
def test_programs_fill_the_machine():
    """Rows of a program by the tokens, and by how many programs have the same tokens."""
    assert [triton._rows(n, 112) for n in (1, 256, 257, 1024)] == [16, 16, 64, 64]
    assert [triton._rows(n, 16) for n in (257, 448, 449, 1024)] == [16, 16, 64, 64]
    assert [triton._rows(n, 4) for n in (2048, 8064, 8192, 16384)] == [64, 64, 128, 128]
    assert triton._rows(16384, 1) == 64
