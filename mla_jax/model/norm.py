"""Root-mean-square normalisation."""

import jax.numpy as jnp
from flax import nnx

from mla_jax.pallas.append.ref import rms_norm
from mla_jax.types import Array, Float

__all__ = ["RMSNorm"]


class RMSNorm(nnx.Module):
    """``scale * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return rms_norm(x, self.scale[...], eps=self.eps)
