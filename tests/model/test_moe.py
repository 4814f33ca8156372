"""Routing and grouped experts against one expert at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import ops
from mla_jax.model.moe import Experts, MoE, choose_experts
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import AddNorm, RowNorm
from tests.model import tiny


def naive_experts(layer: Experts, x, weights, experts):
    out = np.zeros(x.shape, np.float64)
    gate, up, down = (np.asarray(w[...], np.float64) for w in (layer.gate, layer.up, layer.down))
    for t in range(x.shape[0]):
        for w, e in zip(np.asarray(weights)[t], np.asarray(experts)[t], strict=True):
            a = np.asarray(x[t], np.float64)
            g = a @ gate[e]
            out[t] += w * ((g / (1 + np.exp(-g)) * (a @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize("method", tiny.MOE)
def test_grouped_products_equal_one_expert_at_a_time(method):
    moe = tiny.MOE[method]
    layer = Experts(32, moe, dtype=jnp.float32, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (17, 32), jnp.float32)
    logits = jax.random.normal(jax.random.key(1), (17, 8), jnp.float32)
    weights, experts = choose_experts(logits, None, moe)
    got = layer(x, weights, experts, jnp.ones((17,), bool))
    np.testing.assert_allclose(got, naive_experts(layer, x, weights, experts), atol=2e-4, rtol=1e-5)


def test_padding_reaches_no_expert():
    layer = Experts(32, tiny.MOE["noaux_tc"], dtype=jnp.float32, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (12, 32), jnp.float32)
    weights, experts = choose_experts(
        jax.random.normal(jax.random.key(1), (12, 8), jnp.float32), None, tiny.MOE["noaux_tc"]
    )
    real = jnp.arange(12) < 9
    clean = layer(x, weights, experts, real)
    poisoned = layer(
        jnp.where(real[:, None], x, jnp.nan),
        jnp.where(real[:, None], weights, jnp.nan),
        experts,
        real,
    )
    np.testing.assert_array_equal(clean[:9], poisoned[:9])
    np.testing.assert_array_equal(poisoned[9:], 0)


def test_a_token_does_not_depend_on_its_company():
    cfg = tiny.config("noaux_tc")
    layer = MoE(cfg, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (24, 32), jnp.float32)
    order = np.random.default_rng(0).permutation(24)
    real = jnp.ones((24,), bool)
    np.testing.assert_allclose(layer(x, real)[order], layer(x[order], real), atol=1e-6)


def test_negative_biased_scores_never_pick_an_excluded_group():
    moe = tiny.MOE["noaux_tc"]
    logits = jnp.zeros((1, 8), jnp.float32).at[0, :4].set(1.0)
    _, experts = choose_experts(logits, jnp.full((8,), -2.0, jnp.float32), moe)
    assert set(np.asarray(experts)[0].tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_shared_experts_of_small_steps_are_one_that_every_token_chooses(tokens, monkeypatch):
    """Where Triton would run it: up to 8 tokens; the numbers are those of the plain block."""
    config = tiny.config(layers=2, sparse_layers=(False, True))
    layer = MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = jax.random.normal(jax.random.key(0), (tokens, config.hidden), jnp.float32)
    real = jnp.ones(tokens, jnp.bool_)
    want = layer(x, real)
    counts = []
    run = ops.routed_experts
    monkeypatch.setattr(ops, "backend_of", lambda *args, **kwargs: "triton")
    monkeypatch.setattr(
        ops,
        "routed_experts",
        lambda x, gate, *a, **k: counts.append(len(gate)) or run(x, gate, *a, **k),
    )
    np.testing.assert_allclose(layer(x, real), want, rtol=1e-5, atol=1e-5)
    assert counts == [1, config.moe.experts][tokens > 8 :]


@pytest.mark.parametrize(("tokens", "reads"), [(8, False), (9, True)])
def test_the_router_normalises_rows_of_small_steps(tokens, reads, monkeypatch):
    """Where Triton would run it: up to 8 tokens; then nothing reads the rows that are given."""
    config = tiny.config(layers=2, sparse_layers=(False, True))
    layer = MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    h = jax.random.normal(jax.random.key(0), (tokens, config.hidden), jnp.float32)
    gain, after = jax.random.normal(jax.random.key(1), (2, config.hidden), jnp.float32)
    real, norm = jnp.ones(tokens, jnp.bool_), RowNorm(gain=gain, eps=1e-3)
    then = AddNorm(residual=h, gain=after, eps=1e-3)
    x = rms_norm(h, gain, eps=1e-3)
    want = layer.onto(then, x, real)
    monkeypatch.setattr(ops, "backend_of", lambda *args, **kwargs: "triton")
    found = layer.onto(then, x if reads else x * jnp.nan, real, norm=norm)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if reads:
        assert jnp.isnan(layer.onto(then, x * jnp.nan, real, norm=norm)[0]).any()
