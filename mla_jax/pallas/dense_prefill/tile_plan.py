"""The plan of a prefill: which tiles of queries it has, in which order; from lengths alone."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.pallas.axes import Starts
from mla_jax.types import Array, Int

__all__ = [
    "BLOCKS",
    "FIELDS",
    "FIRST_KEY",
    "KEYS",
    "LIVE",
    "OFFSET",
    "ROW",
    "ROWS",
    "PlanFacts",
    "TilePlan",
    "tiles",
]

ROWS = 128
"""Queries of a tile."""

ROW, LIVE, FIRST_KEY, KEYS, OFFSET, BLOCKS = range(6)
FIELDS = 8
"""Columns of ``TilePlan.tiles``; two are unused, so that a tile is one sector of memory."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan was made for, besides lengths: calls with other facts refuse it."""

    tokens: int
    keys: int
    requests: int
    block: int  # keys of one step
    causal: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Tiles of one head, the same for all heads and layers of a step.

    Each tile is ``ROW`` (its first query), ``LIVE`` (how many queries it has), ``FIRST_KEY`` and
    ``KEYS`` of its request, ``OFFSET`` (query ``i`` of the tile sees keys up to ``i + OFFSET``),
    ``BLOCKS`` (how many blocks of keys it reads). Costly ones first; those without keys last.
    """

    facts: PlanFacts = field(metadata={"static": True})
    tiles: Int[Array, "tiles 8"]
    counts: Int[Array, "2"]  # tiles with keys; tiles in all, the rest of the array is unused


def tiles(
    query_starts: Starts, key_starts: Starts, *, tokens: int, keys: int, block: int, causal: bool
) -> TilePlan:
    """Tiles of ``ROWS`` queries, the first of a request at its first query.

    Tokens before and behind all requests form two requests without keys.
    """
    starts = jnp.clip(query_starts.astype(jnp.int32), 0, tokens)
    edges = jnp.concatenate([jnp.zeros((1,), jnp.int32), starts, jnp.full((1,), tokens, jnp.int32)])
    first_key = jnp.clip(key_starts.astype(jnp.int32), 0, keys)
    query_lens = edges[1:] - edges[:-1]
    key_lens = jnp.pad(first_key[1:] - first_key[:-1], 1)
    first_key = jnp.pad(first_key[:-1], 1)

    size = tokens // ROWS + query_lens.shape[0]
    each = (query_lens + ROWS - 1) // ROWS
    ends = jnp.cumsum(each)
    i = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.sum(i[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    exists = owner < ends.shape[0]
    r = jnp.minimum(owner, ends.shape[0] - 1)
    begin = (i - (ends - each)[r]) * ROWS  # first query, from the start of its request
    live = jnp.minimum(query_lens[r] - begin, ROWS)
    offset = key_lens[r] - query_lens[r] + begin
    seen = key_lens[r]
    if causal:
        seen = jnp.clip(offset + live, 0, seen)
    else:
        offset = jnp.full_like(offset, jnp.iinfo(jnp.int32).max // 2)
    blocks = jnp.where(exists, (seen + block - 1) // block, -1)

    # A stable descending sort by counting: XLA's sort would take longer than a layer's slack.
    before = (blocks[None] > blocks[:, None]) | (
        (blocks[None] == blocks[:, None]) & (i[None] < i[:, None])
    )
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    table = jnp.stack([edges[r] + begin, live, first_key[r], key_lens[r], offset, blocks], axis=1)
    table = jnp.pad(table, ((0, 0), (0, FIELDS - table.shape[1])))
    table = jnp.zeros_like(table).at[rank].set(table, unique_indices=True)
    counts = jnp.stack([jnp.sum(blocks > 0), jnp.sum(exists)]).astype(jnp.int32)
    requests = query_starts.shape[0] - 1
    facts = PlanFacts(tokens=tokens, keys=keys, requests=requests, block=block, causal=causal)
    return TilePlan(facts=facts, tiles=table, counts=counts)
