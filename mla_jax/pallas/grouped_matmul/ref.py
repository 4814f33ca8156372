"""Definition of the routed experts: one expert after the other, over all tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, ExpertsIn, ExpertsOut, Hidden
from mla_jax.types import Array, Float

__all__ = ["add_norm", "routed_experts", "swiglu"]


def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
    between: Callable[[Array], Array] | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``y_t = sum_k weights[t, k] down_e swiglu(gate_e x_t, up_e x_t)``, ``e = experts[t, k]``.

    An index that is no expert adds nothing. Float32 throughout, rounded once at the end.
    ``between`` is applied to what ``down`` multiplies.
    """

    def add(y: Array, e: Array) -> tuple[Array, None]:
        g, u, d = (w[e].astype(jnp.float32) for w in (gate, up, down))
        rows = x.astype(jnp.float32)
        h = swiglu(_product(rows, g), _product(rows, u), limit)
        h = _product(h if between is None else between(h), d)
        chosen = experts == e
        share = jnp.where(chosen, weights, 0).sum(axis=1, keepdims=True)
        return y + jnp.where(chosen.any(axis=1, keepdims=True), share * h, 0), None

    y, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), jnp.arange(gate.shape[0]))
    return add_norm(y.astype(x.dtype), then)


def add_norm(y: Hidden, then: AddNorm | None) -> Hidden | tuple[Hidden, Hidden]:
    """``y``; or ``(h, norm(h))`` of ``h = residual + y``, rounded before it is normalised."""
    if then is None:
        return y
    h = then.residual + y
    return h, rms_norm(h, then.gain, eps=then.eps)


def swiglu(
    g: Float[Array, "rows width"], u: Float[Array, "rows width"], limit: float | None
) -> Float[Array, "rows width"]:
    """``silu(g) * u``, with ``g`` at most ``limit`` and ``u`` within ``limit`` of zero.

    Source: DeepSeek-V4's ``swiglu_limit``, experts and the shared expert; None elsewhere.
    """
    if limit is not None:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    return jax.nn.silu(g) * u


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
