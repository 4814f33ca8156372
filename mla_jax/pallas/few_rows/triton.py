"""Products of few rows in Triton: see ``ref.py`` for what is computed.

Bound by reading the weights once; of one token's step mostly by latency, which is why norm, gate
and residual are inside. A program has one block of columns and all channels:

    x [rows, GROUPS, DEPTH]  --cp.async-->  a batch of GROUPS products, each by warps of its own
    W [GROUPS, DEPTH, COLUMNS]              sums of groups are added, then scaled by the norm

Blocks are so narrow that the columns make a program for nearly every multiprocessor, and a few
steps have a whole block in flight. Nothing is added atomically, and what a row is multiplied with
does not depend on its neighbours: its bits are those it has alone. The norm's gain is multiplied
before the product and its root behind, so that nobody waits for the sum of squares: the rows that
are multiplied are ``gain * x``, rounded once.
"""

import functools
import math

import jax
import jax.numpy as jnp

from mla_jax.pallas.axes import Hidden
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, Float, cdiv

__all__ = ["MOST_ROWS", "REQUIREMENT", "project_rows", "tile"]

MOST_ROWS = 32
"""Above, XLA's norm and cuBLAS's products are as fast."""

REQUIREMENT = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16"),  # ``gain * x`` may be too large for float16
        "tokens": Within(high=MOST_ROWS),
        "into": Within(low=64, multiple=64),
        "columns": Within(low=16, multiple=16),  # the largest that divides every weight's
    },
    packages=("triton",),
)

MULTIPROCESSORS = 132
"""Of an H100 or H200: columns are cut into about as many blocks."""

STEP = 512
"""Channels of one step of the loop, at most."""

MOST_STAGES = 5
"""Steps of the loop that are loaded or multiplied at a time, at most."""

SUMS = 8192
"""Bytes of shared memory for gains and for what goes from warp to warp, about."""

FEWEST_SHARED = 101376
"""Bytes of shared memory that a block of any device from sm80 on may use (sm86 and sm89)."""


def project_rows(
    x: Float[Array, "tokens into"], weights: tuple[Float[Array, "into _"], ...], *,
    gain: Float[Array, "into"] | None = None, onto: Hidden | None = None, eps: float = 0.0,
    gated: bool = False,
) -> tuple[Float[Array, "tokens _"], ...]:  # fmt: skip
    """``ref.project_rows`` of one or two weights."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.few_rows import kernels_triton as kernels

    (tokens, into), outs = x.shape, tuple(w.shape[1] for w in weights)
    results = tuple(jax.ShapeDtypeStruct((tokens, n), x.dtype) for n in outs[: 1 if gated else 2])
    if not tokens:
        return tuple(jnp.zeros(r.shape, r.dtype) for r in results)
    rows, columns, groups, depth, stages = tile(tokens, into, outs, gated=gated)
    blocks = sum(r.shape[1] for r in results) // columns
    second = weights[-1]
    none = jax.ShapeDtypeStruct((1, 16), x.dtype)  # there is no second result
    found = triton_lib.call(
        kernels.project,
        x,
        x if gain is None else gain,  # not read
        x if onto is None else onto,  # not read
        weights[0],
        second,
        tokens,
        out=results if len(results) == 2 else (*results, none),
        grid=blocks * cdiv(tokens, rows),
        warps=groups,
        stages=stages,
        SIZES=(into, outs[0], outs[1] if len(outs) == 2 else 0),
        TILE=(rows, columns, groups, depth),
        EPS=None if gain is None else float(eps),
        GATED=gated,
        ONTO=onto is not None,
    )
    return tuple(found[: len(results)])


def tile(
    tokens: int, into: int, outs: tuple[int, ...], *, gated: bool
) -> tuple[int, int, int, int, int]:
    """Rows, columns, groups of channels, their depth, and steps in flight.

    Columns, groups and depth follow from the weights alone, and so do the bits of a result.
    """
    rows = 16 if tokens <= 16 else 32
    total = outs[0] if gated else sum(outs)
    common = functools.reduce(math.gcd, outs)
    columns = 32 if common % 32 == 0 and total // 32 >= MULTIPROCESSORS * 2 // 3 else 16
    step = min(into & -into, STEP)
    groups = min(8, step // 16)
    depth = step // groups
    each = 2 * step * (rows + columns * (2 if gated else 1))
    shared = DeviceInfo.current().shared_memory or FEWEST_SHARED
    stages = max(2, min(into // step + 1, 1 + (shared - SUMS) // each, MOST_STAGES))
    return rows, columns, groups, depth, stages
