"""Manifold-constrained hyper-connections (mHC): the residual as parallel streams.

A sub-block reads a weighted sum of the streams ``S [N, D]`` and is added to all of them, while the
streams are mixed by a matrix that Sinkhorn's normalisation makes nearly doubly stochastic. With
``z = W rms(vec(S))``, cut into N, N and N x N entries::

    pre  = sigmoid(a_0 z_pre + b_pre) + eps          x  = sum_n pre_n S_n
    post = 2 sigmoid(a_1 z_post + b_post)            S' = post y(x) + M^T S
    M    = sinkhorn(softmax_rows(a_2 z_mix + b_mix) + eps)

All of it is computed in float32. Source: mHC, arXiv:2512.24880; DeepSeek-V4.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax import ops
from mla_jax.config_v4 import StreamConfig
from mla_jax.model.linear import product_float32
from mla_jax.model.sharding import divided
from mla_jax.pallas.streams.ref import collapsed
from mla_jax.placement import Placement
from mla_jax.types import Array, Float

__all__ = ["Mixing", "StreamHead", "Streams"]


class Mixing(NamedTuple):
    """How a sub-block's result goes back to the streams; float32."""

    post: Float[Array, "tokens streams"]
    matrix: Float[Array, "tokens streams streams"]

    def back(
        self, streams: Float[Array, "tokens streams hidden"], y: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens streams hidden"]:
        """``post_k y + sum_j M[j, k] S_j``, rounded once to the dtype of the streams."""
        # Written out, XLA makes one pass of it; a product by cuBLAS is of matrices of n rows.
        mixed = self.post[..., None] * y.astype(jnp.float32)[:, None]
        for j in range(streams.shape[1]):
            mixed += self.matrix[:, j, :, None] * streams[:, j, None].astype(jnp.float32)
        return mixed.astype(streams.dtype)


class Streams(nnx.Module):
    """The mixing around one sub-block; its parameters are float32 whatever the model's dtype."""

    def __init__(self, hidden: int, config: StreamConfig, *, eps: float, rngs: nnx.Rngs):
        n = config.count
        self.proj = nnx.Param(_drawn(rngs, (n, hidden, (2 + n) * n)))
        self.bias = nnx.Param(jnp.zeros(((2 + n) * n,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))
        self.config, self.eps = config, eps

    def __call__(
        self,
        streams: Float[Array, "tokens streams hidden"],
        gain: Float[Array, "hidden"] | None = None,
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Mixing]:
        """What the sub-block reads, and how its result goes back; the same on every device.

        With the ``gain`` of the sub-block's norm what it reads is normalised, by the same ``eps``.
        """
        facts: dict = {"rounds": self.config.rounds, "eps": self.config.eps, "norm_eps": self.eps}
        facts["backend"] = ops.named("mix_streams", backend)

        mix = functools.partial(ops.mix_streams, **facts)
        mix = divided(mix, placement, given=(None,) * 5, returned=(None,) * 3)
        x, *mixing = mix(streams, self.proj[...], self.scale[...], self.bias[...], gain)
        return x, Mixing(*mixing)


class StreamHead(nnx.Module):
    """The streams' last sum: ``sum_n (sigmoid(a z_n + b_n) + eps) S_n``."""

    def __init__(self, hidden: int, config: StreamConfig, *, eps: float, rngs: nnx.Rngs):
        self.proj = nnx.Param(_drawn(rngs, (config.count, hidden, config.count)))
        self.bias = nnx.Param(jnp.zeros((config.count,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((1,), jnp.float32))
        self.config, self.eps = config, eps

    def __call__(
        self,
        streams: Float[Array, "tokens streams hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """The same on every device."""
        tokens, n, hidden = streams.shape
        rows, kernel = streams.reshape(tokens, n * hidden), self.proj[...].reshape(n * hidden, n)
        z = product_float32(rows, kernel, backend=backend, placement=placement)
        squares = (streams.astype(jnp.float32) ** 2).mean(axis=(1, 2))
        z = z * jax.lax.rsqrt(squares + self.eps)[:, None]
        pre = jax.nn.sigmoid(self.scale[...] * z + self.bias[...]) + self.config.eps
        return collapsed(pre, streams)


def _drawn(rngs: nnx.Rngs, shape: tuple[int, int, int]) -> Float[Array, "streams hidden out"]:
    kernel = jax.random.normal(rngs.params(), shape, jnp.float32)
    return kernel * (shape[0] * shape[1]) ** -0.5
