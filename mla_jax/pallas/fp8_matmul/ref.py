"""Definition of products with block-scaled e4m3 weights: those of the widened ones in float32."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.grouped_matmul import ref
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, round_up

__all__ = ["matmul_fp8", "rounded_rows", "routed_experts_fp8"]


def matmul_fp8(
    x: Float[Array, "tokens channels"], weight: BlockScaled, *, groups: int = 1,
    quantise_rows: bool = False,
) -> Float[Array, "tokens out"]:  # fmt: skip
    """``x W^T`` in float32, rounded once to x's dtype; of each group of both for itself."""
    rows = rounded_rows(x) if quantise_rows else x.astype(jnp.float32)
    wide = weight.widened(jnp.float32).reshape(groups, -1, weight.shape[1])
    rows = rows.reshape(len(x), groups, -1)
    y = jnp.einsum("tgi,goi->tgo", rows, wide, precision=lax.Precision.HIGHEST)
    return y.reshape(len(x), -1).astype(x.dtype)


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
    quantise_rows: bool = False,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``grouped_matmul.ref.routed_experts`` with the widened weights.

    With ``quantise_rows`` both operands of each product are e4m3: rows, and gated products.
    """
    g, u, d = (w.widened(jnp.float32).swapaxes(1, 2) for w in (gate, up, down))
    if not quantise_rows:
        return ref.routed_experts(x, g, u, d, weights, experts, limit=limit, then=then)
    facts: dict[str, Any] = {"limit": limit, "between": rounded_rows}
    y: Any = ref.routed_experts(rounded_rows(x), g, u, d, weights, experts, **facts)
    return ref.add_norm(y.astype(x.dtype), then)


def rounded_rows(x: Float[Array, "rows channels"]) -> Float[Array, "rows channels"]:
    """Rows in e4m3, and back in float32: 128 channels have one float32 scale, the largest is 448.

    No scale is below the least normal float32: devices take smaller numbers for 0.
    Source: DeepSeek-V3 (arXiv:2412.19437) 3.3.2.
    """
    rows, channels = x.shape
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -channels % SCALE_BLOCK)))
    spans = wide.reshape(rows, round_up(channels, SCALE_BLOCK) // SCALE_BLOCK, SCALE_BLOCK)
    largest = jnp.abs(spans).max(axis=2, keepdims=True)
    scale = jnp.maximum(jnp.where(largest == 0, 1, largest / 448), jnp.finfo(jnp.float32).tiny)
    values = (spans / scale).astype(jnp.float8_e4m3fn)
    values = lax.optimization_barrier(values)  # or XLA may leave out both casts
    return (values.astype(jnp.float32) * scale).reshape(wide.shape)[:, :channels]
