"""Backend ``mosaic`` of dense decode: plan, kernel, merge."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import FORMATS, CacheFormat
from mla_jax.errors import ArgumentError
from mla_jax.pallas import axes, registry
from mla_jax.pallas import tuning as tuning_table
from mla_jax.pallas.dense_decode import combine_sm90, few_sm90, mosaic_sm90, plan_sm90
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.sizes_sm90 import (
    BLOCK,
    ROWS,
    Sizes,
    most_columns,
)
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.types import Array, AttnState, Float, cdiv, round_up

__all__ = ["Tuning", "dense_decode", "heuristic", "make_plan", "tune"]

SPLIT_COST = 0.001 * wp.COST
"""What a split costs for each of its rows: two parts written and read."""


MAX_PARTS = 16
"""Pieces of one request in a batch-invariant plan, at most."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What may change the speed, and only ``batch_invariant`` the bits, of a result."""

    defer: bool  # PV of a block waits for QK of the next one
    prefetch: bool  # blocks go to the L2 cache one step early: only with defer
    early_launch: bool  # the merge kernel is launched while the main one ends
    few: bool = False  # queries are columns of the products: 16 rows at most, 32 over e4m3
    batch_invariant: bool = False  # cut requests by their own length, not by equal shares
    chunk: int = 128  # blocks of 64 keys in a piece of a batch-invariant plan
    workers: int  # thread blocks in all: as many as there are multiprocessors

    def __post_init__(self):
        if self.prefetch and not self.defer:
            raise ArgumentError("mla_decode: prefetch", "True with defer=False", "with defer=True")
        tuning_table.at_least_one("mla_decode", chunk=self.chunk, workers=self.workers)


def tune(problem: Problem, device: DeviceInfo) -> Tuned:
    """The measured choice for a problem, or the heuristic where nothing near was measured."""

    def choose() -> Tuning:
        quantised = FORMATS[str(problem["cache"])].quantised
        sizes = int(problem["heads"]), int(problem["max_query_len"])
        return heuristic(*sizes, quantised, workers=device.sms)

    return tuning_table.tuned(problem, device, Tuning, choose, workers=device.sms)


def heuristic(heads: int, max_query_len: int, quantised: bool = False, *, workers: int) -> Tuning:
    """Two or more tiles of 64 rows share each page: compute bound. One: memory bound.

    Over an e4m3 cache the time from a block's load to its product is the bound, unless rows are
    few.
    """
    rows = round_up(heads, 8) * max_query_len
    prefetch = rows > ROWS and not quantised
    few = rows <= most_columns(quantised)
    return Tuning(
        defer=not quantised, prefetch=prefetch, early_launch=True, few=few, workers=workers
    )


def make_plan(
    seq_lens: axes.PerRequest, query_starts: axes.Starts, *, tokens: int, heads: int,
    max_query_len: int, page: int, width: int, tuning: Tuning,
) -> wp.WorkPlan:  # fmt: skip
    """The work plan of one step; the same for all layers. ``width`` is the page table's."""
    sizes = _sizes(heads, max_query_len, page, tuning)
    lens = jnp.clip(seq_lens, 0, width * page).astype(jnp.int32)
    starts = query_starts.astype(jnp.int32)
    common = {"tokens": tokens, "block": BLOCK, "workers": sizes.workers}
    if tuning.batch_invariant:
        parts = max(cdiv(cdiv(width * page, BLOCK), tuning.chunk), 1)
        parts = min(parts, MAX_PARTS)
        plan = wp.batch_invariant(lens, starts, chunk=tuning.chunk, max_parts=parts, **common)
    else:
        split_cost = max(round(SPLIT_COST * sizes.heads * sizes.queries), 1)
        plan = _balanced(lens, starts, split_cost=split_cost, **common)
    return replace(plan, facts=_facts(sizes, tuning, tokens, seq_lens.shape[0], width))


def _facts(sizes: Sizes, tuning: Tuning, tokens: int, requests: int, width: int) -> wp.PlanFacts:
    return wp.PlanFacts(
        tokens=tokens,
        requests=requests,
        heads=sizes.heads,
        max_query_len=sizes.queries,
        page=sizes.page,
        width=width,
        workers=sizes.workers,
        chunk=tuning.chunk if tuning.batch_invariant else 0,
    )


def _balanced(lens: Array, starts: Array, **sizes: int) -> wp.WorkPlan:
    """In one kernel on a GPU, where the many small ones of XLA take longer."""
    anywhere = functools.partial(wp.balanced, **sizes)
    if lens.shape[0] > plan_sm90.MOST_REQUESTS:
        return anywhere(lens, starts)
    kernel = functools.partial(plan_sm90.balanced, **sizes)
    return jax.lax.platform_dependent(lens, starts, cuda=kernel, default=anywhere)


def dense_decode(
    q_latent: axes.LatentQueries, q_rope: axes.RopeQueries, pages: axes.Pages,
    cache_scale: axes.CacheScale, page_table: axes.PageTable, seq_lens: axes.PerRequest,
    query_starts: axes.Starts, *, max_query_len: int, scale: float, format: CacheFormat,
    out_dtype: DTypeLike, tuning: Tuning, layer: axes.Layer = None, plan: wp.WorkPlan | None = None,
) -> AttnState:  # fmt: skip
    """``ref.dense_decode`` at the dtype of the queries, accumulating in float32.

    The weights of the values are rounded to that dtype. ``plan`` is ``make_plan`` of the same
    arguments, if it is at hand.
    """
    del out_dtype  # that of the queries
    tokens, heads, rank = q_latent.shape
    requests, width = page_table.shape
    if not (tokens and requests and width):
        return AttnState(
            out=jnp.zeros((tokens, heads, rank), q_latent.dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    page = pages.shape[-2]
    sizes = _sizes(heads, max_query_len, page, tuning)
    if plan is None:
        plan = make_plan(
            seq_lens,
            query_starts,
            tokens=tokens,
            heads=heads,
            max_query_len=max_query_len,
            page=page,
            width=width,
            tuning=tuning,
        )
    _check(plan, _facts(sizes, tuning, tokens, requests, width))
    return attend(
        q_latent,
        q_rope,
        pages,
        cache_scale,
        page_table,
        plan,
        layer=layer,
        scale=scale,
        format=format,
        tuning=tuning,
    )


def attend(
    q_latent: axes.LatentQueries, q_rope: axes.RopeQueries, pages: axes.Pages,
    cache_scale: axes.CacheScale, page_table: axes.PageTable, plan: wp.WorkPlan, *, scale: float,
    format: CacheFormat, tuning: Tuning, layer: axes.Layer = None, interpret: object = None,
) -> AttnState:  # fmt: skip
    """Of a plan: pieces, then their merge. ``interpret`` runs on a CPU."""
    assert plan.facts is not None  # checked
    tokens, heads, rank = q_latent.shape
    sizes = _sizes(heads, plan.facts.max_query_len, pages.shape[-2], tuning)
    most = most_columns(format.quantised)
    if tuning.few and sizes.live > most:
        given = f"{format.name} cache, {sizes.heads * sizes.queries} rows"
        raise ArgumentError("mla_decode: tuning few", given, f"{most} rows at most")
    if scale <= 0:  # the kernel takes the maximum before it scales
        q_latent, q_rope = (q * jnp.asarray(jnp.sign(scale), q.dtype) for q in (q_latent, q_rope))
        scale = abs(scale) or 1.0
    if tuning.few:
        pieces = few_sm90.attend
    else:
        order = {"defer": tuning.defer, "prefetch": tuning.prefetch}
        pieces = functools.partial(mosaic_sm90.attend, **order)
    out, lse, part, part_lse = pieces(
        _rows(q_latent, sizes.heads),
        _rows(q_rope, sizes.heads),
        pages,
        cache_scale,
        page_table,
        plan,
        layer=layer,
        sizes=sizes,
        scale=scale,
        early_launch=tuning.early_launch and interpret is None,
        interpret=interpret,
    )
    out, lse = combine_sm90.combine(
        out,
        lse,
        part.reshape(*part_lse.shape, rank),
        part_lse,
        plan.merges,
        heads=sizes.heads,
        multiprocessors=tuning.workers,
        early_launch=tuning.early_launch and interpret is None,
        interpret=interpret,
    )
    return AttnState(
        out=out.reshape(tokens, sizes.heads, rank)[:, :heads],
        lse=lse.reshape(tokens, sizes.heads)[:, :heads],
    )


def _check(plan: object, facts: wp.PlanFacts) -> None:
    """Refuse a plan that was made for something else."""
    if not isinstance(plan, wp.WorkPlan) or plan.facts is None:
        raise ArgumentError("mla_decode: plan", type(plan).__name__, "a WorkPlan of plan_decode")
    given, allowed = registry.differing(plan.facts, facts)
    if given:
        raise ArgumentError("mla_decode: plan", given, f"{allowed}: plan_decode of this call")


def _sizes(heads: int, max_query_len: int, page: int, tuning: Tuning) -> Sizes:
    padded = round_up(heads, 8)
    tiles = cdiv(padded * max_query_len, ROWS)
    workers = max(tuning.workers // tiles, 1)
    return Sizes(heads=padded, queries=max_query_len, page=page, workers=workers)


def _rows(q: Float[Array, "tokens heads columns"], heads: int) -> Float[Array, "rows columns"]:
    """Queries as rows ``(token, head)``, heads padded."""
    tokens, given, columns = q.shape
    return jnp.pad(q, ((0, 0), (0, heads - given), (0, 0))).reshape(tokens * heads, columns)
