"""Routed experts in Triton: see ``ref.py`` for what is computed, ``kernels_triton.py`` for how.

For 16-bit weights on sm80 or newer. Bound by reading the chosen experts' weights once up to some
hundred rows an expert (V2-Lite, one token: 104 MB), by products above. Four launches, three
without a plan::

    plan       pairs by expert, and a table of tiles      not where pairs are few
    gate_up    silu(gate x) * (up x), rows gathered       [pairs, width] in x's dtype
    down       the product with down                      [pairs, hidden] in x's dtype
    combine    sum over choices, weighted, in float32     a fusion of XLA's, with what follows; or
    add_norm   the same, added to a residual and normalised             [tokens, hidden] twice

Of a plan the number of tiles is static, the most that any choice can need; those without rows
end at once. Few pairs need none: each looks for the others of its expert, and the first does the
work for all. Programs are then as many as one token needs: a step is padded to more tokens than it
has, and a program that finds nothing to do takes its place on the machine all the same. No product
is split over its depth, nothing is added atomically, and what a row is multiplied with does not
depend on its tile: a row's bits are those it has alone in an equal call.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.errors import ArgumentError
from mla_jax.pallas import triton_lib
from mla_jax.pallas import tuning as tuning_table
from mla_jax.pallas.axes import AddNorm, Choices, ChoiceWeights, ExpertsIn, ExpertsOut, Hidden
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul import kernels_triton as kernels
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.types import Array, Float, Int, power_of_two

__all__ = [
    "MOST_UNPLANNED",
    "Tuning",
    "combine",
    "heuristic",
    "most_tiles",
    "plan",
    "plan_sizes",
    "power",
    "routed_experts",
    "searching",
    "shared_bytes",
    "spec",
    "sum_and_norm",
    "tune",
]

FEWEST_SHARED = 101376
"""Bytes of shared memory that a block of any device from sm80 on may use (sm86 and sm89)."""

MOST_UNPLANNED = 1024
"""Pairs that one program can look through for those of its own expert."""

SUM_WARPS = 8
"""Of a token's sum with its residual and the norm of that."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Shapes of tiles: what changes the speed.

    Bits of a result depend on ``rows`` alone, and of it only on whether it is 64 or more, where
    Hopper multiplies with other instructions; a tail is on the same side as the whole tiles.
    """

    rows: int  # of a tile: 16 to 256
    tail: int  # a tile of no more rows than this is computed as one of so many
    planned: bool  # a kernel lists tiles first; else every pair looks for its own
    group: int  # tiles of an expert that read a block of weights together
    gate_columns: int  # of gate and of up: a block of one program
    gate_depth: int  # channels of x in a step
    gate_warps: int
    gate_stages: int  # steps that are loaded at a time
    down_columns: int
    down_depth: int
    down_warps: int
    down_stages: int

    def __post_init__(self):
        def require(name: str, holds: bool, allowed: str) -> None:
            if not holds:
                what = f"routed_experts: tuning.{name}"
                raise ArgumentError(what, getattr(self, name), allowed)

        for name in ("rows", "tail", "gate_columns", "gate_depth", "down_columns", "down_depth"):
            n = getattr(self, name)
            require(name, n >= 16 and n & (n - 1) == 0, "a power of two, 16 or more")
        require("tail", self.tail <= self.rows, f"at most rows={self.rows}")
        whole = self.tail >= 64 or self.rows < 64
        require("tail", whole, f"64 or more with rows={self.rows}")
        require("planned", self.planned or self.tail == self.rows, "True with a tail")
        for name in ("gate_warps", "down_warps"):
            require(name, getattr(self, name) in (1, 2, 4, 8), "1, 2, 4 or 8")
        for name in ("group", "gate_stages", "down_stages"):
            require(name, getattr(self, name) >= 1, "1 or more")


def tune(problem: Problem, device: DeviceInfo) -> Tuned:
    """The measured choice for a problem, or the heuristic where nothing near was measured."""
    choose = functools.partial(heuristic, problem, device)
    return tuning_table.tuned(problem, device, Tuning, choose)


def heuristic(problem: Problem, device: DeviceInfo) -> Tuning:
    """By rows an expert has on average; smaller where shared memory or registers ask for it.

    Few rows: narrow blocks of weights, so that every multiprocessor streams some; half as wide
    where one token's programs would be fewer than half of these. Many: the largest tile whose
    accumulators fit a block's registers.
    """
    names = ("tokens", "topk", "experts", "hidden", "width")
    tokens, topk, experts, hidden, width = (int(problem[name]) for name in names)
    pairs = tokens * topk
    each = pairs / experts
    rows = next((n for n, most in ((16, 8), (32, 24), (64, 96)) if each <= most), 128)
    planned = pairs > 128
    many, hopper = rows == 128, device.sm >= 90
    warps = 8 if many else 4
    limit = device.shared_memory or FEWEST_SHARED

    def fit(columns: int, depth: int, stages: int, across: int, along: int, matrices: int):
        """Columns, depth and stages that divide the problem and fit shared memory."""
        columns, depth = _divisor(across, columns), _divisor(along, depth)
        while shared_bytes(rows, columns, depth, stages, matrices) > limit:
            if stages > 2:
                stages -= 1
            elif depth > 32:
                depth //= 2
            else:
                columns //= 2
        return columns, depth, warps, stages

    if rows == 16:

        def block(across: int) -> tuple[int, int, int]:
            """Columns, depth and stages."""
            return (64, 128, 4) if 2 * topk * across // 64 >= device.sms else (32, 128, 5)

        gate = fit(*block(width), width, hidden, 2)
        down = fit(*block(hidden), hidden, width, 1)
    else:
        gate = fit(128 if many and hopper else 64, 64, 4, width, hidden, 2)
        down = fit(256 if many and hopper else 128, 64, 3 if many else 4, hidden, width, 1)
    sizes = ("columns", "depth", "warps", "stages")
    return Tuning(
        rows=rows,
        tail=64 if many and hopper else rows,
        planned=planned,
        group=8,
        **{f"gate_{k}": v for k, v in zip(sizes, gate, strict=True)},
        **{f"down_{k}": v for k, v in zip(sizes, down, strict=True)},
    )


def shared_bytes(rows: int, columns: int, depth: int, stages: int, matrices: int) -> int:
    """Shared memory of a pipeline over 16-bit operands, at most: Triton may need a stage less."""
    return 2 * stages * depth * (rows + matrices * columns)


def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None, tuning: Tuning, then: AddNorm | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.routed_experts``; gated products and each choice's result are rounded to x's dtype."""
    (tokens, hidden), topk, (count, _, width) = x.shape, experts.shape[1], gate.shape
    pairs = tokens * topk
    if not pairs:
        return add_norm(jnp.zeros_like(x), then)
    _check(tuning, pairs, hidden, width)
    if tuning.planned:
        tile_count, tiles, rows = plan(experts, count, rows=tuning.rows, group=tuning.group)
    else:
        tile_count, tiles, rows = topk, experts, experts  # not read; programs of a block
    sizes = (count, topk, hidden, width)
    facts = searching(experts, rows=tuning.rows, planned=tuning.planned)
    h = triton_lib.call(
        kernels.gate_up,
        x, gate, up, experts, rows, tiles, pairs,
        out=spec((pairs, width), x.dtype),
        grid=tile_count * (width // tuning.gate_columns),
        warps=tuning.gate_warps,
        stages=tuning.gate_stages,
        SIZES=sizes,
        LIMIT=limit,
        **facts,
        TILE=(tuning.rows, tuning.tail, tuning.gate_columns, tuning.gate_depth),
    )  # fmt: skip
    y = triton_lib.call(
        kernels.down,
        h, down, experts, rows, tiles, pairs,
        out=spec((pairs, hidden), x.dtype),
        grid=tile_count * (hidden // tuning.down_columns),
        warps=tuning.down_warps,
        stages=tuning.down_stages,
        SIZES=sizes,
        **facts,
        TILE=(tuning.rows, tuning.tail, tuning.down_columns, tuning.down_depth),
    )  # fmt: skip
    return combine(y.reshape(tokens, topk, hidden), weights, experts, count, then)


def searching(experts: Choices, *, rows: int, planned: bool) -> dict[str, Any]:
    """How programs find their tiles: by a plan, or among all pairs; see ``kernels.gate_up``."""
    found = 0 if planned else power(experts.size)
    return {"PAIRS": found, "TOGETHER": not planned and len(experts) <= rows}


def plan(
    experts: Int[Array, "tokens topk"], count: int, *, rows: int, group: int
) -> tuple[int, Int[Array, "tiles fields"], Int[Array, "pairs"]]:
    """``(number of tiles, tiles, pairs by expert)`` by the planning kernel."""
    pairs = experts.size
    tile_count = most_tiles(pairs, count, rows)
    tiles, order = triton_lib.call(
        kernels.plan,
        experts,
        pairs,
        tile_count,
        out=(spec((tile_count, kernels.FIELDS.value)), spec((pairs,))),
        grid=count,
        warps=4 if pairs <= 8192 else 16,
        stages=1,
        **plan_sizes(pairs, count, rows=rows, group=group),
    )
    return tile_count, tiles, order


def combine(
    y: Float[Array, "tokens topk hidden"],
    weights: Float[Array, "tokens topk"],
    experts: Int[Array, "tokens topk"],
    count: int,
    then: AddNorm | None,
) -> Hidden | tuple[Hidden, Hidden]:
    """``sum_k weights[:, k] y[:, k]`` over valid choices, in float32, first choice first.

    What no kernel wrote, a choice that is no expert's, is selected away. With what follows it is a
    kernel of its own: XLA makes two of it.
    """
    if then is not None:
        return sum_and_norm(y, experts, weights, then, count=count, placed=False)
    chosen = (experts >= 0) & (experts < count)
    total = jnp.zeros(y[:, 0].shape, jnp.float32)
    for k in range(y.shape[1]):
        part = weights[:, k, None] * y[:, k].astype(jnp.float32)
        total = total + jnp.where(chosen[:, k, None], part, 0.0)
    return total.astype(y.dtype)


def sum_and_norm(
    y: Float[Array, "... hidden"], chosen: Choices, weights: ChoiceWeights, then: AddNorm, *,
    count: int, placed: bool,
) -> tuple[Hidden, Hidden]:  # fmt: skip
    """``ref.add_norm`` of the weighted sum of each token's rows of ``y``, in one kernel.

    What of ``chosen`` is in ``[0, count)`` counts: it is a row of ``y`` itself if ``placed``; else
    the rows are those of each token's choices in order.
    """
    (tokens, topk), hidden = chosen.shape, y.shape[-1]
    like = spec((tokens, hidden), y.dtype)
    return triton_lib.call(
        kernels.add_norm,
        y, weights, chosen, then.residual, then.gain,
        out=(like, like),
        grid=tokens, warps=SUM_WARPS, stages=1,
        SIZES=(count, topk, hidden), PLACED=placed, COLUMNS=power_of_two(hidden),
        EPS=float(then.eps),
    )  # fmt: skip


def plan_sizes(pairs: int, count: int, *, rows: int, group: int) -> dict[str, Any]:
    """Static sizes of the planning kernel."""
    return dict(
        EXPERTS=count,
        BINS=power(count),
        CHUNK=min(power(pairs), 4096),
        ROWS=rows,
        GROUP=group,
    )


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles that any choice of experts can need: each has a row, and all but one an expert all."""
    return min(pairs, pairs // rows + min(experts, pairs))


def _check(tuning: Tuning, pairs: int, hidden: int, width: int) -> None:
    """Refuse a tuning that does not divide the problem."""
    for name, size, n in (
        ("gate_columns", "width", width),
        ("gate_depth", "hidden", hidden),
        ("down_columns", "hidden", hidden),
        ("down_depth", "width", width),
    ):
        if n % getattr(tuning, name):
            what = f"routed_experts[triton]: tuning.{name}"
            raise ArgumentError(what, getattr(tuning, name), f"a divisor of {size}={n}")
    if not tuning.planned and pairs > MOST_UNPLANNED:
        what = "routed_experts[triton]: tuning.planned"
        allowed = f"True above {MOST_UNPLANNED} choices (tokens x topk), here {pairs}"
        raise ArgumentError(what, False, allowed)


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides ``n``, ``most`` at most."""
    return min(n & -n, most)


def power(n: int) -> int:
    """The smallest power of two from ``n`` on, 16 at least."""
    return max(16, power_of_two(n))


def spec(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
