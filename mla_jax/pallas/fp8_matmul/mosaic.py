"""Products of many rows with block-scaled e4m3 weights on Hopper, rows in e4m3 too.

Rows are quantised for it: 128 channels of a row have one float32 scale, as DeepSeek-V3 was trained
(arXiv:2412.19437, 3.3.2). That changes results: their error against the widened weights is about
ten times that of bf16 rows. So no call takes it by itself; it must be asked for by name. Weights
are never widened.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, Hidden
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.fp8_matmul import mosaic_sm90, rows_triton
from mla_jax.pallas.grouped_matmul import mosaic as grouped
from mla_jax.pallas.grouped_matmul import mosaic_sm90 as kernels
from mla_jax.pallas.grouped_matmul import tiles
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, Float, cdiv, round_up

__all__ = ["matmul_fp8", "routed_experts_fp8", "table_of", "tile_rows"]

E4M3 = jnp.float8_e4m3fn
ROWS = range(64, 97, 8)
"""Of a tile of a product: multiples of eight for the tensor core, at most what registers hold."""

COLUMNS = 4 * kernels.CHUNK
"""Of a tile."""

REST = 48
"""What a tile costs beside its rows, in rows: loads of its columns, its end. A guess."""

EXPERT_TILES = {"most": 96, "step": 16}
STAGES = 4
TOGETHER = 16
"""Tiles that read a block of weights together."""


def matmul_fp8(x: Float[Array, "tokens into"], weight: BlockScaled) -> Float[Array, "tokens out"]:
    """``ref.matmul_fp8`` of the quantised rows, accumulated in float32, rounded once."""
    (tokens, _), workers = x.shape, DeviceInfo.current().sms
    rows = tile_rows(tokens, weight.values.shape[0], workers=workers)
    values, scales = quantise(x, room=round_up(tokens, tiles.EIGHT))
    table = table_of(tokens, rows)
    whole = BlockScaled(values=weight.values[None], scale=weight.scale[None])
    y = mosaic_sm90.multiply(
        values, scales, (whole,), jnp.asarray(table), jnp.asarray([len(table)], jnp.int32),
        sizes=kernels.Sizes(most=rows, step=rows, stages=STAGES, workers=workers),
        out_dtype=x.dtype,
    )  # fmt: skip
    return y if len(y) == tokens else y[:tokens]


def tile_rows(tokens: int, columns: int, *, workers: int) -> int:
    """Rows of a tile: those whose tiles end soonest, the most of equals.

    Every thread block takes as many tiles as the busiest one, each of which costs its rows and
    ``REST``. 4096 rows of 4,096 columns are 688 tiles of 96, six turns of 132 of them, or 752 of
    88, six turns of fewer rows.
    """

    def cost(rows: int) -> int:
        return cdiv(cdiv(tokens, rows) * cdiv(columns, COLUMNS), workers) * (rows + REST)

    return min(reversed(ROWS), key=cost)


def table_of(tokens: int, rows: int) -> np.ndarray:
    """The tiles of so many rows of one matrix, as ``tiles.Plan`` has them."""
    count = cdiv(tokens, rows)
    table = np.zeros((count, tiles.FIELDS), np.int32)
    t = np.arange(count)
    table[:, tiles.FIRST] = t // TOGETHER * TOGETHER
    table[:, tiles.TOGETHER] = np.minimum(count - table[:, tiles.FIRST], TOGETHER)
    table[:, tiles.ROW] = t * (rows // tiles.EIGHT)
    return table


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
        stages=STAGES, workers=DeviceInfo.current().sms, limit=limit, **EXPERT_TILES
    )
    facts = {"sizes": sizes, "out_dtype": x.dtype}
    plan = found.table, found.used
    h = mosaic_sm90.multiply(spread, scales, (gate, up), *plan, **facts)
    y = mosaic_sm90.multiply(*quantise(h, room=room), (down,), *plan, **facts)
    return grouped.back(y, found.places, weights, then)
