"""The best of rows of ranks on Hopper: of a row at once, of parts, or of one chunk after another.

Of both backends: ``mosaic`` and ``triton`` make ranks of the same order.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.topk import select_sm90
from mla_jax.types import Array, Int, cdiv, round_up

__all__ = ["COLUMNS", "MANY", "PART", "select"]

COLUMNS = 1 << 17
"""Of a row that are scored and selected together, at most."""

PART, MANY = 1 << 14, 64
"""Columns of a thread block of the selection; rows from which on more of them are in parts."""

NONE = -(2**31)
"""Rank of what is no candidate."""


def select(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"] | None,
    ends: Int[Array, "rows"],
    longest: int,
    *,
    k: int,
) -> Int[Array, "rows {k}"]:
    """Places from ``starts`` (or 0) on of the best; ``ranks(base, columns)`` is a workspace.

    Of more than ``COLUMNS`` these are scored at a time, and their best joined with the best so far.
    """
    at = jnp.arange(k, dtype=jnp.int32)
    first = 0 if starts is None else jnp.clip(starts, 0, longest)
    lens = (jnp.clip(ends, 0, longest) - first)[:, None]
    everything = jnp.where(at < lens, at, -1)
    if not len(ends) or longest <= k:
        return everything
    zero = jnp.zeros_like(ends, shape=())
    parts = _parts(len(ends), longest)
    if longest <= COLUMNS:
        found = ranks(zero, round_up(longest, 16 * parts))
        if parts == 1:
            return _best(found, starts, ends, k=k)
        places = _best_of_parts(found, starts, ends, parts=parts, k=k)
        return jnp.where(lens > k, places, everything)
    first = first + jnp.zeros_like(ends)

    def chunk(i: Array, old: tuple[Array, Array]) -> tuple[Array, Array]:
        base = i * COLUMNS
        a, b = (jnp.clip(x - base, 0, COLUMNS) for x in (first, ends))
        found = ranks(base, COLUMNS)
        new = _best_of_parts(found, a, b, parts=parts, k=k)
        new = jnp.where(new >= 0, new + a[:, None], -1)
        lists = _taken(found, new, NONE), jnp.where(new >= 0, new + base, -1)
        both = [jnp.concatenate(pair, axis=1) for pair in zip(old, lists, strict=True)]
        both = [jnp.pad(x, ((0, 0), (0, -2 * k % 4))) for x in both]
        at = _best(both[0], None, jnp.full_like(a, 2 * k), k=k)
        return _taken(both[0], at, NONE), _taken(both[1], at, -1)

    none = jnp.full_like(ends, NONE, shape=(len(ends), k))
    turns = (jnp.clip(jnp.max(ends), 0, longest) + COLUMNS - 1) // COLUMNS
    _, places = lax.fori_loop(zero, turns, chunk, (none, jnp.full_like(none, -1)))
    return jnp.where(lens > k, places - first[:, None], everything)


def _parts(rows: int, columns: int) -> int:
    """The number of parts that a row is cut into; the lists of its parts are joined afterwards.

    A row that is not cut has a cluster of thread blocks, each of which reads the tables of all.
    With many rows that costs more than joining lists: selecting from 2^25 ranks took 75 us with one
    thread block for each row, 110 with two, 215 with eight (H200).
    """
    columns = min(columns, COLUMNS)
    if rows < MANY or columns <= 2 * PART:
        return 1
    return cdiv(columns, PART)


def _best(ranks: Array, starts: Array | None, ends: Array, *, k: int) -> Array:
    shape = select_sm90.shape_of(ranks.shape[1])
    return select_sm90.select(ranks, starts, ends, k=k, shape=shape)


def _best_of_parts(
    ranks: Array, starts: Array | None, ends: Array, *, parts: int, k: int
) -> Int[Array, "rows {k}"]:
    """``_best``, by the lists of equal parts of each row; -1 anywhere in a row that sees fewer."""
    if parts == 1:
        return _best(ranks, starts, ends, k=k)
    rows, width = len(ranks), ranks.shape[1] // parts
    low = width * jnp.arange(parts, dtype=jnp.int32)
    first = jnp.zeros_like(ends) if starts is None else jnp.maximum(starts, 0)
    a, b = (jnp.clip(x[:, None] - low, 0, width) for x in (first, ends))
    flat = ranks.reshape(rows * parts, width)
    found = _best(flat, a.reshape(-1), b.reshape(-1), k=k).reshape(rows, parts, k)
    at = jnp.where(found >= 0, found + (a + low)[..., None], -1).reshape(rows, parts * k)
    at = jnp.pad(at, ((0, 0), (0, -parts * k % 4)), constant_values=-1)
    chosen = _best(_taken(ranks, at, NONE), None, jnp.full_like(ends, parts * k), k=k)
    found = _taken(at, chosen, -1)
    return jnp.where(found >= 0, found - first[:, None], -1)


def _taken(x: Array, at: Array, none: int) -> Array:
    """``x`` of each row at these columns; -1 is ``none``."""
    found = jnp.take_along_axis(x, jnp.maximum(at, 0), axis=1)
    return jnp.where(at >= 0, found, none)
