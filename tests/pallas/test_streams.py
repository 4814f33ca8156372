"""Hyper-connections: every backend against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.ops import mix_streams
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.cases import draw, run
from tests.pallas.experts import missing
from tests.pallas.streams import EPS, NORM_EPS, ROUNDS, arrays, inputs, judge

OP = "mix_streams"
FACTS = {"rounds": ROUNDS, "eps": EPS, "norm_eps": NORM_EPS}


@pytest.mark.parametrize(("tokens", "n", "hidden"), [(1, 4, 4096), (5, 2, 24), (40, 4, 200)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("normed", [False, True])
def test_against_the_truth(tokens, n, hidden, dtype, normed, backend, rng):
    given = inputs(rng, tokens, n, hidden, dtype=dtype)
    given += (draw(rng, hidden, dtype=dtype),) * normed
    got = run(mix_streams, *arrays(given), backend=backend, **FACTS)
    judge(got, given, atol=1e-2 if dtype == "bfloat16" else 1e-5)


def test_a_token_alone_is_the_token_among_neighbours(backend, rng):
    """And NaN in another token's streams stays there."""
    given = inputs(rng, 40, 4, 256)
    whole = run(mix_streams, *arrays(given), backend=backend, **FACTS)
    given[0][:7] = np.nan
    again = run(mix_streams, *arrays(given), backend=backend, **FACTS)
    for a, b in zip(whole, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a[7:], np.float32), np.asarray(b[7:], np.float32))


def test_many_tokens(backend, rng):
    """More than the product's pieces are cut for."""
    given = inputs(rng, 1100, 4, 128)
    judge(run(mix_streams, *arrays(given), backend=backend, **FACTS), given, atol=1e-2)


def test_no_tokens(backend):
    given = jnp.zeros((0, 4, 64)), jnp.zeros((4, 64, 24)), jnp.zeros(3), jnp.zeros(24)
    x, post, matrix = run(mix_streams, *given, backend=backend, **FACTS)
    assert (x.shape, post.shape, matrix.shape) == ((0, 64), (0, 4), (0, 4, 4))


def test_refusals(rng):
    streams, proj, scale, bias = arrays(inputs(rng, 3, 4, 32))
    with pytest.raises(ArgumentError, match=r"mix_streams: proj.*hidden"):
        ops.explain(OP, streams, proj[:, 1:], scale, bias, **FACTS)
    with pytest.raises(ArgumentError, match=r"columns of proj: given 23; allowed: 24"):
        ops.explain(OP, streams, proj[..., 1:], scale, bias[1:], **FACTS)
    with pytest.raises(ArgumentError, match=r"mix_streams: gain.*hidden"):
        ops.explain(OP, streams, proj, scale, bias, bias, **FACTS)
    assert "xla: accepted" in ops.explain(OP, streams, proj, scale, bias, **FACTS)


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("tokens", [8, 128, 8192])
def test_compiles_for_sm90_with_three_launches(tokens, monkeypatch):
    """And the streams are not widened in memory; of many tokens the weights are cut once."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec = jax.ShapeDtypeStruct
    compiled, _ = aot.compile_sm90(
        lambda *given: mix_streams(*given, backend="triton", **FACTS),
        spec((tokens, 4, 4096), jnp.bfloat16),
        *(spec(shape, jnp.float32) for shape in ((4, 4096, 24), (3,), (24,))),
        spec((4096,), jnp.bfloat16),
    )
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 3, entry
    assert entry.count(" fusion(") == (tokens > 1024) and "cublas" not in entry, entry
    assert "bf16[3,16384,24]" in entry or tokens <= 1024, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 21
