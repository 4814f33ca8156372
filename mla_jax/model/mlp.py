"""The gated feed-forward block."""

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.model.linear import Linear
from mla_jax.types import Array, Float

__all__ = ["SwiGLU"]


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = Linear((hidden,), (width,), bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear((hidden,), (width,), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear((width,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
