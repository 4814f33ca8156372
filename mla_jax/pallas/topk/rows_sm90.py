"""The best of rows of ranks on Hopper: of a row at once, of parts, or of one chunk after another.

Of both backends: ``mosaic`` and ``triton`` make ranks of the same order.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.topk import select_sm90
from mla_jax.pallas.topk.select_sm90 import NO_CANDIDATE
from mla_jax.types import Array, Int, cdiv, round_up

__all__ = ["COLUMNS", "MANY", "PART", "among_all", "select"]

COLUMNS = 1 << 17
"""Of a row that are scored and selected together, at most."""

PART, MANY = 1 << 15, 64
"""Columns of a thread block of the selection; rows from which on three of them and more are parts.

Two are where rows are many (``select_sm90.MANY``)."""


def select(
    ranks: Callable[[Array | None, int], Array],
    starts: Int[Array, "rows"] | None,
    ends: Int[Array, "rows"],
    longest: int,
    *,
    k: int,
    some: tuple[Array, int] | None = None,
    into: Int[Array, "rows {k}"] | None = None,
) -> Int[Array, "some_or_all {k}"]:
    """Places from ``starts`` (or 0) on of the best; ``ranks(base, columns)`` is a workspace.

    Without a base its columns are those from 0 on.

    Of more than ``COLUMNS`` these are scored at a time, and their best joined with the best so far.
    ``some``: only these rows count, the first one's number and how many; ``ranks`` are theirs.
    Then the result has all rows, those that do not count are of ``into``, or anything.
    """
    row, rows = (None, len(ends)) if some is None else some
    if rows and k < longest <= COLUMNS:
        return _at_once(ranks, starts, ends, longest, row, rows, into, k=k)
    all_rows = len(ends)
    if row is not None:
        ends = lax.dynamic_slice_in_dim(ends, row, rows)
        starts = None if starts is None else lax.dynamic_slice_in_dim(starts, row, rows)
    first = jnp.zeros_like(ends) if starts is None else jnp.clip(starts, 0, longest)
    lens, at = (jnp.clip(ends, 0, longest) - first)[:, None], jnp.arange(k, dtype=jnp.int32)
    found = jnp.where(at < lens, at, -1)
    if rows and longest > k:
        found = jnp.where(lens > k, _by_chunks(ranks, first, ends, longest, k=k), found)
    return found if row is None else among_all(found, row, all_rows, into)


def among_all(
    found: Int[Array, "some ..."], row: Array, rows: int, into: Int[Array, "rows ..."] | None
) -> Int[Array, "rows ..."]:
    """``into``, or zeros of so many ``rows``, with ``found`` from ``row`` on."""
    into = jnp.zeros((rows, *found.shape[1:]), jnp.int32) if into is None else into
    return lax.dynamic_update_slice_in_dim(into, found, row, 0)


def _at_once(
    ranks: Callable[[Array | None, int], Array], starts: Int[Array, "rows"] | None,
    ends: Int[Array, "rows"], longest: int, row: Array | None, rows: int,
    into: Int[Array, "rows {k}"] | None, *, k: int,
) -> Int[Array, "some_or_all {k}"]:  # fmt: skip
    """``select`` of rows that are scored at once; ``starts`` and ``ends`` are of all rows."""
    parts = _parts(rows, longest)
    found = ranks(None, round_up(longest, 16 * parts))
    if parts == 1:
        return _best(found, starts, ends, row=row, into=into, k=k)
    first = 0 if starts is None else jnp.clip(starts, 0, longest)
    lens = jnp.clip(ends, 0, longest) - first
    kept, places = _lists(found, starts, ends, first, row, parts=parts, k=k)
    ends = jnp.where(lens > k, kept.shape[1], lens)
    return _best(kept, None, ends, places=places, row=row, into=into, k=k)


def _by_chunks(
    ranks: Callable[[Array | None, int], Array], first: Int[Array, "rows"],
    ends: Int[Array, "rows"], longest: int, *, k: int,
) -> Int[Array, "rows {k}"]:  # fmt: skip
    """Places of the best of rows longer than ``k``, one chunk of ``COLUMNS`` after the other."""
    rows, zero = len(ends), jnp.zeros_like(ends, shape=())
    parts = _parts(rows, longest)

    def chunk(i: Array, old: tuple[Array, Array]) -> tuple[Array, Array]:
        base = i * COLUMNS
        a, b = (jnp.clip(x - base, 0, COLUMNS) for x in (first, ends))
        new = _lists(ranks(base, COLUMNS), a, b, first - base, parts=parts, k=k)
        both = [jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
        most = jnp.full_like(ends, both[0].shape[1])
        places, kept = _best(both[0], None, most, places=both[1], k=k, ranked=True)
        return kept, places

    none = jnp.full_like(ends, NO_CANDIDATE, shape=(rows, k))
    turns = (jnp.clip(jnp.max(ends), 0, longest) + COLUMNS - 1) // COLUMNS
    return lax.fori_loop(zero, turns, chunk, (none, jnp.full_like(none, -1)))[1]


def _parts(rows: int, columns: int) -> int:
    """The number of parts that a row is cut into; the lists of its parts are joined afterwards.

    A row that is not cut has a cluster of thread blocks, each of which reads the tables of all.
    With many rows that costs more than joining lists: selecting from 2^25 ranks took 75 us with one
    thread block for each row, 110 with two, 215 with eight (H200). Rows of 131,072 took 86 in four
    parts of 1,024 threads each, 106 in eight of 512.
    """
    parts = cdiv(min(columns, COLUMNS), PART)
    return parts if rows >= (MANY if parts > 2 else select_sm90.MANY) else 1


def _best(
    ranks: Array,
    starts: Array | None,
    ends: Array,
    origins: Array | None = None,
    *,
    k: int,
    places: Array | None = None,
    row: Array | None = None,
    into: Array | None = None,
    ranked: bool = False,
) -> Any:
    """``select_sm90.select`` of any number of columns; of some rows places are those of all."""
    rest = -ranks.shape[1] % 4
    if rest:  # of lists; no row sees these columns, and none is chosen
        ranks = jnp.pad(ranks, ((0, 0), (0, rest)), constant_values=NO_CANDIDATE)
        places = None if places is None else jnp.pad(places, ((0, 0), (0, rest)))
    shape = select_sm90.shape_of(ranks.shape[1], len(ranks))
    given = ranks, starts, ends, origins, places, row, into
    whole = row is not None and not ranked
    return select_sm90.select(*given, k=k, shape=shape, ranked=ranked, whole=whole)


def _lists(
    ranks: Array, starts: Array | None, ends: Array, origins: Array | int,
    row: Array | None = None, *,
    parts: int, k: int,
) -> tuple[Int[Array, "rows lists"], Int[Array, "rows lists"]]:  # fmt: skip
    """Ranks and places of the best ``k`` of each part of a row, one list behind the other.

    A part with fewer has ``NO_CANDIDATE`` and -1 behind them. Places are counted from ``origins``.
    The rows are those from ``row`` on of ``starts``, ``ends`` and ``origins``.
    """
    rows, width = len(ranks), ranks.shape[1] // parts
    low = width * jnp.arange(parts, dtype=jnp.int32)
    first = jnp.zeros_like(ends) if starts is None else jnp.maximum(starts, 0)
    a, b = (jnp.clip(x[:, None] - low, 0, width).reshape(-1) for x in (first, ends))
    origins = ((origins + jnp.zeros_like(ends))[:, None] - low).reshape(-1)
    flat = ranks.reshape(rows * parts, width)
    first = None if row is None else row * parts
    places, found = _best(flat, a, b, origins, row=first, k=k, ranked=True)
    return found.reshape(rows, parts * k), places.reshape(rows, parts * k)
