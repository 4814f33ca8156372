"""Definition of products of few rows, with the norm before and what is done with them behind."""

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import Hidden
from mla_jax.pallas.grouped_matmul.ref import swiglu
from mla_jax.types import Array, Float

__all__ = ["project_rows"]


def project_rows(
    x: Float[Array, "tokens into"], weights: tuple[Float[Array, "into _"], ...], *,
    gain: Float[Array, "into"] | None = None, onto: Hidden | None = None, eps: float = 0.0,
    gated: bool = False,
) -> tuple[Float[Array, "tokens _"], ...]:  # fmt: skip
    """``norm(x) W`` of each weight, or ``silu(norm(x) W_0) * (norm(x) W_1)`` if ``gated``.

    Without ``gain`` there is no norm; ``onto`` is added. Float32 throughout, rounded once.
    """
    rows = x.astype(jnp.float32)
    rows = rows if gain is None else rms_norm(rows, gain, eps=eps)
    found = [
        jnp.matmul(rows, w.astype(jnp.float32), precision=lax.Precision.HIGHEST) for w in weights
    ]
    if gated:
        found = [swiglu(found[0], found[1], None)]
    if onto is not None:
        found[0] = found[0] + onto.astype(jnp.float32)
    return tuple(y.astype(x.dtype) for y in found)
