"""Rows in order of their experts, cut into tiles: what a plan of many rows says.

The rows of an expert are rounded up to a multiple of ``step`` and divided as equally as possible
into tiles of at most ``most`` rows, of which there are a multiple of ``cluster``: a tile may have
no rows.
"""

from typing import NamedTuple

import jax.numpy as jnp

from mla_jax.pallas.axes import Choices
from mla_jax.types import Array, Int, cdiv

__all__ = [
    "CHOICE",
    "EIGHT",
    "EXPERT",
    "FIELDS",
    "FIRST",
    "ROW",
    "TOGETHER",
    "Plan",
    "lay_out",
    "most_rows",
    "most_tiles",
]

EXPERT, FIRST, TOGETHER, ROW, CHOICE = range(5)
FIELDS = 8
"""Numbers of a tile: its expert (-1: no tile), the first tile of its group, how many those are,
its first row, and which multiple of ``step`` its rows are, from 0 on; -1: it has none."""

EIGHT = 8
"""Rows in which ``ROW`` counts: copies of tiles begin at multiples of it."""


class Plan(NamedTuple):
    """Where each choice's row is, and the tiles of all rows."""

    places: Int[Array, "tokens topk"]  # -1: an index that is no expert
    table: Int[Array, "tiles fields"]
    used: Int[Array, "one"]  # how many tiles there are


def most_rows(pairs: int, experts: int, step: int) -> int:
    """Rows that any choice of experts can need."""
    return cdiv(pairs + min(experts, pairs) * (step - 1), step) * step


def most_tiles(pairs: int, experts: int, *, step: int, most: int, cluster: int = 1) -> int:
    """Tiles that any choice of experts can need."""
    return cluster * (most_rows(pairs, experts, step) // (cluster * most) + min(experts, pairs))


def lay_out(
    experts: Choices, count: int, *, step: int, most: int, group: int, cluster: int = 1
) -> Plan:
    """The definition: pairs in order of expert, then token, then choice."""
    flat = experts.reshape(-1)
    real = (flat >= 0) & (flat < count)
    chosen = (flat[:, None] == jnp.arange(count)).astype(jnp.int32)  # [pairs, experts]
    units = (chosen.sum(axis=0) + step - 1) // step
    base = (jnp.cumsum(units) - units) * step
    rank = (jnp.cumsum(chosen, axis=0) * chosen).sum(axis=1) - 1
    places = jnp.where(real, base[jnp.clip(flat, 0, count - 1)] + rank, -1)

    large = cluster * most // step
    needed = (units + large - 1) // large * cluster
    ends = jnp.cumsum(needed)
    t = jnp.arange(most_tiles(flat.size, count, step=step, most=most, cluster=cluster))
    e = jnp.searchsorted(ends, t, side="right")
    there, e = e < count, jnp.minimum(e, count - 1)
    tiles = jnp.maximum(needed[e], 1)
    first = ends[e] - tiles
    local, each, more = t - first, units[e] // tiles, units[e] % tiles
    head = local // group * group
    unit = jnp.minimum(local * each + jnp.minimum(local, more), jnp.maximum(units[e] - 1, 0))
    fields = [
        e,
        first + head,
        jnp.minimum(tiles - head, group),
        (base[e] + step * unit) // EIGHT,
        each + (local < more).astype(jnp.int32) - 1,
    ]
    table = jnp.where(there[:, None], jnp.stack(fields, axis=1), -1)
    table = jnp.pad(table, ((0, 0), (0, FIELDS - len(fields))))
    return Plan(places.reshape(experts.shape), table.astype(jnp.int32), ends[-1:].astype(jnp.int32))
