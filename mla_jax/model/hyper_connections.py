"""Manifold-constrained hyper-connections (mHC): the residual as parallel streams.

A sub-block reads a weighted sum of the streams ``S [N, D]`` and is added to all of them, while the
streams are mixed by a matrix that Sinkhorn's normalisation makes nearly doubly stochastic. With
``z = W rms(vec(S))``, cut into N, N and N x N entries::

    pre  = sigmoid(a_0 z_pre + b_pre) + eps          x  = sum_n pre_n S_n
    post = 2 sigmoid(a_1 z_post + b_post)            S' = post y(x) + M^T S
    M    = sinkhorn(softmax_rows(a_2 z_mix + b_mix) + eps)

All of it is computed in float32. Source: mHC, arXiv:2512.24880; DeepSeek-V4.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.config_v4 import StreamConfig
from mla_jax.types import Array, Float

__all__ = ["Mixing", "StreamHead", "Streams", "sinkhorn"]


class Mixing(NamedTuple):
    """How a sub-block's result goes back to the streams; float32."""

    post: Float[Array, "tokens streams"]
    matrix: Float[Array, "tokens streams streams"]

    def back(
        self, streams: Float[Array, "tokens streams hidden"], y: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens streams hidden"]:
        """``post_k y + sum_j M[j, k] S_j``, rounded once to the dtype of the streams."""
        wide = streams.astype(jnp.float32)
        mixed = jnp.einsum("tjk,tjd->tkd", self.matrix, wide, precision=lax.Precision.HIGHEST)
        added = self.post[..., None] * y.astype(jnp.float32)[:, None]
        return (added + mixed).astype(streams.dtype)


def sinkhorn(
    m: Float[Array, "tokens streams streams"], *, rounds: int, eps: float
) -> Float[Array, "tokens streams streams"]:
    """Columns, then ``rounds - 1`` times rows and columns, divided by their sums ``+ eps``."""
    m = m / (m.sum(axis=-2, keepdims=True) + eps)
    for _ in range(rounds - 1):
        m = m / (m.sum(axis=-1, keepdims=True) + eps)
        m = m / (m.sum(axis=-2, keepdims=True) + eps)
    return m


class Streams(nnx.Module):
    """The mixing around one sub-block; its parameters are float32 whatever the model's dtype."""

    def __init__(self, hidden: int, config: StreamConfig, *, eps: float, rngs: nnx.Rngs):
        n = config.count
        self.proj = nnx.Param(_drawn(rngs, (n, hidden, (2 + n) * n)))
        self.bias = nnx.Param(jnp.zeros(((2 + n) * n,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))
        self.config, self.eps = config, eps

    def __call__(
        self, streams: Float[Array, "tokens streams hidden"]
    ) -> tuple[Float[Array, "tokens hidden"], Mixing]:
        """What the sub-block reads, and how its result goes back."""
        n, eps = self.config.count, self.config.eps
        z = _projected(streams, self.proj[...], self.eps)
        a, b = self.scale[...], self.bias[...]
        pre = jax.nn.sigmoid(a[0] * z[:, :n] + b[:n]) + eps
        post = 2 * jax.nn.sigmoid(a[1] * z[:, n : 2 * n] + b[n : 2 * n])
        rows = (a[2] * z[:, 2 * n :] + b[2 * n :]).reshape(-1, n, n)
        start = jax.nn.softmax(rows, axis=-1) + eps
        matrix = sinkhorn(start, rounds=self.config.rounds, eps=eps)
        return _collapsed(pre, streams), Mixing(post, matrix)


class StreamHead(nnx.Module):
    """The streams' last sum: ``sum_n (sigmoid(a z_n + b_n) + eps) S_n``."""

    def __init__(self, hidden: int, config: StreamConfig, *, eps: float, rngs: nnx.Rngs):
        self.proj = nnx.Param(_drawn(rngs, (config.count, hidden, config.count)))
        self.bias = nnx.Param(jnp.zeros((config.count,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((1,), jnp.float32))
        self.config, self.eps = config, eps

    def __call__(
        self, streams: Float[Array, "tokens streams hidden"]
    ) -> Float[Array, "tokens hidden"]:
        z = _projected(streams, self.proj[...], self.eps)
        pre = jax.nn.sigmoid(self.scale[...] * z + self.bias[...]) + self.config.eps
        return _collapsed(pre, streams)


def _drawn(rngs: nnx.Rngs, shape: tuple[int, int, int]) -> Float[Array, "streams hidden out"]:
    kernel = jax.random.normal(rngs.params(), shape, jnp.float32)
    return kernel * (shape[0] * shape[1]) ** -0.5


def _projected(
    streams: Float[Array, "tokens streams hidden"],
    kernel: Float[Array, "streams hidden out"],
    eps: float,
) -> Float[Array, "tokens out"]:
    """``W rms(vec(S))``; the norm divides the product, which is the same."""
    wide = streams.astype(jnp.float32)
    z = jnp.einsum("tnd,ndo->to", wide, kernel, precision=lax.Precision.HIGHEST)
    return z * lax.rsqrt((wide**2).mean(axis=(1, 2)) + eps)[:, None]


def _collapsed(
    pre: Float[Array, "tokens streams"], streams: Float[Array, "tokens streams hidden"]
) -> Float[Array, "tokens hidden"]:
    """``sum_n pre_n S_n`` in float32, rounded once."""
    return (pre[..., None] * streams.astype(jnp.float32)).sum(axis=1).astype(streams.dtype)
