"""Softmax of the prefill kernel: weights relative to a maximum that may lag behind.

Scores of a block become exponents relative to the maximum of the blocks before. Only where one
of them is above ``LAG`` does a warp look for the new maximum and correct what it has. A score that
is ``J`` powers of two above all blocks before is rounded to ``J * 2**-24``.

A block is taken in halves for what can run side by side: the exponentials of the first with the
look at the second, and the exponentials of the second with the rounding of the first.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import steps_sm90 as steps
from mla_jax.pallas.mosaic_lib import LAG, LOWEST, WGMMA

__all__ = ["close", "complete", "mask", "proceed", "rescale", "start"]

PARTS = 8  # partial sums of a row: two in each of the four threads that share it


def mask(x: jax.Array, *, first, keys, seen=None) -> jax.Array:
    """Scores of keys from ``first`` on, ``-inf`` behind the last of ``keys``.

    Query ``i`` sees ``seen + i`` keys, if that is given.
    """

    def masked():
        column = first + plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=WGMMA)
        end = keys
        if seen is not None:
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA)
            end = jnp.minimum(keys, seen + row)
        return jnp.where(column < end, x, -jnp.inf)

    full = first + x.shape[1] <= keys
    if seen is not None:
        full = full & (first + x.shape[1] <= seen)
    return lax.cond(full, lambda: x, masked)


def start(x: jax.Array, *, scale: float) -> tuple[jax.Array, ...]:
    """Weights of a tile's first scores, the maximum they are relative to, their sums."""
    top = jnp.maximum(x.max(axis=1) * scale, LOWEST)
    w = jnp.exp2(x * scale - lib.fill_rows(top, x.shape[1]))
    return lax.optimization_barrier((w, top, lib.fold_columns(w, PARTS)))


def proceed(
    x: jax.Array, top: jax.Array, sums: jax.Array, *, scale: float, simulate: bool
) -> tuple[jax.Array, ...]:
    """Weights of the first half of further scores, exponents of the second, and what follows.

    That is the maximum, the factor of what is relative to the old one, the sums with those of
    the first half, and whether a maximum grew.
    """
    rows, middle = x.shape[0], x.shape[1] // 2
    look = functools.partial(_look, simulate=simulate)
    one = lib.row_vector(1.0, rows)
    y = x[:, :middle] * scale - lib.fill_rows(top, middle)
    grew, y, top, shrink, sums = look(y, top, one, sums)
    w = jnp.exp2(y)
    sums = sums + lib.fold_columns(w, PARTS)
    y = x[:, middle:] * scale - lib.fill_rows(top, middle)
    again, y, top, shrink, sums, w = look(y, top, shrink, sums, w, after=(sums,))
    # The barrier keeps the assembler from moving it behind the products that it runs under.
    return *lax.optimization_barrier((w, y, top, shrink, sums)), grew | again


def _look(
    y: jax.Array, top: jax.Array, shrink: jax.Array, *old: jax.Array, simulate: bool,
    after: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Whether a maximum grew, and if so everything relative to the new one."""

    def follow():
        rise = y.max(axis=1)
        rise = jnp.where(rise > LAG, rise, 0.0)
        less = jnp.exp2(-rise)
        smaller = [a * lib.fill_rows(less, a.shape[1]) for a in old]
        return y - lib.fill_rows(rise, y.shape[1]), top + rise, shrink * less, *smaller

    if simulate:
        return jnp.bool_(True), *follow()
    grew = steps.any_score_above(y, LAG, *after)
    return grew, *lax.cond(grew, follow, lambda: (y, top, shrink, *old))


def complete(
    w: jax.Array, y: jax.Array, sums: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """All weights of a block, rounded, and the sums with those of its second half."""
    more = jnp.exp2(y)
    weights = jnp.concatenate([w.astype(dtype), more.astype(dtype)], axis=1)
    return weights, sums + lib.fold_columns(more, PARTS)


def rescale(values: jax.Array, shrink: jax.Array, grew, *, simulate: bool) -> jax.Array:
    """Sums of values relative to the new maximum."""

    def scaled():
        return values * lib.fill_rows(shrink, values.shape[1])

    return scaled() if simulate else lax.cond(grew, scaled, lambda: values)


def close(top: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One over the sum of a row's weights, or zero; logarithm of its sum of exponentials."""
    total = sums.sum(axis=1)
    empty = total == 0.0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * math.log(2.0))
    return jnp.where(empty, 0.0, 1.0 / total), lse
