"""Products of many rows with block-scaled e4m3 weights on Hopper, rows in e4m3 too.

Rows are quantised for it: 128 channels of a row have one float32 scale, as DeepSeek-V3 was trained
(arXiv:2412.19437, 3.3.2). That changes results: their error against the widened weights is about
ten times that of bf16 rows. So a call must ask for it, by ``quantise_rows``. Weights are never
widened.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.fp8_matmul import matrix_sm90, mosaic_sm90, rows_triton
from mla_jax.pallas.grouped_matmul import mosaic as grouped
from mla_jax.pallas.grouped_matmul import mosaic_sm90 as kernels
from mla_jax.pallas.grouped_matmul import tiles
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, cdiv, round_up

__all__ = ["matmul_fp8", "quantise", "routed_experts_fp8", "sizes_of"]

E4M3 = jnp.float8_e4m3fn
STAGES = {2: 5, 3: 4}
"""Steps in shared memory, by the number of multipliers."""

TOGETHER = 16
"""Tiles of rows that read a block of weights one after the other."""

REST = 80
"""What a tile costs beside its rows, in rows: measured on an H200."""

EXPERT_TILES = {"most": 96, "step": 16}
EXPERT_STAGES = 4


def matmul_fp8(
    x: Float[Array, "tokens into"], weight: BlockScaled, *, groups: Literal[1] = 1,
    quantise_rows: Literal[True] = True,
) -> Float[Array, "tokens out"]:  # fmt: skip
    """``ref.matmul_fp8`` of quantised rows, accumulated in float32, rounded once."""
    tokens = len(x)
    values, scales = quantise(x, room=round_up(tokens, tiles.EIGHT))
    sizes = sizes_of(tokens, weight.values.shape[0], workers=DeviceInfo.current().sms)
    y = matrix_sm90.multiply(values, scales, weight, sizes=sizes, out_dtype=x.dtype)
    return y if len(y) == tokens else y[:tokens]


def sizes_of(tokens: int, columns: int, *, workers: int) -> matrix_sm90.Sizes:
    """Two or three multipliers, whichever end sooner.

    Every thread block takes as many tiles as the busiest one, each of which costs its rows and
    ``REST``. 4096 rows of 4,096 columns are 1,024 tiles of 128 rows, eight turns of 132 of them, or
    704 tiles of 192, six turns.
    """

    def cost(multipliers: int) -> int:
        rows = matrix_sm90.ROWS * multipliers
        count = cdiv(tokens, rows) * cdiv(columns, matrix_sm90.COLUMNS)
        return cdiv(count, workers) * (rows + REST)

    multipliers = min(STAGES, key=cost)
    return matrix_sm90.Sizes(
        multipliers=multipliers, stages=STAGES[multipliers], workers=workers, together=TOGETHER
    )


def quantise(
    x: Float[Array, "rows channels"], *, room: int
) -> tuple[Float[Array, "room channels"], Float[Array, "spans room"]]:
    """``x`` in e4m3 and its scales; what lies behind its rows is not written."""
    (rows, channels), spec = x.shape, jax.ShapeDtypeStruct
    spans = channels // SCALE_BLOCK
    return triton_lib.call(
        rows_triton.quantise, x, rows, room,
        out=(spec((room, channels), E4M3), spec((spans, room), jnp.float32)),
        grid=cdiv(rows, rows_triton.ROWS.value) * spans, warps=4, stages=1,
        CHANNELS=channels,
    )  # fmt: skip


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, then: AddNorm | None = None,
    quantise_rows: Literal[True] = True,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts_fp8`` with rows and gated products quantised; both products of a
    choice are rounded to x's dtype."""
    (tokens, hidden), topk, count = x.shape, experts.shape[1], gate.shape[0]
    if not tokens * topk:
        return add_norm(jnp.zeros_like(x), then)
    found = grouped.plan(experts, count, group=8, **EXPERT_TILES)
    room, spans = tiles.most_rows(experts.size, count, EXPERT_TILES["step"]), hidden // SCALE_BLOCK
    spec = jax.ShapeDtypeStruct
    spread, scales = triton_lib.call(
        rows_triton.permute, x, found.places, room,
        out=(spec((room, hidden), E4M3), spec((spans, room), jnp.float32)),
        grid=tokens, warps=4, stages=1, TOPK=topk, HIDDEN=hidden, SPANS=min(spans & -spans, 8),
    )  # fmt: skip
    sizes = kernels.Sizes(
        stages=EXPERT_STAGES, workers=DeviceInfo.current().sms, limit=limit, **EXPERT_TILES
    )
    facts = {"sizes": sizes, "out_dtype": x.dtype}
    plan = found.table, found.used
    h = mosaic_sm90.multiply(spread, scales, (gate, up), *plan, **facts)
    y = mosaic_sm90.multiply(*quantise(h, room=room), (down,), *plan, **facts)
    return grouped.back(y, found.places, weights, then)
