"""Index scores over pages on Hopper, as integers of the same order: Pallas Mosaic GPU.

The sums of ``scores_sm90``, of keys in a cache of ``index_key`` records or of 16-bit elements. Each
warpgroup has a stream of pages of its own, 64 keys each, and one row's queries; so one hides what
another one waits for, and a thread block begins where another ends. So thread blocks are small.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportReturnType=false

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.indexer import scores_sm90 as scores
from mla_jax.pallas.indexer.scores_sm90 import BLOCK, DIM, F8, I32, MISSING, SIDE, cdiv_
from mla_jax.types import cdiv, round_up

__all__ = ["Fit", "fit", "paged_ranks"]

SLOTS = 2
"""Pages of a warpgroup: one that it multiplies, one that comes."""

MOST_BLOCKS = 5
"""Thread blocks of one warpgroup on a multiprocessor; more of them were not faster."""

SCALES = 2
"""Rows of a page of records, behind its keys, that hold their scales."""

KEPT = 1 << 24
"""Bytes of ranks, at most, that the L2 cache is asked to keep: a third of it."""

ONE = 0x3F800000
"""Bits of the scale of elements: they have none."""

_ROWS = (plgpu.TilingTransform((1, 128)), plgpu.SwizzleTransform(128))
"""The bytes of ``lib.swizzled``, for the copy engine to start at any row of global memory."""


class Fit(NamedTuple):
    """How a multiprocessor is filled."""

    streams: int  # warpgroups of a thread block; of three, each has every third page of its span
    blocks: int  # thread blocks


def fit(queries: int, *, records: bool) -> Fit:
    """For so many queries of each row, over records or 16-bit elements.

    Warpgroups of one thread block share its queries. Where these are few, each has its own.
    """
    if records:
        return Fit(1, MOST_BLOCKS) if queries < 3 else Fit(3, 2 if queries < 8 else 1)
    return Fit(streams=min(queries, 3), blocks=(4, 2, 1)[min(queries, 3) - 1])


@lib.lowered_once("columns", "span", "least")
def paged_ranks(
    q: jax.Array, weights: jax.Array, pages: jax.Array, table: jax.Array, lens: jax.Array,
    layer: jax.Array, base: jax.Array | None, *, columns: int, span: int, least: int,
) -> jax.Array:  # fmt: skip
    """Ranks ``[rows * queries, columns]`` of positions from ``base`` (or 0) on, keys in pages.

    ``q`` [rows, queries, heads, DIM]; ``pages`` [layers, pages, bytes] ``index_key`` records in
    pages of BLOCK, or [layers, pages, BLOCK, DIM] elements; ``lens`` [rows, queries]: one of at
    most ``least`` needs no ranks. A warpgroup has ``span`` pages.
    """
    rows, queries, heads, _ = q.shape
    layers, count, *size = pages.shape
    records = pages.dtype == jnp.uint8
    assert size == ([BLOCK * (DIM + 4)] if records else [BLOCK, DIM])
    kind = F8 if records else pages.dtype
    streams, _ = fit(queries, records=records)
    copies = 2 if records else 1  # of a page, and of what goes with a query
    shape = streams, SLOTS, BLOCK, DIM
    keys = lib.swizzled(shape, kind)
    weights = weights.astype(jnp.float32).reshape(rows * queries, heads)
    if rest := round_up(heads, SIDE) - heads:
        weights = jnp.pad(weights, ((0, 0), (0, rest)))
    scratch = {
        "q": lib.swizzled((queries, heads, DIM), kind),
        "k": keys,
        "q_full": lib.barrier(copies * queries),
        "full": lib.barrier(copies, streams * SLOTS),
        "free": lib.barrier(1, streams * SLOTS),
    }
    if records:  # of elements two thread blocks would not fit with the weights in shared memory too
        copied = plgpu.SMEM(shape, jnp.uint8, transforms=_ROWS)
        scratch |= {
            "k": plgpu.RefUnion(keys, copied),
            "s": plgpu.SMEM((streams, SLOTS, SCALES, DIM), jnp.uint8),
            "w": plgpu.SMEM((queries, weights.shape[1]), jnp.float32),
        }
    task = _Task(
        columns=columns, span=span, least=least, layers=layers, based=base is not None,
        keep=4 * rows * queries * columns <= KEPT,
    )  # fmt: skip
    kernel = lib.kernel(
        functools.partial(_paged, task=task),
        out_type=jax.ShapeDtypeStruct((rows * queries, columns), I32),
        scratch_types=scratch,
        grid=(rows * cdiv(columns, streams * BLOCK * span),),
        grid_names=("item",),
        num_threads=streams,
        thread_name="wg",
        kernel_name="mla_index_ranks_paged",
        compiler_params=scores.PARAMS,
    )
    flat = pages.reshape(layers * count, BLOCK + SCALES if records else BLOCK, DIM)
    numbers = (x.reshape(1) for x in (layer, layer if base is None else base))
    return kernel(q.astype(kind), weights, flat, table, lens, *numbers)


class _Task(NamedTuple):
    """What is the same for all thread blocks."""

    columns: int
    span: int  # pages of a warpgroup
    least: int  # a row of at most so many keys needs no ranks
    layers: int
    based: bool  # column 0 is not position 0
    keep: bool  # the L2 cache is asked to keep the ranks


def _paged(q_g, w_g, pages_g, table_g, lens_g, layer_g, base_g, ranks_g, *, task, **refs) -> None:
    """One thread block: a row's queries, and a stream of its pages for each warpgroup."""
    columns, span, least, layers, based, keep = task
    wg, item = lax.axis_index("wg"), lax.axis_index("item")
    queries, records = refs["q"].shape[0], "s" in refs
    codes, copied = refs["k"] if records else (refs["k"], refs["k"])
    streams, slots, *_ = codes.shape
    shared, keys = scores.shared_as(codes.dtype), streams * BLOCK * span
    spans = cdiv(columns, keys)
    row, part = lax.div(item, spans), lax.rem(item, spans)
    # Without a base a thread block waits for one load less before it knows its pages.
    base, count = base_g[0] if based else jnp.int32(0), pages_g.shape[0] // layers
    offset = jnp.clip(layer_g[0], 0, layers - 1) * count
    column = part * keys
    ends = [jnp.minimum(lens_g[row, j], table_g.shape[1] * BLOCK) for j in range(queries)]
    longest = functools.reduce(jnp.maximum, [jnp.where(n > least, n, 0) for n in ends])
    # Positions of the thread block.
    seen = jnp.minimum(jnp.minimum(longest - base, columns) - column, keys)
    full, free = (lambda s, x=refs[name]: x.at[wg * slots + s] for name in ("full", "free"))

    def place(i):
        """Where page ``i`` of this stream lies, or -1."""
        at = lax.div(base + column, BLOCK) + i * streams + wg
        found = table_g[row, jnp.minimum(at, table_g.shape[1] - 1)]
        return jnp.where((found >= 0) & (found < count), found + offset, -1)

    def load(i, where):
        slot, source = lax.rem(jnp.asarray(i, I32), slots), pages_g.at[jnp.maximum(where, 0)]
        if not isinstance(i, int):  # all warps of this group have read what was there
            pl.when(i >= slots)(lambda: plgpu.barrier_wait(free(slot)))
        pieces = [(pl.ds(0, BLOCK), copied)]
        pieces += [(pl.ds(BLOCK, SCALES), refs["s"])] if records else []
        for rows, to in pieces:
            plgpu.copy_gmem_to_smem(source.at[rows], to.at[wg, slot], full(slot))

    def factor(slot, lanes):
        """Of a thread's key; of records its half, for which the weights have not been halved."""
        return scores.scale_of(refs["s"].at[wg, slot], lanes[1], half=True) if records else ONE

    def step(i, carry):
        here, ahead = carry  # of pages i and i + slots - 1
        slot = lax.rem(i, slots)
        pl.when(i + slots - 1 < n)(lambda: load(i + slots - 1, ahead))
        after = place(jnp.minimum(i + 1, n - 1)), place(jnp.minimum(i + slots, n - 1))
        plgpu.barrier_wait(full(slot))
        lanes = scores.lane_numbers()
        scale = jnp.where(here >= 0, factor(slot, lanes), MISSING)
        at = column + (i * streams + wg) * BLOCK
        facts = {"lanes": lanes, "column": at, "columns": columns, "base": base}
        facts |= {"codes": records, "keep": keep}

        @pl.loop(0, queries)
        def _(j):
            x = scores.multiply(codes.at[wg, slot], refs["q"].at[j], shared, shared)
            x = lib.landed(x, 0)
            pl.when(j == queries - 1)(lambda: plgpu.barrier_arrive(free(slot)))
            end = ends[0]
            for i in range(1, queries):
                end = jnp.where(j == i, ends[i], end)
            limit, line = jnp.minimum(end - base, columns) - at, row * queries + j
            w = refs["w"].at[pl.ds(j, 1)] if records else w_g.at[pl.ds(line, 1)]
            scores.store_ranks(x, w, scale, ranks_g, line, limit, **facts)

        return after

    n = cdiv_(jnp.maximum(cdiv_(jnp.maximum(seen, 0), BLOCK) - wg, 0), streams)

    @pl.when(seen > 0)
    def _():
        @pl.when(wg == 0)
        def _():
            for j in range(queries):
                sources = {"q": q_g.at[row, j]}
                sources |= {"w": w_g.at[row * queries + j]} if records else {}
                for name, src in sources.items():
                    plgpu.copy_gmem_to_smem(src, refs[name].at[j], refs["q_full"])

        for i in range(slots - 1):
            pl.when(i < n)(lambda i=i: load(i, place(jnp.int32(i))))
        plgpu.barrier_wait(refs["q_full"])
        first = place(jnp.int32(0)), place(jnp.clip(n - 1, 0, slots - 1))
        lax.fori_loop(0, n, step, first)
