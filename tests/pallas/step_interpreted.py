"""The Triton programs of the router and of a step's new rows, by the interpreter on the CPU."""

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.pallas import triton_lib
from mla_jax.pallas.append import ref
from mla_jax.pallas.append import triton as append
from mla_jax.pallas.axes import RowNorm
from mla_jax.pallas.router import triton as router
from tests.cases import draw
from tests.pallas import routers
from tests.pallas.interpreted import call
from tests.pallas.test_append import EPS, NOPE, RANK, inputs


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


@pytest.mark.parametrize("moe", routers.MOES.values(), ids=routers.MOES)
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_the_router(tokens, moe, rng):
    c = routers.case(rng, tokens, moe)
    routers.judge(router.route_tokens(*c.args, moe=moe), c)


def test_a_group_that_is_not_kept_gives_no_weight():
    c = routers.few_scores()
    routers.judge_few_scores(router.route_tokens(*c.args, moe=c.moe))


@pytest.mark.parametrize("name", routers.BELOW)
def test_the_router_below_zero(name, rng):
    c = routers.below_zero(rng, 9, name)
    routers.judge(router.route_tokens(*c.args, moe=c.moe), c)


@pytest.mark.parametrize(
    ("tokens", "hidden", "name"), [(5, 2048, "v2_lite"), (16, 300, "v3"), (17, 192, "k2")]
)
def test_the_router_normalises(tokens, hidden, name, rng):
    c = routers.case(rng, tokens, routers.MOES[name], hidden=hidden)
    gain = jnp.asarray(draw(rng, hidden))
    norm = RowNorm(gain=gain, eps=0.5)
    *found, x = router.route_tokens(*c.args, moe=c.moe, norm=norm)
    want = ref.rms_norm(jnp.asarray(c.x), gain, eps=0.5)
    np.testing.assert_allclose(np.asarray(x), np.asarray(want), rtol=1e-5, atol=1e-6)
    routers.judge(found, replace(c, x=np.asarray(x)))


@pytest.mark.parametrize("moe", routers.MOES.values(), ids=routers.MOES)
def test_equal_scores_go_to_the_lower_index(moe, rng):
    c = routers.case(rng, 3, moe)
    x, kernel, bias, _ = c.args
    bias = None if bias is None else jnp.zeros_like(bias)
    real = jnp.ones(3, jnp.bool_)
    _, experts = router.route_tokens(x, jnp.zeros_like(kernel), bias, real, moe=moe)
    np.testing.assert_array_equal(np.asarray(experts), [list(range(moe.topk))] * 3)


def test_the_router_of_many_tokens(rng, monkeypatch):
    """One program adds all pieces: the same bits."""
    moe = routers.MOES["v2_lite"]
    c = routers.case(rng, 20, moe)
    few = router.route_tokens(*c.args, moe=moe)
    monkeypatch.setattr(router, "MOST_CUT", 10)
    monkeypatch.setattr(router, "ROWS", (16, 16, 16))  # numpy's bits depend on the rows
    for a, b in zip(few, router.route_tokens(*c.args, moe=moe), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("format", "dtype"), [("fp16", "float16"), ("fp32", "float32")])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (9, 3), (5, 40)])
def test_new_rows(tokens, heads, format, dtype, interleaved, rng):
    """As the definition makes them, in one layer of a stack; a layer that is not there stays."""
    cache, *rest, slots = inputs(rng, tokens, heads, dtype=dtype, format=format, layers=3)
    slots[tokens // 2] = -1
    q, kv, gain, (cos, sin) = rest
    given = [cache.pages, cache.scale, *map(jnp.asarray, (q, kv, gain, cos, sin, slots))]
    for layer in (0, 2, 3, -1):
        facts = dict(eps=EPS, interleaved=interleaved, format=cache.format, layer=jnp.int32(layer))
        got = append.append_latent(*given, **facts)
        want = ref.append_latent(*given, **facts)
        near = 2e-3 if dtype == "float16" else 2e-6
        for a, b in zip(got, want, strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=near, atol=1e-6)


@pytest.mark.parametrize(("format", "dtype"), [("fp16", "float16"), ("fp32", "float32")])
@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, 3), (1, 16), (5, 3), (5, 16), (16, 3), (16, 16), (17, 3)]
)
def test_queries_meet_the_up_projection(tokens, heads, format, dtype, rng):
    """In the same launch, or behind it; NaN in rows of padding stays there."""
    cache, *rest, slots = inputs(rng, tokens, heads, dtype=dtype, format=format, layers=3)
    q, kv, gain, (cos, sin) = rest
    if tokens > 1:
        padding = tokens - 1 - tokens // 4
        slots[padding:], q[padding:], kv[padding:] = -1, np.nan, np.nan
    real = slots >= 0
    given = [cache.pages, cache.scale, *map(jnp.asarray, (q, kv, gain, cos, sin, slots))]
    facts = dict(eps=EPS, interleaved=True, format=cache.format, layer=jnp.int32(1))
    facts["up_k"] = jnp.asarray(draw(rng, heads, NOPE, RANK, dtype=dtype))
    *got, pages = append.append_latent(*given, **facts)
    *want, kept = ref.append_latent(*given, **facts)
    near = 2e-3 if dtype == "float16" else 2e-6
    got, want = ([*(x[real] for x in some), all] for some, all in ((got, pages), (want, kept)))
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=near, atol=2e-5)
