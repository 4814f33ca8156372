"""Selection on Hopper over e4m3 codes: scores by Mosaic GPU, the best of each row in Triton.

``indexer/scores_sm90`` scores, ``triton.select`` takes a chunk's workspace after the other.
"""

import jax.numpy as jnp
from jax import lax

from mla_jax.cache import RecordCache
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.pallas.topk import triton
from mla_jax.types import Array, Float, Int, cdiv, round_up

__all__ = ["DECODE", "PREFILL", "select_decode", "select_prefill"]

_SIZES = {"dim": OneOf(128), "heads": OneOf(8, 16, 32, 64)}

DECODE = Requirement(
    sm=OneOf(90),
    features={
        "dtype+cache": OneOf("float8_e4m3fn+index_key"),
        **_SIZES,
        "queries": Within(high=4),
        "page": OneOf(64),
    },
    packages=("triton",),
)

PREFILL = Requirement(
    sm=OneOf(90),
    features={"dtype": OneOf("float8_e4m3fn"), "keys_dtype": OneOf("float8_e4m3fn"), **_SIZES},
    packages=("triton",),
)

QUERIES = 128
"""Of a thread block over gathered keys, about."""

WAVES, LEAST = 4, 8
"""Turns of all multiprocessors that thread blocks over pages may take, if that leaves fewer idle
and a warpgroup then has ``LEAST`` pages."""


def select_decode(
    q: Float[Array, "rows queries heads dim"],
    weights: Float[Array, "rows queries heads"],
    cache: RecordCache,
    page_table: Int[Array, "rows width"],
    lens: Int[Array, "rows queries"],
    *,
    k: int,
    layer: Int[Array, ""] | None = None,
) -> Int[Array, "rows queries {k}"]:
    """``xla.select_decode``."""
    from mla_jax.pallas.indexer import scores_sm90 as scores

    rows, queries, heads, _ = q.shape
    width, page, sms = page_table.shape[1], cache.page, DeviceInfo.current().sms
    lens = jnp.clip(lens, 0, width * page)
    longest = jnp.max(jnp.where(lens > k, lens, 0), axis=1)
    pages = cache.pages.reshape(cache.layers or 1, cache.num_pages, -1)
    number = jnp.zeros((), jnp.int32) if layer is None else layer
    flat = lens.reshape(-1)
    side = _side(weights.reshape(-1, heads), flat, multiple=scores.SIDE)

    def ranks(base: Array, columns: int) -> Array:
        span = _span(rows, cdiv(columns, scores.STREAMS * page), scores.RESIDENT * sms)
        return scores.paged_ranks(
            q, side, pages, page_table, longest, number, base,
            columns=columns, span=span,
        )  # fmt: skip

    chosen = triton.select(ranks, jnp.zeros_like(flat), flat, width * page, k=k)
    return chosen.reshape(rows, queries, k)


def _span(rows: int, blocks: int, workers: int) -> int:
    """Of a row's ``blocks`` those of one thread block, such that few ``workers`` are idle."""
    spans = [cdiv(blocks, max(waves * workers // rows, 1)) for waves in range(1, WAVES + 1)]

    def used(span: int) -> float:
        items = rows * cdiv(blocks, span)
        return rows * blocks / (cdiv(items, workers) * workers * span)

    return max((n for n in spans if n >= LEAST), key=used, default=spans[0])


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
    from mla_jax.pallas.indexer import scores_sm90 as scores

    queries, count, sms = q.shape[0], keys.shape[0], DeviceInfo.current().sms
    starts, ends = (jnp.clip(x, 0, count) for x in (starts, ends))
    scales = jnp.ones((count,), jnp.float32) if scales is None else scales
    rest = round_up(count, 8) - count
    keys, scales = jnp.pad(keys, ((0, rest), (0, 0))), jnp.pad(scales, (0, rest))
    side = _side(weights, ends, multiple=scores.SIDE)

    def ranks(base: Array, columns: int) -> Array:
        tiles = cdiv(columns, scores.KEYS)
        waves = max(round(queries * tiles / (sms * QUERIES)), 1)
        some = 2 * cdiv(queries * tiles, 2 * sms * waves)
        rows = jnp.arange(cdiv(queries, some) * some) < queries
        pad = (0, len(rows) - queries)
        scored = rows & jnp.pad(ends - starts > k, pad)
        low = jnp.where(scored, jnp.pad(starts, pad), count).reshape(-1, some).min(axis=1)
        high = jnp.where(scored, jnp.pad(ends, pad), 0).reshape(-1, some).max(axis=1)
        return scores.gathered_ranks(
            q, side, keys, scales, jnp.stack([low, high], axis=1), base,
            columns=columns, queries=some,
        )  # fmt: skip

    return triton.select(ranks, starts, ends, count, k=k)


def _side(
    weights: Float[Array, "queries heads"], ends: Int[Array, "queries"], *, multiple: int
) -> Int[Array, "queries words"]:
    """Words of each query: halves of its weights, its end, then what is not read."""
    halves = lax.bitcast_convert_type(0.5 * weights.astype(jnp.float32), jnp.int32)
    if (heads := weights.shape[1]) > 8:  # what a thread reads together, of two tiles of a product
        halves = halves.reshape(-1, heads // 16, 2, 4, 2).swapaxes(2, 3).reshape(-1, heads)
    rest = round_up(halves.shape[1] + 1, multiple) - halves.shape[1]
    return jnp.concatenate([halves, jnp.broadcast_to(ends[:, None], (len(ends), rest))], axis=1)
