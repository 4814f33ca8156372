"""Definition of what a sub-block reads of its streams, and its path on every device."""

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import Mixed, StreamRows
from mla_jax.types import Array, Float

__all__ = ["collapsed", "mix_streams", "projected", "sinkhorn"]


def mix_streams(
    streams: StreamRows, proj: Float[Array, "streams hidden out"], scale: Float[Array, "3"],
    bias: Float[Array, "out"], gain: Float[Array, "hidden"] | None, *, rounds: int, eps: float,
    norm_eps: float,
) -> Mixed:  # fmt: skip
    """``(x, post, M)`` of ``model/hyper_connections.py``, all in float32 but for x."""
    n = streams.shape[1]
    z, a, b = projected(streams, proj, norm_eps), scale, bias
    pre = jax.nn.sigmoid(a[0] * z[:, :n] + b[:n]) + eps
    post = 2 * jax.nn.sigmoid(a[1] * z[:, n : 2 * n] + b[n : 2 * n])
    rows = (a[2] * z[:, 2 * n :] + b[2 * n :]).reshape(-1, n, n)
    matrix = sinkhorn(jax.nn.softmax(rows, axis=-1) + eps, rounds=rounds, eps=eps)
    x = collapsed(pre, streams)
    return x if gain is None else rms_norm(x, gain, eps=norm_eps), post, matrix


def sinkhorn(
    m: Float[Array, "tokens streams streams"], *, rounds: int, eps: float
) -> Float[Array, "tokens streams streams"]:
    """Columns, then ``rounds - 1`` times rows and columns, divided by their sums ``+ eps``."""

    def divided(m: Array, axis: int) -> Array:
        return m / (m.sum(axis=axis, keepdims=True) + eps)

    m = divided(m, -2)
    # Written out, some forty divisions were a quarter of the kernels in a step on a CPU.
    return lax.fori_loop(1, rounds, lambda _, m: divided(divided(m, -1), -2), m)


def projected(
    streams: StreamRows, kernel: Float[Array, "streams hidden out"], eps: float
) -> Float[Array, "tokens out"]:
    """``W rms(vec(S))``; the norm divides the product, which is the same."""
    wide = streams.astype(jnp.float32)
    z = jnp.einsum("tnd,ndo->to", wide, kernel, precision=lax.Precision.HIGHEST)
    return z * lax.rsqrt((wide**2).mean(axis=(1, 2)) + eps)[:, None]


def collapsed(pre: Float[Array, "tokens streams"], streams: StreamRows) -> Array:
    """``sum_n pre_n S_n`` in float32, rounded once."""
    return (pre[..., None] * streams.astype(jnp.float32)).sum(axis=1).astype(streams.dtype)
