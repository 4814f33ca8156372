"""Normalisation over the last axis: by root mean square, or by mean and variance."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.pallas.append.ref import rms_norm
from mla_jax.types import Array, Float

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nnx.Module):
    """``scale * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return rms_norm(x, self.scale[...], eps=self.eps)


class LayerNorm(nnx.Module):
    """``scale * (x - mean(x)) / sqrt(var(x) + eps) + bias``; parameters and sums in float32."""

    def __init__(self, dim: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        scaled = centred * lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + self.eps)
        return (self.scale[...] * scaled + self.bias[...]).astype(x.dtype)
