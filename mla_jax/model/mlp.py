"""The gated feed-forward block."""

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.model.linear import Linear
from mla_jax.types import Array, Float

__all__ = ["SwiGLU"]


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        def linear(into: int, out: int) -> Linear:
            return Linear((into,), (out,), bias=bias, dtype=dtype, rngs=rngs, fp8=fp8)

        self.gate, self.up = linear(hidden, width), linear(hidden, width)
        self.down = linear(width, hidden)

    def __call__(
        self, x: Float[Array, "tokens hidden"], *, backend: str | None = None
    ) -> Float[Array, "tokens hidden"]:
        gate, up = self.gate(x, backend=backend), self.up(x, backend=backend)
        return self.down(jax.nn.silu(gate) * up, backend=backend)
