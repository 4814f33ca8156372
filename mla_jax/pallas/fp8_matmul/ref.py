"""Definition of products with block-scaled e4m3 weights: those of the widened ones in float32."""

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.grouped_matmul import ref
from mla_jax.types import Array, BlockScaled, Float

__all__ = ["matmul_fp8", "routed_experts_fp8"]


def matmul_fp8(x: Float[Array, "tokens into"], weight: BlockScaled) -> Float[Array, "tokens out"]:
    """``x W^T`` in float32, rounded once to x's dtype."""
    wide = weight.widened(jnp.float32)
    return jnp.matmul(x.astype(jnp.float32), wide.T, precision=lax.Precision.HIGHEST).astype(
        x.dtype
    )


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``grouped_matmul.ref.routed_experts`` with the widened weights."""
    g, u, d = (w.widened(jnp.float32).swapaxes(1, 2) for w in (gate, up, down))
    return ref.routed_experts(x, g, u, d, weights, experts, limit=limit, then=then)
