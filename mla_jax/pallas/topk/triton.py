"""Selection in Triton: scores of a chunk of keys into a workspace, then the best of each row.

    ranks    scores as integers of the same order, tensor cores            [rows, columns]
    best_of  few rows: the best of up to 8,192 candidates, in registers    [rows, parts, k]
    stream   many rows: a row's candidates so far, and those of a chunk    [rows, 2 k]

Few rows have all of their columns in one chunk: parts of a row are taken side by side, then lists
of parts are joined until one is left; on Hopper ``rows_sm90`` takes their place, in one launch.
Many rows have a chunk after the other, of which a row takes what is above the ``k``-th of its
candidates so far; a list that is full is cut down to its best. A chunk has ``WORKSPACE`` elements,
or ``LEAST`` for each row where these are more, whatever the context's length. Ranks keep the order
of scores exactly and places ascend, so equal scores go to the lower position, and no chunk and no
part changes a result.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas import triton_lib
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.indexer import kernels_triton as scores
from mla_jax.pallas.topk import kernels_triton as kernels
from mla_jax.pallas.topk import rows_sm90
from mla_jax.types import Array, Float, Int, cdiv, power_of_two, round_up

__all__ = ["select", "select_decode", "select_prefill"]

WORKSPACE = 1 << 25
"""Elements of one chunk's ranks: 128 MiB."""

HEADS = 64
"""Of a product of scores."""

PAGED = 128, 4, 32
"""Keys of a block, and the fewest and most blocks of a program, where keys lie in pages."""

PROGRAMS = 1024
"""That more blocks leave over: four for each place that a multiprocessor has, about."""

GATHERED = 256, 32
"""Keys and queries of a program where keys are gathered."""

CANDIDATES = 8192
"""Of a program of ``best_of``, or four lists where these are more."""

FEW = 1024
"""Parts of all rows up to which they are taken side by side."""

STEP = 8192
"""Columns that ``stream`` looks at together, at most."""

LEAST = 256
"""Of a multiple of so many columns is a chunk."""

REGISTERS = 128
"""Of a thread of ``stream``: two programs share a multiprocessor."""

UNROLLED = 32
"""Chunks up to which the loop over them is none: each is launched, and ends at once behind the
longest row."""


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
    rows, queries, heads, dim = q.shape
    width, records = page_table.shape[1], isinstance(cache, RecordCache)
    lens = jnp.clip(lens, 0, width * cache.page)
    number = jnp.zeros((), jnp.int32) if layer is None else layer

    def ranks(base: Array, columns: int) -> Array:
        blocks = _blocks(rows * cdiv(columns, PAGED[0]))
        return triton_lib.call(
            scores.paged_ranks,
            q, weights, cache.pages, page_table, lens, number, base,
            out=jax.ShapeDtypeStruct((rows * queries, columns), jnp.int32),
            grid=rows * cdiv(columns, PAGED[0] * blocks),
            warps=4,
            stages=2 if blocks > PAGED[1] else 3,
            SIZES=(rows, queries, heads, dim, width, k),
            CACHE=(
                cache.layers or 1,
                cache.num_pages,
                cache.page,
                cache.pages.shape[-1] * (1 if records else cache.page),
            ),
            TILE=(PAGED[0], _heads(heads), blocks, columns),
            RECORDS=records,
        )  # fmt: skip

    flat = lens.reshape(-1)
    chosen = select(ranks, jnp.zeros_like(flat), flat, width * cache.page, k=k)
    return chosen.reshape(rows, queries, k)


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
    (queries, heads, dim), count = q.shape, keys.shape[0]
    starts, ends = (jnp.clip(x, 0, count) for x in (starts, ends))
    (step, some), scaled = GATHERED, scales is not None

    def ranks(base: Array, columns: int) -> Array:
        return triton_lib.call(
            scores.gathered_ranks,
            q, weights, keys, weights if scales is None else scales, starts, ends, base,
            out=jax.ShapeDtypeStruct((queries, columns), jnp.int32),
            grid=cdiv(queries, some) * cdiv(columns, step),
            warps=8,
            stages=3,
            SIZES=(queries, heads, dim, count, k),
            TILE=(step, _heads(heads), some, columns),
            SCALED=scaled,
        )  # fmt: skip

    return select(ranks, starts, ends, count, k=k)


def _blocks(all_blocks: int) -> int:
    """Of a program over pages, a power of two."""
    _, least, most = PAGED
    blocks = least
    while blocks < most and all_blocks >= 2 * blocks * PROGRAMS:
        blocks *= 2
    return blocks


def _heads(heads: int) -> int:
    """Of one product."""
    return min(HEADS, max(power_of_two(heads), 16))


def select(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"],
    ends: Int[Array, "rows"],
    longest: int,
    *,
    k: int,
) -> Int[Array, "rows {k}"]:
    """Places from ``starts`` on of the best; ``ranks(base, columns)`` is a chunk's workspace."""
    rows, at = starts.shape[0], jnp.arange(k, dtype=jnp.int32)
    if not rows or longest <= k:
        return jnp.where(at < (ends - starts)[:, None], at, -1)
    size = max(CANDIDATES, 4 * power_of_two(k))
    if rows * cdiv(longest, size) <= FEW and rows * longest <= WORKSPACE:
        if DeviceInfo.current().sm == 90:
            zero = jnp.zeros_like(starts, shape=())
            based = lambda base, columns: ranks(zero if base is None else base, columns)  # noqa: E731
            return rows_sm90.select(based, starts, ends, longest, k=k)
        return _parts(ranks, starts, ends, round_up(longest, 16), k=k, size=size)
    columns = max(WORKSPACE // rows // LEAST, 1) * LEAST
    if columns > STEP:
        columns = columns // STEP * STEP
    columns = min(columns, round_up(longest, LEAST))
    return _stream(ranks, starts, ends, cdiv(longest, columns), k=k, columns=columns)


def _parts(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"],
    ends: Int[Array, "rows"],
    columns: int,
    *,
    k: int,
    size: int,
) -> Int[Array, "rows {k}"]:
    """``select`` with all columns at once: parts of them, then lists of parts."""
    rows, base = starts.shape[0], jnp.zeros_like(starts, shape=())

    def best(given: tuple[Array, ...], *, old: tuple[int, int], new: tuple[int, int]) -> Any:
        parts = cdiv(*reversed(new)) if new[0] else cdiv(*reversed(old))
        out = jax.ShapeDtypeStruct((rows, parts * k), jnp.int32)
        return triton_lib.call(
            kernels.best_of,
            *given, starts, ends, base,
            out=(out, out),
            grid=rows * parts,
            warps=8,
            stages=2,
            K=k,
            OLD=old,
            NEW=new,
            SIZE=power_of_two(max(old[0], new[0], k)),
        )  # fmt: skip

    new = min(size, columns), columns
    lists = best((starts, starts, ranks(base, columns)), old=(0, 0), new=new)
    while (entries := lists[0].shape[1]) > k:
        old = min(size // k * k, entries), entries
        lists = best((*lists, starts), old=old, new=(0, 0))
    return lists[1]


def _stream(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"],
    ends: Int[Array, "rows"],
    turns: int,
    *,
    k: int,
    columns: int,
) -> Int[Array, "rows {k}"]:
    """``select``, chunk by chunk."""
    rows, step = starts.shape[0], min(power_of_two(columns), STEP)
    size = 2 * power_of_two(k)
    shapes = (rows, size), (rows, size), (rows, 2), (rows, k)
    out = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)

    def chunk(i: Array | int, kept: Any, *, first: bool, last: bool) -> Any:
        base = jnp.asarray(i, jnp.int32) * columns + jnp.zeros_like(starts, shape=())
        *kept, chosen = triton_lib.call(
            kernels.stream,
            *(kept or (starts, starts, starts)), ranks(base, columns), starts, ends, base,
            out=out,
            grid=rows,
            warps=8,
            stages=2,
            aliases=None if first else {0: 0, 1: 1, 2: 2},
            registers=REGISTERS,
            K=k,
            SIZES=(columns, step, size),
            TURN=(first, last),
        )  # fmt: skip
        return chosen if last else tuple(kept)

    kept = chunk(0, None, first=True, last=turns == 1)
    if turns <= UNROLLED:
        for i in range(1, turns):
            kept = chunk(i, kept, first=False, last=i == turns - 1)
    else:
        some = functools.partial(chunk, first=False, last=False)
        end = jnp.maximum((jnp.max(ends) + columns - 1) // columns, 2)
        kept = chunk(end - 1, lax.fori_loop(1, end - 1, some, kept), first=False, last=True)
    return kept
