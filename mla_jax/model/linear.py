"""Matrix products with a stated accumulator, and the linear layer built on them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.types import Array, Float

__all__ = ["Linear", "contract", "precision_of", "project"]


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """float32 operands multiply in float32 (never TF32); 16-bit ones at their own speed."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def contract(spec: str, x: Array, y: Array, *, out_dtype: jnp.dtype | None = None) -> Array:
    """``einsum(spec, x, y)`` accumulated in float32, rounded once to ``out_dtype`` (x's).

    Rounding while storing saves a GPU a pass over the result: up to a quarter of the time.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype

    def product(x: Array, y: Array) -> Array:
        precision = precision_of(x.dtype)
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=out_dtype)

    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32)).astype(out_dtype)

    # XLA's CPU backend has no batched product of 16-bit operands into float32.
    return lax.platform_dependent(x, y, cpu=widened, default=product)


class Linear(nnx.Module):
    """``y = x @ kernel (+ bias)`` with ``kernel [*in, *out]``; heads are axes of their own."""

    def __init__(
        self,
        in_dims: tuple[int, ...],
        out_dims: tuple[int, ...],
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        kernel = jax.random.normal(rngs.params(), (*in_dims, *out_dims), jnp.float32)
        self.kernel = nnx.Param((kernel * math.prod(in_dims) ** -0.5).astype(dtype))
        self.bias = nnx.Param(jnp.zeros(out_dims, dtype)) if bias else None
        self.in_axes = len(in_dims)

    def __call__(self, x: Float[Array, "*axes"]) -> Float[Array, "*result"]:
        """Accumulated in float32, rounded once to the dtype of ``x``."""
        bias = None if self.bias is None else self.bias[...]
        return project(x, self.kernel[...], bias, in_axes=self.in_axes)


def project(
    x: Float[Array, "*axes"],
    kernel: Float[Array, "*dims"],
    bias: Float[Array, "*out"] | None = None,
    *,
    in_axes: int = 1,
) -> Float[Array, "*result"]:
    """``x @ kernel (+ bias)`` over the last ``in_axes`` axes of ``x``, rounded once."""
    over_x = tuple(range(x.ndim - in_axes, x.ndim))
    y = lax.dot_general(
        x,
        kernel,
        ((over_x, tuple(range(in_axes))), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=x.dtype if bias is None else jnp.float32,
    )
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)
