"""Products with block-scaled e4m3 weights in Triton: see ``ref.py``, and ``kernels_triton.py``.

For few rows, where reading the weights is what takes the time: bytes are read once, half of what
16-bit weights are, and widened on the way to the tensor cores. Each block of 128 x 128 has its own
sum in float32, which is scaled and added. Rows stay 16-bit: nothing of them is quantised.

The experts' launches are those of ``grouped_matmul.triton``: a plan, gate and up, down, and a sum.
"""

import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp

from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.fp8_matmul import kernels_triton as kernels
from mla_jax.pallas.grouped_matmul import triton as grouped
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, cdiv

__all__ = ["gate_pieces", "matmul_fp8", "piece_blocks", "routed_experts_fp8"]

CUTS = (7, 1024), (4, 500)
"""Rules for cutting a product's channels into pieces; the one that gives more pieces holds.

Least blocks of a piece; most programs, counted as pieces of 32 columns.
"""

TILES = 8, 16, 32, 64
"""Rows of a tile."""

RAISING, EXPERTS_RAISING = 32, 16
"""Rows of a tile up to which programs raise what they read."""

COLUMNS = 64
"""Columns of a program, half of them with many rows in pieces; divide the outputs of a group."""

UNPLANNED = 128
"""Choices up to which every program looks for its own pairs."""

EACH = {8: 4, 16: 8, 32: 24}
"""For each size of a tile, the most rows that an expert may have on average."""

GATE = {8: (32, 2, 4), 16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 8, 3)}
DOWN = GATE | {8: (64, 4, 4)}
"""Columns, warps and stages of the experts' programs, by the rows of a tile."""

NARROW, NARROW_COLUMNS = 512, 128
"""Width up to which a block of down's columns is larger: each has few channels to add up."""

PIECE_COLUMNS, GATED, FILLED = 32, 512, 384
"""Columns of gate and up in pieces; elements of a program of SwiGLU; programs enough."""


def raised(x: Float[Array, "..."], inside: bool) -> tuple[Float[Array, "..."], bool]:
    """Rows for a kernel, and whether it raises them itself (``kernels.RAISED``), ``inside``.

    It does where it reads few: a launch before it would take longer.
    """
    if x.dtype != jnp.bfloat16 or inside:
        return x, x.dtype == jnp.bfloat16
    return x * jnp.asarray(2.0**64, x.dtype), False


def matmul_fp8(
    x: Float[Array, "tokens channels"], weight: BlockScaled, *, groups: int = 1,
    quantise_rows: Literal[False] = False,
) -> Float[Array, "tokens out"]:  # fmt: skip
    """``ref.matmul_fp8``; widening is exact, the sum is rounded once.

    Weights with few outputs are cut along their channels, so that programs fill the machine, and
    pieces are added in order: a row's bits depend on no other.
    """
    tokens, (out, into) = len(x), weight.shape
    if not tokens:
        return jnp.zeros((0, out), x.dtype)
    rows = next(n for n in TILES if tokens <= n)
    each = piece_blocks(out, into)
    pieces = cdiv(into, each * SCALE_BLOCK)
    columns = 2 * COLUMNS if pieces > 1 and rows >= 32 and groups == 1 else COLUMNS
    x_in, inside = raised(x, rows <= RAISING)
    parts = triton_lib.call(
        kernels.matmul,
        x_in, weight.values, weight.scale, tokens,
        out=jax.ShapeDtypeStruct((pieces, tokens, out), jnp.float32 if pieces > 1 else x.dtype),
        grid=cdiv(out, columns) * pieces * cdiv(tokens, rows),
        warps=8 if rows == 64 and columns > COLUMNS else 4,
        stages=4,
        SIZES=(into, out, groups),
        TILE=(rows, columns, each),
        RAISE=inside,
    )  # fmt: skip
    return functools.reduce(operator.add, list(parts)).astype(x.dtype)


def piece_blocks(out: int, into: int) -> int:
    """Blocks of channels of a piece; the same for any number of rows."""
    blocks, tiles = cdiv(into, SCALE_BLOCK), cdiv(out, 32)
    pieces = max(min(blocks // least, most // tiles) for least, most in CUTS)
    return cdiv(blocks, max(pieces, 1))


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, then: AddNorm | None = None,
    quantise_rows: Literal[False] = False,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts_fp8``; gated products and each choice's are rounded to x's dtype."""
    (tokens, hidden), topk, (count, width, _) = x.shape, experts.shape[1], gate.shape
    pairs = tokens * topk
    if not pairs:
        return add_norm(jnp.zeros_like(x), then)
    rows = next((n for n, most in EACH.items() if pairs <= count * most), TILES[-1])
    planned = pairs > UNPLANNED
    if planned:
        tile_count, tiles, order = grouped.plan(experts, count, rows=rows, group=8)
    else:
        tile_count, tiles, order = topk, experts, experts  # not read; programs of a block
    facts = {
        "SIZES": (count, topk, hidden, width, pairs),
        **grouped.searching(experts, rows=rows, planned=planned),
    }
    gate_columns, gate_warps, gate_stages = GATE[rows]
    down_columns, down_warps, down_stages = DOWN[rows]
    if width <= NARROW and rows < 64:
        down_columns = NARROW_COLUMNS
    pieces = gate_pieces(topk, width, hidden) if rows < 64 else 1
    parted = pieces > 1 and not planned
    x_in, inside = raised(x, rows <= EXPERTS_RAISING)
    h = triton_lib.call(
        kernels.gate_up,
        x_in, (gate.values, gate.scale, up.values, up.scale), experts, order, tiles, pairs,
        out=grouped.spec((pieces, 2, pairs, width), jnp.float32) if parted
        else grouped.spec((pairs, width), x.dtype),
        grid=tile_count * (width // gate_columns) * (pieces if parted else 1),
        warps=gate_warps,
        stages=gate_stages,
        LIMIT=limit,
        TILE=(rows, gate_columns),
        HOW=(pieces, parted, inside),
        **facts,
    )  # fmt: skip
    if parted:
        h = triton_lib.call(
            kernels.gated,
            h, pairs * width,
            out=grouped.spec((pairs, width), x.dtype),
            grid=cdiv(pairs * width, GATED),
            warps=4,
            stages=1,
            PIECES=pieces,
            LIMIT=limit,
            BLOCK=GATED,
        )  # fmt: skip
    y = triton_lib.call(
        kernels.down,
        h, down.values, down.scale, experts, order, tiles, pairs,
        out=grouped.spec((pairs, hidden), x.dtype),
        grid=tile_count * (hidden // down_columns),
        warps=down_warps,
        stages=down_stages,
        TILE=(rows, down_columns),
        **facts,
    )  # fmt: skip
    return grouped.combine(y.reshape(tokens, topk, hidden), weights, experts, count, then)


def gate_pieces(topk: int, width: int, hidden: int) -> int:
    """Pieces of the channels of gate and up; the same for any number of rows.

    One token's programs fill a machine then, where several devices divide the width.
    """
    blocks, programs = hidden // SCALE_BLOCK, topk * (width // PIECE_COLUMNS)
    found, least = 1, 14  # blocks of what is cut in two
    while programs * found < FILLED and blocks % (2 * found) == 0 and blocks >= least * found:
        found *= 2
    return found
