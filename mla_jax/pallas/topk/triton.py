"""Selection in Triton: scores of a chunk of keys into a workspace, then the best of each row.

    ranks      scores as integers of the same order, tensor cores      [rows, columns]
    keep_best  radix selection among the best so far and the chunk      [rows, k], in order of place

The workspace has ``WORKSPACE`` elements, or 1,024 for each row where these are more, whatever the
context's length; few rows have all of it in one chunk. Ranks keep the order of scores exactly and
places ascend, so equal scores go to the lower position, and no chunk changes a result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, Float, Int, cdiv, power_of_two, round_up

__all__ = ["DECODE", "PREFILL", "select_decode", "select_prefill"]

DECODE = Requirement(
    sm=Within(low=89),  # products of e4m3
    features={
        "dtype+cache": OneOf("bfloat16+bf16", "float16+fp16", "float8_e4m3fn+index_key"),
        "dim": OneOf(64, 128),
        "queries": Within(high=8),
    },
    packages=("triton",),
)

PREFILL = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float8_e4m3fn"),
        "keys_dtype": OneOf("bfloat16", "float16"),
        "dim": OneOf(64, 128),
    },
    packages=("triton",),
)

WORKSPACE = 1 << 25
"""Elements of one chunk's ranks: 128 MiB."""

KEYS, HEADS, QUERIES = 128, 64, 16
"""Of a program of scores: keys, heads of a product, and queries of gathered keys."""

STEP = 1024
"""Ranks that a selection takes at once."""


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
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.indexer import kernels_triton as kernels

    rows, queries, heads, dim = q.shape
    width, records = page_table.shape[1], isinstance(cache, RecordCache)
    lens = jnp.clip(lens, 0, width * cache.page)
    number = jnp.zeros((), jnp.int32) if layer is None else layer

    def ranks(base: Array, columns: int) -> Array:
        return triton_lib.call(
            kernels.paged_ranks,
            q, weights, cache.pages, page_table, lens, number, base,
            out=jax.ShapeDtypeStruct((rows * queries, columns), jnp.int32),
            grid=rows * (columns // KEYS),
            warps=4,
            stages=2,
            SIZES=(rows, queries, heads, dim, width, k),
            CACHE=(
                cache.layers or 1,
                cache.num_pages,
                cache.page,
                cache.pages.shape[-1] * (1 if records else cache.page),
            ),
            TILE=(KEYS, _heads(heads), columns),
            RECORDS=records,
        )  # fmt: skip

    flat = lens.reshape(-1)
    chosen = _select(ranks, jnp.zeros_like(flat), flat, width * cache.page, k=k)
    return chosen.reshape(rows, queries, k)


def select_prefill(
    q: Float[Array, "queries heads dim"],
    weights: Float[Array, "queries heads"],
    keys: Float[Array, "keys dim"],
    starts: Int[Array, "queries"],
    ends: Int[Array, "queries"],
    *,
    k: int,
) -> Int[Array, "queries {k}"]:
    """``xla.select_prefill``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.indexer import kernels_triton as kernels

    (queries, heads, dim), count = q.shape, keys.shape[0]
    starts, ends = (jnp.clip(x, 0, count) for x in (starts, ends))

    def ranks(base: Array, columns: int) -> Array:
        return triton_lib.call(
            kernels.gathered_ranks,
            q, weights, keys, starts, ends, base,
            out=jax.ShapeDtypeStruct((queries, columns), jnp.int32),
            grid=cdiv(queries, QUERIES) * (columns // KEYS),
            warps=4,
            stages=2,
            SIZES=(queries, heads, dim, count, k),
            TILE=(KEYS, _heads(heads), QUERIES, columns),
        )  # fmt: skip

    return _select(ranks, starts, ends, count, k=k)


def _heads(heads: int) -> int:
    """Of one product."""
    return min(HEADS, max(power_of_two(heads), 16))


def _select(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"],
    ends: Int[Array, "rows"],
    longest: int,
    *,
    k: int,
) -> Int[Array, "rows {k}"]:
    """Places from ``starts`` on of the best; ``ranks(base, columns)`` is a chunk's workspace."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.topk import kernels_triton as kernels

    rows, lens = starts.shape[0], ends - starts
    at = jnp.arange(k, dtype=jnp.int32)
    everything = jnp.where(at < lens[:, None], at, -1)
    if not rows or longest <= k:
        return everything
    fits = max(WORKSPACE // rows // STEP * STEP, STEP)
    columns = min(round_up(longest, STEP), fits)

    def chunk(i: Array, best: Any) -> Any:
        base = jnp.asarray(i, jnp.int32) * columns
        out = jax.ShapeDtypeStruct((rows, k), jnp.int32)
        return triton_lib.call(
            kernels.keep_best,
            *best, ranks(base, columns), starts, ends, base,
            out=(out, out),
            grid=rows,
            warps=8,
            stages=2,
            K=k,
            COLUMNS=columns,
            STEP=STEP,
        )  # fmt: skip

    best = jnp.full_like(lens, -1, shape=(rows, k)), jnp.full_like(lens, -1, shape=(rows, k))
    if columns >= longest:
        best = chunk(jnp.zeros_like(lens, shape=()), tuple(best))
    else:
        wanted = jnp.max(jnp.where(lens > k, ends, 0))
        best = lax.fori_loop(0, (wanted + columns - 1) // columns, chunk, tuple(best))
    return jnp.where(lens[:, None] > k, best[1], everything)
