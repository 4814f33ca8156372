"""The gated feed-forward block."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mla_jax.model.linear import Linear
from mla_jax.pallas.axes import AddNorm
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
        self.limit, self.biased, self.fp8 = limit, bias, fp8
        facts = {"bias": bias, "dtype": dtype, "rngs": rngs, "fp8": fp8}
        self.gate = Linear((hidden,), (width,), **facts, parallel="column")
        self.up = Linear((hidden,), (width,), **facts, parallel="column")
        self.down = Linear((width,), (hidden,), **facts, parallel="row")

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        facts = {"backend": backend, "placement": placement}
        return self.down(self._gated(x, **facts), **facts)

    def onto(
        self,
        then: AddNorm,
        x: Float[Array, "tokens hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The residual plus ``self(x)``, and its norm."""
        facts = {"backend": backend, "placement": placement}
        return self.down.onto(then, self._gated(x, **facts), **facts)

    def _gated(self, x: Array, **facts: Any) -> Array:
        return swiglu(self.gate(x, **facts), self.up(x, **facts), self.limit)
