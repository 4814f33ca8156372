"""The gated feed-forward block."""

import jax.numpy as jnp
from flax import nnx

from mla_jax.model.linear import Linear
from mla_jax.pallas.grouped_matmul.ref import swiglu
from mla_jax.types import Array, Float

__all__ = ["SwiGLU"]


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``; with ``limit`` gate and up are clamped to it first."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
        limit: float | None = None,
    ):
        self.limit = limit

        def linear(into: int, out: int) -> Linear:
            return Linear((into,), (out,), bias=bias, dtype=dtype, rngs=rngs, fp8=fp8)

        self.gate, self.up = linear(hidden, width), linear(hidden, width)
        self.down = linear(width, hidden)

    def __call__(
        self, x: Float[Array, "tokens hidden"], *, backend: str | None = None
    ) -> Float[Array, "tokens hidden"]:
        gate, up = self.gate(x, backend=backend), self.up(x, backend=backend)
        return self.down(swiglu(gate, up, self.limit), backend=backend)
