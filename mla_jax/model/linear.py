"""Matrix products with a stated accumulator, and the linear layer built on them."""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.model.sharding import GROUP_OUTPUTS, divided, divides
from mla_jax.model.sums import summed
from mla_jax.pallas import fp8_matmul
from mla_jax.pallas.axes import AddNorm
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.placement import Placement, several
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, cdiv

__all__ = [
    "GroupedLinear",
    "Linear",
    "contract",
    "precision_of",
    "product_float32",
    "project",
    "scaled_params",
]


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


def product_float32(
    x: Float[Array, "tokens hidden"],
    kernel: Float[Array, "hidden out"],
    *,
    backend: str | None = None,
    placement: Placement | None = None,
) -> Float[Array, "tokens out"]:
    """``ops.matmul_float32``, the same on every device."""
    run = partial(ops.matmul_float32, backend=ops.named("matmul_float32", backend))
    run = divided(run, placement, given=(None, None), returned=None)
    return run(x, kernel)


class Linear(nnx.Module):
    """``y = x @ kernel (+ bias)`` with ``kernel [*in, *out]``; heads are axes of their own.

    With ``fp8`` the weight is block-scaled e4m3 as published: ``kernel [out, in]`` of bytes, rows
    and columns of all axes merged, and ``scale``. Several devices divide it by outputs if it is
    ``parallel`` by ``"column"``, by inputs if by ``"row"``; XLA divides all other weights.
    ``quantise_rows`` rounds ``x`` to e4m3 too, of ``fp8_matmul.MANY`` rows and more
    (``activations``).
    """

    def __init__(
        self,
        in_dims: tuple[int, ...],
        out_dims: tuple[int, ...],
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
        parallel: Literal["column", "row"] | None = None,
    ):
        self.in_dims, self.out_dims, self.parallel = in_dims, out_dims, parallel
        self.fp8, self.quantise_rows = fp8, False
        if fp8:
            self.kernel, self.scale = scaled_params((math.prod(out_dims), math.prod(in_dims)))
        else:
            kernel = jax.random.normal(rngs.params(), (*in_dims, *out_dims), jnp.float32)
            self.kernel = nnx.Param((kernel * math.prod(in_dims) ** -0.5).astype(dtype))
            self.scale = None
        self.bias = nnx.Param(jnp.zeros(out_dims, dtype)) if bias else None

    def __call__(
        self,
        x: Float[Array, "*axes"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "*result"]:
        """Accumulated in float32, rounded once to the dtype of ``x``.

        ``backend`` is that of e4m3 weights; XLA multiplies all others. Over several devices of a
        ``placement`` e4m3 weights need it too: each device rounds what it adds to the sum.
        """
        bias = None if self.bias is None else self.bias[...]
        axes = len(self.in_dims)
        if self.scale is None:
            return project(x, self.kernel[...], bias, in_axes=axes)
        lead, inner = x.shape[: x.ndim - axes], self.out_dims[1:]
        y = self._products(x, None, backend, placement)
        # The first axis of the results may be a device's share of it.
        y = y.reshape(*lead, y.shape[1] // math.prod(inner), *inner)
        return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)

    def onto(
        self,
        then: AddNorm,
        x: Float[Array, "tokens *axes"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The residual plus ``self(x)``, and its norm.

        Devices that add up what they have do all of it at once.
        """
        if self.bias is None and self._divided_by(placement) == "row":
            return self._products(x, then, backend, placement)
        y = self(x, backend=backend, placement=placement)
        return add_norm(y, then)  # pyright: ignore[reportReturnType]

    def _products(
        self, x: Array, then: AddNorm | None, backend: str | None, placement: Placement | None
    ) -> Any:
        """Of e4m3 weights, ``[tokens, out]``; every device has its share of the weight, if any."""
        lead, given = x.shape[: -len(self.in_dims)], x.shape[-len(self.in_dims) :]
        rows = x.reshape(math.prod(lead), math.prod(given))
        many = self.quantise_rows and len(rows) >= fp8_matmul.MANY
        facts = {"backend": ops.named("matmul_fp8", backend), "quantise_rows": many}
        run = partial(ops.matmul_fp8, **facts)
        assert self.scale is not None
        weight = BlockScaled(values=self.kernel[...], scale=self.scale[...])
        if not several(placement):
            return run(rows, weight)
        match self._divided_by(placement):
            case "column":
                on_all = divided(run, placement, given=(None, 0), returned=1)
            case "row":
                on_all = summed(run, placement, given=(1, 1), then=then, backend=backend)
            case _:
                on_all = divided(run, placement, given=(None, None), returned=None)
        return on_all(rows, weight)

    def _divided_by(self, placement: Placement | None) -> str | None:
        """How e4m3 weights are divided, as ``parallel``; None: every device has them whole."""
        if self.scale is None or self.parallel is None:
            return None
        outputs, inputs = self.kernel[...].shape
        size = outputs if self.parallel == "column" else inputs
        return self.parallel if divides(placement, size, unit=SCALE_BLOCK) else None

    def dense(self, dtype: DTypeLike) -> Float[Array, "*dims"]:
        """``[*in, *out]``: the kernel, or the widened bytes in ``dtype``."""
        if self.scale is None:
            return self.kernel[...]
        wide = BlockScaled(values=self.kernel[...], scale=self.scale[...]).widened(dtype)
        return wide.T.reshape(*self.in_dims, *self.out_dims)


class GroupedLinear(nnx.Module):
    """``y[t, g] = x[t, g] @ kernel[g]`` with ``kernel [groups, into, out]``.

    With ``fp8`` the weight is block-scaled e4m3 as published: ``kernel [groups out, into]`` and
    ``scale``. Several devices divide the groups.
    """

    def __init__(
        self,
        groups: int,
        into: int,
        out: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        if fp8:
            self.kernel, self.scale = scaled_params((groups * out, into))
            return
        kernel = jax.random.normal(rngs.params(), (groups, into, out), jnp.float32)
        self.kernel = nnx.Param((kernel * into**-0.5).astype(dtype))
        self.scale = None

    def __call__(
        self,
        x: Float[Array, "tokens groups into"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens groups out"]:
        """Accumulated in float32, rounded once; ``backend`` is that of e4m3 weights."""
        if self.scale is None:
            return contract("tgi,gio->tgo", x, self.kernel[...])
        how = ops.named("matmul_fp8", backend)

        def run(x: Array, weight: BlockScaled) -> Array:
            tokens, groups, into = x.shape
            rows = x.reshape(tokens, groups * into)
            return ops.matmul_fp8(rows, weight, groups=groups, backend=how).reshape(
                tokens, groups, weight.shape[0] // groups
            )

        weight = BlockScaled(values=self.kernel[...], scale=self.scale[...])
        shares = divides(placement, x.shape[1])  # whole groups, and the weight is divided
        shares = shares and divides(placement, weight.shape[0], unit=GROUP_OUTPUTS)
        given, returned = ((1, 0), 1) if shares else ((None, None), None)
        return divided(run, placement, given=given, returned=returned)(x, weight)


def scaled_params(shape: tuple[int, ...]) -> tuple[nnx.Param, nnx.Param]:
    """Bytes and scales of e4m3 weights ``[..., out, in]``: zeros, until they are loaded."""
    *lead, out, into = shape
    blocks = *lead, cdiv(out, SCALE_BLOCK), cdiv(into, SCALE_BLOCK)
    return (
        nnx.Param(jnp.zeros(shape, jnp.float8_e4m3fn)),
        nnx.Param(jnp.ones(blocks, jnp.float32)),
    )


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
