"""Products with block-scaled e4m3 weights on any device: widened to x's dtype first."""

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.grouped_matmul import xla
from mla_jax.types import Array, BlockScaled, Float

__all__ = ["matmul_fp8", "routed_experts_fp8"]


def matmul_fp8(x: Float[Array, "tokens into"], weight: BlockScaled) -> Float[Array, "tokens out"]:
    """``ref.matmul_fp8`` with weights rounded to x's dtype.

    The sum is in float32 and is rounded while it is stored: no float32 result is in memory.
    """
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x,
        weight.widened(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=x.dtype,
    )


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, then: AddNorm | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts_fp8`` with weights rounded to x's dtype."""
    g, u, d = (w.widened(x.dtype).swapaxes(1, 2) for w in (gate, up, down))
    return xla.routed_experts(x, g, u, d, weights, experts, limit=limit, then=then)
