"""Routed experts, every registered backend, against one pair of token and expert at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.ops import AddNorm, routed_experts
from mla_jax.pallas.grouped_matmul import ref
from tests.cases import run
from tests.pallas.experts import case, following, judge, judge_added, truth

OP = "routed_experts"
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def test_the_definition(rng):
    for limit in (None, 0.7):
        c = case(rng, 9, dtype="float32")
        c = c.with_choices(np.where(rng.random(c.experts.shape) < 0.2, -1, c.experts))
        got = ref.routed_experts(*c.args, limit=limit)
        np.testing.assert_allclose(got, truth(c, limit), atol=2e-5)
    c = c.with_choices(np.full_like(c.experts, 2))  # one expert, as often as there are choices
    np.testing.assert_allclose(ref.routed_experts(*c.args), truth(c), atol=2e-5)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_against_the_truth(tokens, dtype, backend, rng):
    c = case(rng, tokens, dtype=dtype)
    judge(run(routed_experts, *c.args, backend=backend), c)


@DTYPES
def test_padding_is_no_expert(dtype, backend, rng):
    """-1, the number of experts and beyond; NaN in rows, weights and experts nobody asks for."""
    c = case(rng, 12, experts=9, dtype=dtype)
    choices = c.experts.copy()
    choices[choices == 4] = -1  # an expert that nobody chose
    choices[[2, 5, 11]] = -1, 9, 1000
    choices[7, 1] = -(2**31)
    c = c.with_choices(choices).poisoned(unused_experts=backend != "xla")
    assert np.isnan(c.gate[4].astype(np.float32)).all() == (backend != "xla")
    judge(run(routed_experts, *c.args, backend=backend), c)


def test_nobody_at_all(backend, rng):
    c = case(rng, 5)
    c = c.with_choices(np.full_like(c.experts, -1)).poisoned(unused_experts=backend != "xla")
    judge(run(routed_experts, *c.args, backend=backend), c)


@pytest.mark.parametrize("tokens", [3, 50])
def test_all_rows_to_one_expert(tokens, backend, rng):
    """Also the same expert twice in a token."""
    c = case(rng, tokens)
    c = c.with_choices(np.full_like(c.experts, 5)).poisoned(unused_experts=backend != "xla")
    judge(run(routed_experts, *c.args, backend=backend), c)


@pytest.mark.parametrize("limit", [0.05, 0.7, 10.0])
def test_the_clamp(limit, backend, rng):
    """The gate from above, up from both sides; a large negative gate stays."""
    c = case(rng, 9)
    judge(run(routed_experts, *c.args, limit=limit, backend=backend), c, limit)


def test_the_clamp_keeps_nan(backend, rng):
    c = case(rng, 4)
    c.x[1] = np.nan
    got = np.asarray(run(routed_experts, *c.args, limit=1.0, backend=backend), np.float32)
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2, 3]]).all()


def test_one_expert_and_one_choice(backend, rng):
    c = case(rng, 6, experts=1, topk=1)
    judge(run(routed_experts, *c.args, backend=backend), c)


def added(*args, backend):
    *args, residual, gain = args
    return routed_experts(*args, then=AddNorm(residual, gain, 1e-3), backend=backend)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 40])
def test_added_to_a_residual_and_normalised(tokens, dtype, backend, rng):
    c = case(rng, tokens, dtype=dtype)
    c = c.with_choices(np.where(rng.random(c.experts.shape) < 0.2, -1, c.experts))
    c = c.poisoned(unused_experts=backend != "xla")
    then = following(c, rng)
    got = run(added, *c.args, then.residual, then.gain, backend=backend)
    alone = run(routed_experts, *c.args, backend=backend)
    judge_added(got, alone, then, order=4.0 if backend == "xla" else 0.0)


def test_no_tokens(backend, rng):
    c = case(rng, 1).take([])
    assert run(routed_experts, *c.args, backend=backend).shape == (0, 128)


def _shapes(change=None, **dtypes):
    shapes = {
        "x": (4, 128), "gate": (6, 128, 64), "up": (6, 128, 64), "down": (6, 64, 128),
        "weights": (4, 3), "experts": (4, 3),
    } | (change or {})  # fmt: skip
    kinds = dict.fromkeys(shapes, "bfloat16") | {"weights": "float32", "experts": "int32"} | dtypes
    return [jax.ShapeDtypeStruct(shapes[k], jnp.dtype(kinds[k])) for k in shapes]


def _then(gain=(128,), dtype="bfloat16", eps=1e-6):
    spec = jax.ShapeDtypeStruct
    return {"then": AddNorm(spec((4, 128), jnp.dtype(dtype)), spec(gain, jnp.bfloat16), eps)}


REFUSED = [
    (_shapes({"down": (6, 128, 64)}), {}, "down of shape (6, 128, 64): given width=128"),
    (_shapes({"experts": (4, 2)}), {}, "experts of shape (4, 2): given topk=2"),
    (_shapes({"gate": (128, 64)}), {}, "gate: given shape (128, 64); allowed: [experts, hidden"),
    (_shapes(up="float16"), {}, "up float16, down bfloat16; allowed: one dtype"),
    (_shapes(weights="bfloat16"), {}, "weights: given dtype bfloat16; allowed: float32"),
    (_shapes(experts="float32"), {}, "experts: given dtype float32; allowed: an integer dtype"),
    (_shapes(), {"limit": 0}, "limit: given 0; allowed: None or a finite Python number above 0"),
    (_shapes(), {"limit": float("inf")}, "limit: given inf"),
    (_shapes(), {"then": 1}, "then: given 1 (int); allowed: None or an AddNorm, with residual"),
    (_shapes(), _then(gain=(4,)), "then: gain of shape (4,): given hidden=4"),
    (
        _shapes(),
        _then(dtype="float16"),
        "then: dtypes: given x bfloat16, residual float16;",
    ),
    (_shapes(), _then(eps=0), "then.eps: given 0; allowed: a finite Python number above 0"),
]


@pytest.mark.parametrize(("args", "kwargs", "text"), REFUSED, ids=[t for *_, t in REFUSED])
def test_refusals(args, kwargs, text, our_errors):
    with pytest.raises(ArgumentError) as refusal:
        jax.eval_shape(lambda *a: ops.routed_experts(*a, **kwargs), *args)
    assert text in str(refusal.value) and str(refusal.value).startswith("routed_experts")


def test_numpy_arrays_in_a_program(rng, our_errors):
    """Where ``jit`` traces only one of the arguments."""
    args = [np.asarray(x) for x in case(rng, 5, dtype="float32").args]
    want = ops.routed_experts(*map(jnp.asarray, args), backend="xla")
    *others, weights, experts = args
    got = jax.jit(lambda w: ops.routed_experts(*others, w, experts, backend="xla"))(weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # a GPU may multiply otherwise
