"""Products with block-scaled e4m3 weights on any device: widened to x's dtype first."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.fp8_matmul.ref import rounded_rows
from mla_jax.pallas.grouped_matmul import xla
from mla_jax.types import Array, BlockScaled, Float

__all__ = ["matmul_fp8", "routed_experts_fp8"]


def matmul_fp8(
    x: Float[Array, "tokens channels"], weight: BlockScaled, *, groups: int = 1,
    quantise_rows: bool,
) -> Float[Array, "tokens out"]:  # fmt: skip
    """``ref.matmul_fp8`` with weights, and quantised rows, rounded to x's dtype.

    The sum is in float32 and is rounded while it is stored: no float32 result is in memory.
    """
    exact = x.dtype == jnp.float32
    facts: dict[str, Any] = {
        "precision": lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        "preferred_element_type": x.dtype,
    }
    rows = rounded_rows(x).astype(x.dtype) if quantise_rows else x
    wide = weight.widened(x.dtype)
    if groups == 1:
        return lax.dot_general(rows, wide, (((1,), (1,)), ((), ())), **facts)
    rows = rows.reshape(len(x), groups, wide.shape[1])
    wide = wide.reshape(groups, len(wide) // groups, wide.shape[1])
    y = lax.dot_general(rows, wide, (((2,), (2,)), ((1,), (0,))), **facts)  # [groups, tokens, out]
    return y.swapaxes(0, 1).reshape(len(x), -1)


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, then: AddNorm | None = None, quantise_rows: bool,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts_fp8`` with weights, and quantised rows, rounded to x's dtype."""
    g, u, d = (w.widened(x.dtype).swapaxes(1, 2) for w in (gate, up, down))
    if not quantise_rows:
        return xla.routed_experts(x, g, u, d, weights, experts, limit=limit, then=then)

    def rounded(rows: Array) -> Array:
        return rounded_rows(rows).astype(rows.dtype)

    facts = {"limit": limit, "then": then, "between": rounded}
    return xla.routed_experts(rounded(x), g, u, d, weights, experts, **facts)
