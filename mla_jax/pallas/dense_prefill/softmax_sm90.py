"""Softmax of the prefill kernel: weights relative to a maximum that may lag behind.

Scores of a block become exponents relative to the maximum of the blocks before. Only where one
of them is above ``LAG`` does a warp look for the new maximum and correct what it has: weights
are at most 2**LAG, which 16 bits and float32 sums hold as exactly as 1. A score that is ``J``
powers of two above all blocks before is rounded to ``J * 2**-24``.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import inline_sm90 as inline
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["close", "mask", "proceed", "rescale", "start"]

LAG = 8.0  # of the maximum that weights are relative to, in powers of two
LOWEST = -1.0e30  # first maximum at least: finite, so that exp2(-inf - LOWEST) = 0
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
    x: jax.Array, top: jax.Array, shrink: jax.Array, sums: jax.Array, *, scale: float,
    simulate: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Weights of further scores, maximum, factor of old weights, sums, whether a maximum grew.

    Where none grew, the factor is one of before.
    """
    width = x.shape[1]
    x = x * scale - lib.fill_rows(top, width)
    grew = True if simulate else inline.any_above(x, LAG)

    def follow():
        rise = x.max(axis=1)
        rise = jnp.where(rise > LAG, rise, 0.0)
        shrink = jnp.exp2(-rise)
        more = sums * lib.fill_rows(shrink, PARTS)
        return x - lib.fill_rows(rise, width), top + rise, shrink, more

    same = x, top, shrink, sums
    x, top, shrink, sums = follow() if simulate else lax.cond(grew, follow, lambda: same)
    w = jnp.exp2(x)
    found = w, top, shrink, sums + lib.fold_columns(w, PARTS)
    # The barrier keeps the assembler from moving it behind the products that it runs under.
    return *lax.optimization_barrier(found), grew


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
