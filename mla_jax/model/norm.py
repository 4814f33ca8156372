"""Root-mean-square normalisation."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.types import Array, Float

__all__ = ["RMSNorm"]


class RMSNorm(nnx.Module):
    """``scale * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (self.scale[...].astype(jnp.float32) * y).astype(x.dtype)
