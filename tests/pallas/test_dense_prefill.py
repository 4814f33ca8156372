"""Expanded attention over a ragged batch, every registered backend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.metadata.mla import PrefillMetadata
from mla_jax.ops import mla_prefill
from mla_jax.pallas.dense_prefill import ref, xla
from tests.cases import GLM, TINY, V2_LITE, V3, prefill_case, run
from tests.compare import close_states, judge, same_bits

OP = "mla_prefill"
NO_ROPE = dataclasses.replace(TINY, rope=0)


def solve(case, backend, **kwargs):
    return run(mla_prefill, *case.args, scale=case.scale, backend=backend, **kwargs)


CASES = {
    "v3": {"dims": V3, "query_lens": [20, 1, 7]},
    "v2_lite": {"dims": V2_LITE, "query_lens": [130, 0, 3]},
    "glm": {"dims": GLM, "query_lens": [40], "dtype": "float16"},
    "suffix": {"query_lens": [5, 2, 9], "key_lens": [260, 2, 20], "dtype": "float32"},
    "fewer_keys": {"query_lens": [5, 4], "key_lens": [2, 0], "dtype": "float32"},
    "full": {"query_lens": [3, 140, 0, 6], "key_lens": [200, 0, 5, 1], "causal": False,
             "dtype": "float32"},
    "no_rope": {"dims": NO_ROPE, "query_lens": [9, 30], "dtype": "float32"},
    "tiles": {"query_lens": [127, 128, 129, 1, 0, 1], "dtype": "float32"},
    "one_token": {"query_lens": [1], "pad": 0, "dtype": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, backend, rng):
    case = prefill_case(rng, **CASES[name])
    state = solve(case, backend, causal=CASES[name].get("causal", True))
    assert state.out.dtype == jnp.dtype(case.dtype)
    judge(state, case, case.parts)


@pytest.mark.parametrize("name", CASES)
def test_definition(name, rng):
    """``ref`` against float64 like every backend, and ``xla`` against ``ref``."""
    case = prefill_case(rng, **CASES[name])
    q, kv, k_rope, meta = case.args
    more = {"scale": case.scale, "causal": CASES[name].get("causal", True)}
    defined, ours = (
        jax.jit(functools.partial(f, **more, out_dtype=jnp.float32))(
            q, kv, k_rope, meta.query_starts, meta.key_starts
        )
        for f in (ref.dense_prefill, xla.dense_prefill)
    )
    judge(dataclasses.replace(defined, out=defined.out.astype(case.dtype)), case, case.parts)
    close_states(ours, defined, atol=1e-5)


def test_padding_is_never_read(backend, rng):
    case = prefill_case(rng, query_lens=[30, 4], pad=200, dtype="float32")
    q, kv, k_rope, meta = case.args
    clean = tuple(jnp.nan_to_num(x) for x in (q, kv, k_rope))
    dirty = solve(case, backend)
    same_bits(dirty, solve(case, backend))
    same_bits(dirty, run(mla_prefill, *clean, meta, scale=case.scale, backend=backend))


def test_permuting_requests_permutes_outputs(backend, rng):
    a, b = 50, 90
    case = prefill_case(rng, query_lens=[a, b], pad=0, dtype="float32")
    q, kv, k_rope, _ = case.args
    swap = lambda x: jnp.concatenate([x[a:], x[:a]])  # noqa: E731
    meta = PrefillMetadata(
        query_starts=jnp.array([0, b, a + b], jnp.int32),
        key_starts=jnp.array([0, b, a + b], jnp.int32),
    )
    args = swap(q), swap(kv), swap(k_rope), meta
    state = run(mla_prefill, *args, scale=case.scale, backend=backend)
    close_states(
        dataclasses.replace(state, out=state.out, lse=state.lse),
        jax.tree.map(swap, solve(case, backend)),
    )


def test_empty_shapes(backend):
    meta = PrefillMetadata(
        query_starts=jnp.zeros((2,), jnp.int32), key_starts=jnp.zeros((2,), jnp.int32)
    )
    for tokens, keys in ((0, 0), (4, 0), (0, 4)):
        q = jnp.full((tokens, 3, 12), jnp.nan)
        kv, k_rope = jnp.full((keys, 3, 14), jnp.nan), jnp.full((keys, 4), jnp.nan)
        state = run(mla_prefill, q, kv, k_rope, meta, scale=1.0, backend=backend)
        assert state.out.shape == (tokens, 3, 6) and not np.asarray(state.out).any()
        assert np.isneginf(state.lse).all()


def naive(q, kv, k_rope, meta, *, scale, nope):
    """The whole score matrix at once, differentiable."""
    tokens, keys = q.shape[0], kv.shape[0]
    t, i = jnp.arange(tokens)[:, None], jnp.arange(keys)
    r = jnp.searchsorted(meta.query_starts[1:], t, side="right")
    qs, ks = (jnp.append(s, s[-1]) for s in (meta.query_starts, meta.key_starts))
    seen = (i >= ks[r]) & (i - ks[r + 1] <= t - qs[r + 1])
    s = jnp.einsum("thd,khd->htk", q[..., :nope], kv[..., :nope])
    s = scale * (s + jnp.einsum("thd,kd->htk", q[..., nope:], k_rope))
    p = jax.nn.softmax(jnp.where(seen, s, -1e30), axis=-1)
    out = jnp.einsum("htk,khd->thd", p, kv[..., nope:])
    return out, jax.nn.logsumexp(jnp.where(seen, s, -1e30), axis=-1).T


@pytest.mark.slow
def test_gradient(rng):
    """Reverse mode through tiles, skips and both outputs; padding gets gradient zero."""
    case = prefill_case(rng, query_lens=[150, 70], key_lens=[180, 70], dtype="float32", pad=5)
    *arrays, meta = case.args
    real = [jnp.isfinite(x) for x in arrays]
    weight = jnp.asarray(rng.normal(size=(225, 3, 6)), jnp.float32).at[220:].set(0.0)

    def loss(f):
        def inner(q, kv, k_rope):
            out, lse = f(q, kv, k_rope)
            return jnp.sum(out * weight) + jnp.sum(jnp.sin(lse[:220]))

        return inner

    def ours(q, kv, k_rope):
        state = mla_prefill(q, kv, k_rope, meta, scale=case.scale)
        return state.out, state.lse

    def plain(q, kv, k_rope):
        return naive(q, kv, k_rope, meta, scale=case.scale, nope=TINY.nope)

    got = jax.jit(jax.grad(loss(ours), argnums=(0, 1, 2)))(*arrays)
    want = jax.grad(loss(plain), argnums=(0, 1, 2))(*(jnp.nan_to_num(x) for x in arrays))
    for g, w, ok in zip(got, want, real, strict=True):
        np.testing.assert_allclose(g, jnp.where(ok, w, 0), rtol=1e-4, atol=2e-5)


def test_memory_is_linear_in_length():
    """Also of the gradient, which recomputes each tile of queries."""

    def temp(n):
        meta = PrefillMetadata(
            query_starts=jnp.array([0, n], jnp.int32), key_starts=jnp.array([0, n], jnp.int32)
        )
        f = lambda q, kv, kr: mla_prefill(q, kv, kr, meta, scale=1.0).out.sum()  # noqa: E731
        args = jnp.zeros((n, 2, 12)), jnp.zeros((n, 2, 14)), jnp.zeros((n, 4))
        program = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(*args).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temp(4096) < 2.2 * temp(2048)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_rubbish_in_a_request_stays_there(backend, rng, poison):
    a, b = 50, 60
    case = prefill_case(rng, query_lens=[a, b], pad=0, dtype="float32")
    q, kv, k_rope, meta = case.args
    clean = solve(case, backend)
    kv = kv.at[a - 5].set(poison)
    dirty = run(mla_prefill, q, kv, k_rope, meta, scale=case.scale, backend=backend)
    np.testing.assert_array_equal(dirty.out[a:], clean.out[a:])
    np.testing.assert_array_equal(dirty.lse[a:], clean.lse[a:])
    np.testing.assert_array_equal(dirty.out[: a - 5], clean.out[: a - 5])
    assert not np.isfinite(dirty.out[a - 5 : a]).any()
