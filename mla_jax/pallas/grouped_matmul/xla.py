"""Routed experts on any device: rows sorted by expert, three grouped products."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, ExpertsIn, ExpertsOut, Hidden
from mla_jax.pallas.grouped_matmul.ref import add_norm, swiglu
from mla_jax.types import Array

__all__ = ["routed_experts"]


def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, then: AddNorm | None = None,
    between: Callable[[Array], Array] | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts``, a chosen expert's rows alone; each product is rounded to x's dtype.

    Products accumulate in float32 (float32 operands never multiply in TF32); the sum over
    choices is float32. ``between`` is applied to what ``down`` multiplies.
    """
    count = gate.shape[0]
    # An index that is no expert sorts behind all of them, and no group holds it.
    flat = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros((count,), jnp.int32).at[flat].add(1, mode="drop")
    rows = jnp.asarray(x)[order // experts.shape[1]]  # [tokens * topk, hidden], by expert
    exact = x.dtype == jnp.float32

    def grouped(a: Array, w: Array) -> Array:
        return lax.ragged_dot(
            a,
            w,
            sizes,
            precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        ).astype(a.dtype)

    h = swiglu(grouped(rows, gate), grouped(rows, up), limit)
    y = grouped(h if between is None else between(h), down)
    chosen = flat[order] < count
    scaled = y.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    scaled = jnp.where(chosen[:, None], scaled, 0.0)
    back = jnp.zeros_like(scaled).at[order].set(scaled, unique_indices=True)
    y = back.reshape(*experts.shape, x.shape[1]).sum(axis=1).astype(x.dtype)
    return add_norm(y, then)
