"""Routed experts of many rows on Hopper: see ``ref.py`` for what is computed.

For hundreds of rows an expert, where products bound a call. Six launches::

    count, place   pairs by expert: the row of each, a table of tiles   rows_triton.py
    permute        rows of x to their places                            rows_triton.py
    gate_up        silu(x gate) * (x up)    [rows, width]  in x's dtype mosaic_sm90.py
    down           the product with down    [rows, hidden] in x's dtype mosaic_sm90.py
    gather_sum     sum over choices, weighted, in float32               rows_triton.py; or
    add_norm       the same, added to a residual and normalised         kernels_triton.py

Each expert's rows begin at a multiple of ``step``; between them are rows that nobody writes, which
are multiplied all the same and never read: a row meets no other row. Nothing is added atomically,
and what a row is multiplied with does not depend on its tile.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.errors import ArgumentError
from mla_jax.pallas import triton_lib
from mla_jax.pallas import tuning as tuning_table
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, ExpertsIn, ExpertsOut, Hidden
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul import mosaic_sm90, tiles, triton
from mla_jax.pallas.grouped_matmul import rows_triton as kernels
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.types import Array, Float, cdiv, power_of_two

__all__ = ["Tuning", "back", "heuristic", "plan", "routed_experts", "tune"]


LONG = 4096
"""Channels of rows from which on steps are finer; between 2048 and 7168 nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Shapes of tiles: what changes the speed, and no bit of a result."""

    most: int  # rows of a tile
    step: int  # of which rows of tiles are multiples
    stages: int  # steps of 64 channels in shared memory
    group: int = 8  # tiles of an expert that read a block of weights together
    workers: int  # thread blocks: as many as there are multiprocessors
    cluster: int = 2  # thread blocks that load weights together

    def __post_init__(self):
        names = ("most", "step", "stages", "group", "workers", "cluster")
        tuning_table.at_least_one("routed_experts", **{k: getattr(self, k) for k in names})
        if self.step % 16:
            raise ArgumentError("routed_experts: tuning.step", self.step, "a multiple of 16 rows")
        if self.most % self.step or self.most > 192:
            allowed = f"a multiple of step={self.step}, 192 at most"
            raise ArgumentError("routed_experts: tuning.most", self.most, allowed)
        for name in ("group", "workers"):
            if (given := getattr(self, name)) % self.cluster:
                allowed = f"a multiple of cluster={self.cluster}"
                raise ArgumentError(f"routed_experts: tuning.{name}", given, allowed)


def tune(problem: Problem, device: DeviceInfo) -> Tuned:
    """The heuristic's choice, for every problem."""
    return Tuned(value=heuristic(int(problem["hidden"]), device), source="heuristic")


def heuristic(hidden: int, device: DeviceInfo) -> Tuning:
    """The largest tiles, which read the fewest weights; thread blocks in pairs.

    Finer steps multiply fewer rows that nobody reads, and there is code for each: where an item has
    many channels they pay (V3: 7168, 3 % faster), where it has few they cost (V2-Lite: 2048, 8 %).
    """
    step = 16 if hidden >= LONG else 32
    return Tuning(most=192, step=step, stages=3, workers=device.sms // 2 * 2)


def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, tuning: Tuning, then: AddNorm | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts``; gated products and each choice's result are rounded to x's dtype."""
    (tokens, hidden), topk, count = x.shape, experts.shape[1], gate.shape[0]
    if not tokens * topk:
        return add_norm(jnp.zeros_like(x), then)
    facts = {"most": tuning.most, "step": tuning.step, "cluster": tuning.cluster}
    found = plan(experts, count, group=tuning.group, **facts)
    rows = tiles.most_rows(experts.size, count, tuning.step)
    spread = triton_lib.call(
        kernels.permute, x, found.places,
        out=jax.ShapeDtypeStruct((rows, hidden), x.dtype),
        grid=tokens, warps=4, stages=1, TOPK=topk, HIDDEN=hidden, BLOCK=_piece(hidden),
    )  # fmt: skip
    sizes = mosaic_sm90.Sizes(stages=tuning.stages, workers=tuning.workers, limit=limit, **facts)
    h = mosaic_sm90.multiply(spread, (gate, up), found.table, found.used, sizes=sizes)
    y = mosaic_sm90.multiply(h, (down,), found.table, found.used, sizes=sizes)
    return back(y, found.places, weights, then)


def back(
    y: Float[Array, "rows hidden"], places: Choices, weights: ChoiceWeights, then: AddNorm | None
) -> Hidden | tuple[Hidden, Hidden]:
    """The weighted sum of each token's rows, in float32, first choice first; and what follows."""
    (tokens, topk), (rows, hidden) = places.shape, y.shape
    if then is not None:
        return triton.sum_and_norm(y, places, weights, then, count=rows, placed=True)
    return triton_lib.call(
        kernels.gather_sum, y, places, weights,
        out=jax.ShapeDtypeStruct((tokens, hidden), y.dtype),
        grid=tokens, warps=4, stages=1, TOPK=topk, HIDDEN=hidden, BLOCK=_piece(hidden),
    )  # fmt: skip


def _piece(hidden: int) -> int:
    """Channels that a program moves at a time: a power of two."""
    return min(hidden & -hidden, 2048)


CHUNK = 512
"""Pairs that one program places."""

COUNTS = 8192
"""Counts, of chunks and experts, that a program reads at a time."""


def plan(
    experts: Choices, count: int, *, step: int, most: int, group: int, cluster: int = 1
) -> tiles.Plan:
    """``tiles.lay_out`` by the planning kernels."""
    pairs, bins = experts.size, max(16, power_of_two(count))
    chunks = cdiv(pairs, CHUNK)
    most_tiles = tiles.most_tiles(pairs, count, step=step, most=most, cluster=cluster)
    spec = jax.ShapeDtypeStruct
    sizes: dict[str, Any] = {"EXPERTS": count, "BINS": bins, "CHUNK": CHUNK}
    counts = triton_lib.call(
        kernels.count, experts, pairs,
        out=spec((chunks, bins), jnp.int32), grid=chunks, warps=4, stages=1, **sizes,
    )  # fmt: skip
    places, table, used, _ = triton_lib.call(
        kernels.place, experts, counts, pairs, chunks, most_tiles,
        out=(
            spec(experts.shape, jnp.int32),
            spec((most_tiles, tiles.FIELDS), jnp.int32),
            spec((1,), jnp.int32),
            spec((chunks, bins), jnp.int32),
        ),
        grid=chunks, warps=8, stages=1, TILE=(step, most, group, cluster),
        LINES=min(power_of_two(chunks), max(COUNTS // bins, 8)),
        **sizes,
    )  # fmt: skip
    return tiles.Plan(places, table, used)
