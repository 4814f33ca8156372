"""The gated feed-forward block."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mla_jax.model.linear import Linear, fused
from mla_jax.model.norm import RMSNorm
from mla_jax.pallas.grouped_matmul.ref import swiglu
from mla_jax.placement import Placement
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
        self,
        x: Float[Array, "tokens hidden"],
        *,
        norm: RMSNorm | None = None,
        onto: Float[Array, "tokens hidden"] | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Of ``norm(x)``, if there is a norm; ``onto``, the residual, is added.

        Few rows take two kernels for all of it, where those qualify.
        """
        where: dict[str, Any] = {"backend": backend, "placement": placement}
        found = None
        if self.limit is None:
            found = fused(x, (self.gate, self.up), norm=norm, gated=True, **where)
        if found is not None:
            (inner,) = found
        else:
            x = x if norm is None else norm(x)
            gate, up = self.gate(x, backend=backend), self.up(x, backend=backend)
            inner = swiglu(gate, up, self.limit)
        if found := fused(inner, (self.down,), onto=onto, **where):
            return found[0]
        y = self.down(inner, backend=backend)
        return y if onto is None else onto + y
