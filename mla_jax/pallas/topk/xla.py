"""Selection on every device: blocks of keys are scored one after the other, the best kept.

A step of the loop scores ``BLOCK`` keys and sorts them with the best ``k`` so far. Its workspace is
``queries * (heads * BLOCK + 2 * k)`` words, whatever the context's length. The result is that of
``ref.best_positions`` over all scores at once.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.cache_io.records import gather_rows
from mla_jax.pallas.indexer.ref import indexer_logits
from mla_jax.types import Array, Float, Int, full_among, round_up

__all__ = ["BLOCK", "select_decode", "select_prefill"]

BLOCK = 256
"""Keys of one step."""

_NONE = jnp.iinfo(jnp.int32).min
"""Rank of what a query does not see: below every score's."""


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
    """``best_positions(indexer_logits(q, weights, keys), lens)`` over each row's own pages."""
    page, longest = cache.page, page_table.shape[1] * cache.page
    if not (longest and lens.size):
        return jnp.full((*lens.shape, k), -1, jnp.int32)

    def keys(i: Array) -> Array:
        p = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        column = jnp.minimum(p // page, page_table.shape[1] - 1)
        slots = jnp.where(p < longest, page_table[:, column] * page + p % page, -1)
        return gather_rows(cache, slots, dtype=jnp.float32, layer=layer)

    last = jnp.clip(lens, 0, longest)
    return _select(q, weights, keys, jnp.zeros_like(last), last, k=k)


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
    """The same over gathered keys, of which a query sees ``starts`` to ``ends``.

    Positions count from the query's own ``starts``. Keys may be codes, with a scale each.
    """
    rows = keys.shape[0]
    if scales is not None:
        keys = keys.astype(jnp.float32) * scales[:, None]
    keys = jnp.pad(keys, ((0, round_up(rows, BLOCK) - rows), (0, 0)))

    def block(i: Array) -> Array:
        return lax.dynamic_slice_in_dim(keys, i * BLOCK, BLOCK)[None]

    bounds = (jnp.clip(x, 0, rows)[None] for x in (starts, ends))
    return _select(q[None], weights[None], block, *bounds, k=k)[0]


def _select(
    q: Float[Array, "rows queries heads dim"],
    weights: Float[Array, "rows queries heads"],
    keys: Callable[[Array], Array],
    first: Int[Array, "rows queries"],
    last: Int[Array, "rows queries"],
    *,
    k: int,
) -> Int[Array, "rows queries {k}"]:
    """Positions from ``first`` on of the best columns below ``last``; ``keys(i)`` is a block."""
    nothing = full_among((q, weights, keys(jnp.int32(0))), (), 0.0).astype(jnp.int32)
    lens = last - first + nothing  # differs between devices where any of them does
    at = jnp.arange(k, dtype=jnp.int32)

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        column = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = (column >= first[..., None]) & (column < last[..., None])
        block = jnp.where(seen.any(axis=1)[..., None], keys(i), 0.0)
        ranks = jnp.where(seen, _rank(indexer_logits(q, weights, block)), _NONE)
        # What came before lies at lower positions and first, so it wins among equals.
        ranks = jnp.concatenate([best[0], ranks], axis=-1)
        columns = jnp.concatenate([best[1], jnp.broadcast_to(column, seen.shape)], axis=-1)
        ranks, chosen = lax.top_k(ranks, k)
        return ranks, jnp.take_along_axis(columns, chosen, axis=-1)

    def scored() -> Array:
        begin = jnp.full_like(lens, _NONE, shape=(*lens.shape, k))
        blocks = jnp.max(last, initial=0) + BLOCK - 1
        low = jnp.min(jnp.where(lens > 0, first, last.max(initial=0)), initial=2**31 - 1)
        ranks, columns = lax.fori_loop(low // BLOCK, blocks // BLOCK, step, (begin, begin))
        return jnp.where(ranks > _NONE, columns - first[..., None], 2**31 - 1)

    def everything() -> Array:
        return jnp.where(at < lens[..., None], at, 2**31 - 1)

    longest = jnp.max(lens, initial=0)
    chosen = jnp.where(lens[..., None] > k, lax.cond(longest > k, scored, everything), everything())
    chosen = jnp.sort(chosen, axis=-1)
    return jnp.where(chosen < 2**31 - 1, chosen, -1)


def _rank(scores: Float[Array, "*axes"]) -> Int[Array, "*axes"]:
    """int32 in the order of the scores: 0 and -0 are equal, NaN is the lowest above ``_NONE``."""
    scores = jnp.where(scores == 0, 0.0, scores)
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jnp.where(jnp.isnan(scores), _NONE + 1, ordered)
