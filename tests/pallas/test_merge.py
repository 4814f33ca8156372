"""The algebra of attention states, every registered backend."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.ops import apply_sinks, merge_attn_states
from mla_jax.types import AttnState
from tests.cases import draw, run
from tests.compare import close_states, same_bits

OP = "merge_attn_states"
INF, NAN = np.inf, np.nan


def state(out, lse, dtype="float32"):
    """One token, one head, one channel."""
    return AttnState(out=jnp.full((1, 1, 1), out, dtype), lse=jnp.full((1, 1), lse, jnp.float32))


def random_state(rng, tokens=4, heads=3, dim=5, empty=0.3):
    lse = draw(rng, tokens, heads, std=3.0)
    lse = np.where(rng.random(lse.shape) < empty, -INF, lse)
    out = np.where(np.isinf(lse)[..., None], 0.0, draw(rng, tokens, heads, dim))
    return AttnState(out=jnp.asarray(out, jnp.float32), lse=jnp.asarray(lse, jnp.float32))


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ((2, 0), (6, np.log(3)), (5, 1.3862944)),
        ((2, -INF), (6, 1.5), (6, 1.5)),
        ((2, INF), (6, 1.5), (6, 1.5)),
        ((2, 1.5), (6, -INF), (2, 1.5)),
        ((2, -INF), (6, -INF), (0, -INF)),
        ((2, INF), (6, -INF), (0, -INF)),
        ((NAN, -INF), (6, 1.5), (6, 1.5)),
        ((NAN, -INF), (NAN, INF), (0, -INF)),
        ((5, 1000), (7, 1000), (6, 1000.6931)),
        ((5, -1000), (7, -1003), (5.0948520, -999.95142)),
        ((5, 0), (7, 104), (7, 104)),
        ((5, NAN), (7, 1), (NAN, NAN)),
        ((5, 1), (7, NAN), (NAN, NAN)),
    ],
)
def test_two_states(a, b, want, backend):
    got = run(merge_attn_states, state(*a), state(*b), backend=backend)
    np.testing.assert_allclose([float(got.out[0, 0, 0]), float(got.lse[0, 0])], want, rtol=1e-7)


def test_identity_changes_no_bit(backend, rng):
    x = random_state(rng)
    none = AttnState(out=jnp.zeros_like(x.out), lse=jnp.full_like(x.lse, -INF))
    for parts in ((x,), (x, none), (none, x), (none, x, none)):
        same_bits(run(merge_attn_states, *parts, backend=backend), x)
    same_bits(run(merge_attn_states, none, none, backend=backend), none)


@given(seed=st.integers(0, 2**16))
def test_associative_and_commutative(seed):
    rng = np.random.default_rng(seed)
    a, b, c = (random_state(rng) for _ in range(3))
    whole = merge_attn_states(a, b, c)
    close_states(merge_attn_states(merge_attn_states(a, b), c), whole)
    close_states(merge_attn_states(a, merge_attn_states(b, c)), whole)
    close_states(merge_attn_states(c, a, b), whole)
    same_bits(merge_attn_states(a, b), merge_attn_states(b, a))


def test_output_dtype(backend):
    a, b = state(2, 0, "bfloat16"), state(6, 1, "float32")
    assert run(merge_attn_states, a, b, backend=backend).out.dtype == jnp.bfloat16
    got = run(merge_attn_states, a, b, out_dtype=jnp.float32, backend=backend)
    assert got.out.dtype == jnp.float32 and got.lse.dtype == jnp.float32
    assert run(merge_attn_states, state(2, 0, "float16"), b, backend=backend).out.dtype == "float16"


@pytest.mark.parametrize(
    ("lse", "sink", "factor"),
    [
        (np.log(2), 0, 2 / 3), (np.log(2), -INF, 1), (np.log(2), INF, 0),
        (np.log(2), np.log(2), 0.5),
        (-INF, 0, 0), (-INF, -INF, 0), (-INF, INF, 0), (INF, 0, 0), (1000, 0, 1), (-1000, 0, 0),
    ],
)  # fmt: skip
def test_sinks(lse, sink, factor):
    out = NAN if np.isinf(lse) else 3.0
    x = state(out, lse)
    got = apply_sinks(x, jnp.array([sink], jnp.float32))
    np.testing.assert_allclose(got.out[0, 0, 0], 3.0 * factor, rtol=1e-6)
    assert np.asarray(got.lse).tobytes() == np.asarray(x.lse).tobytes()


def test_a_sink_is_one_more_key(rng):
    x = random_state(rng, empty=0.0)
    sinks = jnp.asarray(draw(rng, 3))
    key = AttnState(out=jnp.zeros_like(x.out), lse=jnp.broadcast_to(sinks, x.lse.shape))
    want = merge_attn_states(x, key)
    np.testing.assert_allclose(apply_sinks(x, sinks).out, want.out, rtol=1e-5, atol=1e-7)
