"""Definition of products with block-scaled e4m3 weights: those of the widened ones in float32."""

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.grouped_matmul.ref import add_norm, swiglu
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, round_up

__all__ = ["matmul_fp8", "rounded_rows", "routed_experts_fp8"]


def matmul_fp8(
    x: Float[Array, "tokens into"], weight: BlockScaled, *, quantise_rows: bool = False
) -> Float[Array, "tokens out"]:
    """``x W^T`` in float32, rounded once to x's dtype."""
    rows = rounded_rows(x) if quantise_rows else x
    return _product(rows, weight.widened(jnp.float32).T).astype(x.dtype)


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
    quantise_rows: bool = False,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``grouped_matmul.ref.routed_experts`` with the widened weights.

    With ``quantise_rows`` both operands of each product are e4m3: rows, and gated products.
    """

    def add(y: Array, e: Array) -> tuple[Array, None]:
        g, u, d = (BlockScaled(values=w.values[e], scale=w.scale[e]) for w in (gate, up, down))
        rows = x.astype(jnp.float32)
        g, u = (matmul_fp8(rows, w, quantise_rows=quantise_rows) for w in (g, u))
        h = swiglu(g, u, limit)
        chosen = experts == e
        share = jnp.where(chosen, weights, 0).sum(axis=1, keepdims=True)
        h = share * matmul_fp8(h, d, quantise_rows=quantise_rows)
        return y + jnp.where(chosen.any(axis=1, keepdims=True), h, 0), None

    y, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(gate.shape[0]))
    return add_norm(y.astype(x.dtype), then)


def rounded_rows(x: Float[Array, "rows channels"]) -> Float[Array, "rows channels"]:
    """Rows in e4m3, and back in float32: 128 channels have one float32 scale, the largest is 448.

    Source: DeepSeek-V3 (arXiv:2412.19437) 3.3.2.
    """
    rows, channels = x.shape
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -channels % SCALE_BLOCK)))
    spans = wide.reshape(rows, round_up(channels, SCALE_BLOCK) // SCALE_BLOCK, SCALE_BLOCK)
    largest = jnp.abs(spans).max(axis=2, keepdims=True)
    scale = jnp.where(largest == 0, 1, largest / 448)
    values = (spans / scale).astype(jnp.float8_e4m3fn)
    values = lax.optimization_barrier(values)  # or XLA may leave out both casts
    return (values.astype(jnp.float32) * scale).reshape(wide.shape)[:, :channels]


def _product(x: Float[Array, "tokens into"], w: Float[Array, "into out"]) -> Array:
    return jnp.matmul(x.astype(jnp.float32), w, precision=lax.Precision.HIGHEST)
