"""Selection on Hopper in Mosaic GPU: scores, then the best of each row.

``indexer/paged_sm90`` and, over gathered codes, ``indexer/scores_sm90`` score some rows,
``rows_sm90`` takes the best of each; then the next.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.indexer import paged_sm90 as paged
from mla_jax.pallas.indexer import scores_sm90 as scores
from mla_jax.pallas.topk import rows_sm90
from mla_jax.types import Array, Float, Int, cdiv, round_up

__all__ = ["select_decode", "select_prefill"]

WORKSPACE = 1 << 25
"""Elements of the ranks that exist at a time: 128 MiB, or one row's where these are more."""

UNROLLED = 32
"""Parts of the rows up to which the loop over them is none."""

BUSY, LONG, SHORT = 0.75, 32, 4
"""Thread blocks over pages all start together if they fill at least ``BUSY`` of the places for them
and a warpgroup has at most ``LONG`` pages; else a warpgroup has ``SHORT`` pages."""


def select_decode(
    q: Float[Array, "rows queries heads dim"],
    weights: Float[Array, "rows queries heads"],
    cache: LatentCache | RecordCache,
    page_table: Int[Array, "rows width"],
    lens: Int[Array, "rows queries"],
    *,
    k: int,
    layer: Int[Array, ""] | None = None,
) -> Int[Array, "rows queries {k}"]:
    """``xla.select_decode``."""
    queries = q.shape[1]
    width, page, sms = page_table.shape[1], cache.page, DeviceInfo.current().sms
    records = isinstance(cache, RecordCache)
    size = (-1,) if records else (page, -1)
    pages = cache.pages.reshape(cache.layers or 1, cache.num_pages, *size)
    streams, resident = paged.fit(queries, records=records)
    number = jnp.zeros((), jnp.int32) if layer is None else layer

    def some(row: Array, rows: int, into: Array | None, *whole: Array) -> Array:
        cut = partial(lax.dynamic_slice_in_dim, start_index=row, slice_size=rows)
        q, weights, page_table, lens = map(cut, whole)

        def ranks(base: Array | None, columns: int) -> Array:
            span = _span(len(q), cdiv(columns, streams * page), resident * sms)
            return paged.paged_ranks(
                q, weights, pages, page_table, lens, number, base,
                columns=columns, span=span, least=k,
            )  # fmt: skip

        chosen = rows_sm90.select(ranks, None, lens.reshape(-1), width * page, k=k)
        chosen = chosen.reshape(len(q), queries, k)
        count = len(whole[0])
        return chosen if rows == count else rows_sm90.among_all(chosen, row, count, into)

    columns = queries * min(width * page, rows_sm90.COLUMNS)
    return _by_rows(some, (q, weights, page_table, lens), columns)


def select_prefill(
    q: Float[Array, "queries heads dim"],
    weights: Float[Array, "queries heads"],
    keys: Float[Array, "keys dim"],
    starts: Int[Array, "queries"],
    ends: Int[Array, "queries"],
    *,
    k: int,
    scales: Float[Array, "keys"] | None = None,
) -> Int[Array, "queries {k}"]:
    """``xla.select_prefill``."""
    count, sms = keys.shape[0], DeviceInfo.current().sms
    starts, ends = (jnp.clip(x, 0, count) for x in (starts, ends))
    scales = jnp.ones((count,), jnp.float32) if scales is None else scales
    rest = round_up(count, 8) - count
    keys, scales = jnp.pad(keys, ((0, rest), (0, 0))), jnp.pad(scales, (0, rest))

    def some(
        row: Array, rows: int, into: Array | None, side: Array, starts: Array, ends: Array
    ) -> Array:
        def ranks(base: Array | None, columns: int) -> Array:
            scored = ends - starts > k
            # Of the rows of all calls: the same in each call, so XLA makes them once.
            low = _by_groups(jnp.where(scored, starts, count), rows, nothing=count)
            high = _by_groups(jnp.where(scored, ends, 0), rows, nothing=0)
            return scores.gathered_ranks(
                q, side, keys, scales, low.min(axis=1), high.max(axis=1), base,
                None if whole else row, rows=rows, columns=columns, workers=sms,
            )  # fmt: skip

        whole = rows == len(starts)
        part = None if whole else (row, rows)
        return rows_sm90.select(ranks, starts, ends, count, k=k, some=part, into=into)

    side = _side(weights, ends, multiple=scores.SIDE)
    return _by_rows(some, (side, starts, ends), min(count, rows_sm90.COLUMNS))


def _span(rows: int, blocks: int, workers: int) -> int:
    """Of a row's ``blocks`` those of one thread block.

    ``workers`` thread blocks run at a time. If rows are equally long, it is fastest that all start
    together. Where that would take long, or leave many places empty, thread blocks are small, and
    one starts where another ends: 64 rows of up to 32,768 keys, of any lengths, took 45 us instead
    of 60 (H200).
    """
    once = cdiv(blocks, max(workers // rows, 1))
    busy = rows <= workers and rows * blocks >= BUSY * workers * once
    return once if busy and once <= LONG else min(once, SHORT)


def _by_groups(
    x: Int[Array, "all_rows"], rows: int, *, nothing: int
) -> Int[Array, "groups together"]:
    """Of each call's ``rows`` the groups, ``nothing`` behind the last row of each call."""
    pad = (0, 0), (0, round_up(rows, scores.TOGETHER) - rows)
    x = jnp.pad(x.reshape(-1, rows), pad, constant_values=nothing)
    return x.reshape(-1, scores.TOGETHER)


def _by_rows(
    one: Callable[..., Array], arrays: Sequence[Array], columns: int
) -> Int[Array, "rows ..."]:
    """The results of ``one(first row's number, rows, into, *arrays)`` for all rows.

    Each call has as many rows as the workspace holds, an even number of them if there are several.
    ``arrays`` are whole: cut for each call they would be copied. So is what a call gives: ``into``,
    what the calls before gave, with its rows written. Rows of zeros fill the last call.
    """
    rows = len(arrays[0])
    calls = cdiv(rows, max(WORKSPACE // max(columns, 1), 1))
    if calls <= 1:
        return one(jnp.int32(0), rows, None, *arrays)
    some = round_up(cdiv(rows, calls), 2)  # a kernel takes two rows at a time
    calls = cdiv(rows, some)
    pad = calls * some - rows
    arrays = [jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))) for x in arrays]
    found = one(jnp.int32(0), some, None, *arrays)
    if calls <= UNROLLED:
        for i in range(1, calls):
            found = one(jnp.int32(i * some), some, found, *arrays)
    else:
        ends = jnp.int32(1), jnp.int32(calls)
        found = lax.fori_loop(*ends, lambda i, found: one(i * some, some, found, *arrays), found)
    return found[:rows] if pad else found


def _side(
    weights: Float[Array, "queries heads"], ends: Int[Array, "queries"], *, multiple: int
) -> Int[Array, "queries words"]:
    """Words of each query: halves of its weights, its end, then what is not read."""
    halves = lax.bitcast_convert_type(0.5 * weights.astype(jnp.float32), jnp.int32)
    if (heads := weights.shape[1]) > 8:  # what a thread reads together, of two tiles of a product
        halves = halves.reshape(-1, heads // 16, 2, 4, 2).swapaxes(2, 3).reshape(-1, heads)
    rest = round_up(halves.shape[1] + 1, multiple) - halves.shape[1]
    return jnp.concatenate([halves, jnp.broadcast_to(ends[:, None], (len(ends), rest))], axis=1)
