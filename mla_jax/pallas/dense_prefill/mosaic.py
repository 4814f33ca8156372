"""Backend ``mosaic`` of dense prefill: plan, kernel, layout."""

from dataclasses import asdict, dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.errors import ArgumentError
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas import registry
from mla_jax.pallas import tuning as tuning_table
from mla_jax.pallas.axes import KeyValues, Queries, RopeKeys, Starts
from mla_jax.pallas.dense_prefill import buffers_sm90, mosaic_sm90
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.types import Array, AttnState, Float, cdiv

__all__ = ["Tuning", "dense_prefill", "heuristic", "make_plan", "tune"]

L2 = 10 << 20
"""Bytes of keys and values that tiles may share in the L2 cache, which has two halves of 25 MB."""

REGISTERS = 176
"""Of the 240 of a thread for sums, scores and weights; the rest is for queries and scalars."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What may change the speed of a result; ``block`` and ``held`` also change its rounding."""

    heads_together: int  # heads whose tiles run side by side
    heads_last: int = 1  # of the last ones, as many at least
    block: int  # keys of one step
    held: int = 0  # chunks of 64 columns of the queries that stay in registers
    stages: int = 2  # blocks in shared memory
    dynamic: bool = True  # a thread block takes its next tile when it is free
    workers: int  # thread blocks: as many as there are multiprocessors

    def __post_init__(self):
        least = {k: getattr(self, k) for k in ("block", "heads_together", "heads_last", "workers")}
        tuning_table.at_least_one("mla_prefill", **least)
        if self.block % 64:  # of products
            raise ArgumentError("mla_prefill: block", self.block, "multiples of 64 keys")
        if self.stages not in (1, 2, 4):  # hardware barriers allow four
            raise ArgumentError("mla_prefill: stages", self.stages, "1, 2 or 4")
        if self.held < 0:
            raise ArgumentError("mla_prefill: held", self.held, "0 or more")


def tune(problem: Problem, device: DeviceInfo) -> Tuned:
    """The measured choice for a problem, or the heuristic where nothing near was measured."""

    def choose() -> Tuning:
        names = ("tokens", "keys", "heads", "requests", "nope", "rope", "v")
        sizes = {name: int(problem[name]) for name in names}
        return heuristic(**sizes, causal=bool(problem["causal"]), device=device)

    return tuning_table.tuned(problem, device, Tuning, choose, workers=device.sms)


def heuristic(
    tokens: int, keys: int, heads: int, *, requests: int, nope: int, rope: int, v: int,
    causal: bool, device: DeviceInfo,
) -> Tuning:  # fmt: skip
    """As many heads side by side as have their keys in the L2 cache; as many keys as fit.

    Where tiles differ, heads that run at the same time anyway are together, and the last ones are
    more, up to three tiles for each thread block or twice those keys: a thread block that begins
    an expensive tile near the end finishes last. Where one request sees all keys, tiles cost the
    same, and a fixed order serves.

    Queries in registers relieve shared memory. They and the hardware barriers that come with
    them are faster in blocks of 64 keys and where all keys are seen, but slower in causal blocks
    of 128: that is measured only.
    """
    equal = not causal and requests == 1
    size = 2 * (nope + v) * keys  # bytes of a head
    tiles, together, last = cdiv(tokens, tp.ROWS), L2 // max(size, 1), 1
    if not equal:
        together = max(together, device.sms // max(tiles, 1))
        last = min(cdiv(3 * device.sms, max(tiles, 1)), max(2 * L2 // max(size, 1), together, 1))

    def of(block: int) -> Tuning:
        return Tuning(
            heads_together=min(max(together, 1), heads), heads_last=min(last, heads), block=block,
            held=0 if causal and block == 128 else min(2, (nope + rope) // 64 - 1),
            dynamic=not equal, workers=device.sms,
        )  # fmt: skip

    return next(t for t in map(of, (128, 64)) if _fits(t, nope, rope, v, device))


def _fits(tuning: Tuning, nope: int, rope: int, v: int, device: DeviceInfo) -> bool:
    """Whether its buffers fit into shared memory, and products of a block into registers."""
    sizes = buffers_sm90.Sizes(nope=nope, rope=rope, v=v, **asdict(tuning))
    buffers = buffers_sm90.scratch(sizes, jnp.bfloat16, jnp.bfloat16, simulate=False)
    registers = (
        v // 2 + tuning.block // 2 + tuning.block // 4
    )  # sums, scores, weights of half a row
    fits = lib.shared_bytes(buffers) <= (device.shared_memory or lib.SHARED_MEMORY)
    return fits and registers <= REGISTERS


def make_plan(
    query_starts: Starts, key_starts: Starts, *, tokens: int, keys: int, causal: bool,
    tuning: Tuning,
) -> tp.TilePlan:  # fmt: skip
    """The tiles of one step; the same for all layers."""
    return tp.tiles(
        query_starts, key_starts, tokens=tokens, keys=keys,
        block=tuning.block, causal=causal,
    )  # fmt: skip


def dense_prefill(
    q: Queries, kv: KeyValues, k_rope: RopeKeys, query_starts: Starts, key_starts: Starts, *,
    scale: float, causal: bool, out_dtype: DTypeLike, tuning: Tuning,
    plan: tp.TilePlan | None = None, interpret: object = None,
) -> AttnState:  # fmt: skip
    """``ref.dense_prefill`` at the dtype of the queries, accumulating in float32.

    The weights of the values are rounded to that dtype. A value that is not finite spoils the
    queries of its request that share a tile with one that sees it. ``plan`` is
    ``make_plan`` of the same arguments, if it is at hand; ``interpret`` runs on a
    CPU.
    """
    tokens, heads, qk = q.shape
    keys, _, nope_v = kv.shape
    nope = qk - k_rope.shape[1]
    v = nope_v - nope
    if not (tokens and keys and query_starts.shape[0] > 1):
        return AttnState(
            out=jnp.zeros((tokens, heads, v), out_dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    if plan is None:
        plan = make_plan(
            query_starts, key_starts, tokens=tokens, keys=keys, causal=causal, tuning=tuning
        )
    requests = query_starts.shape[0] - 1
    facts = tp.PlanFacts(
        tokens=tokens, keys=keys, requests=requests, block=tuning.block, causal=causal
    )
    _check(plan, facts)
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = q * jnp.asarray(jnp.sign(scale), q.dtype), abs(scale) or 1.0
    out, lse = mosaic_sm90.attend(
        _rows(q, tp.ROWS),
        _rows(kv, tuning.block),
        _rows(k_rope, tuning.block),
        plan,
        sizes=buffers_sm90.Sizes(nope=nope, rope=k_rope.shape[1], v=v, **asdict(tuning)),
        scale=scale,
        causal=causal,
        out_dtype=out_dtype,
        interpret=interpret,
    )  # fmt: skip
    return AttnState(out=out[:tokens], lse=lse[:tokens])


def _check(plan: object, facts: tp.PlanFacts) -> None:
    """Refuse a plan that was made for something else."""
    if not isinstance(plan, tp.TilePlan):
        raise ArgumentError("mla_prefill: plan", type(plan).__name__, "a TilePlan of plan_prefill")
    given, allowed = registry.differing(plan.facts, facts)
    if given:
        raise ArgumentError("mla_prefill: plan", given, f"{allowed}: plan_prefill of this call")


def _rows(x: Float[Array, "rows *rest"], least: int) -> Float[Array, "more *rest"]:
    """At least one tile of rows: a copy has a static size."""
    return jnp.pad(x, ((0, max(least - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))
