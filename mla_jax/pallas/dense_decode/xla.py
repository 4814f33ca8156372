"""Absorbed decode on any device: ``ref.dense_decode`` a few pages at a time."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.pallas import axes
from mla_jax.types import AttnState, cdiv, full_among

__all__ = ["dense_decode"]

KEYS_PER_STEP = 128
"""Keys of one step of the loop, rounded up to whole pages."""


def dense_decode(
    q_latent: axes.LatentQueries, q_rope: axes.RopeQueries, pages: axes.Pages,
    cache_scale: axes.CacheScale, page_table: axes.PageTable, seq_lens: axes.PerRequest,
    query_starts: axes.Starts, *, max_query_len: int, scale: float, format: CacheFormat,
    out_dtype: DTypeLike, layer: axes.Layer = None,
) -> AttnState:  # fmt: skip
    """``out = softmax(scale * [q_latent | q_rope] row^T) row[:rank]`` over a request's rows.

    Query ``j`` of a request with ``n`` queries sees keys ``p < seq_len - (n - 1 - j)``.
    A query without keys, and every token behind ``query_starts[-1]``, gives ``(0, -inf)``.
    Float32 inside. One gather of ``[requests, block, row]`` per step serves all heads and
    queries. Scores that a query does not see are masked and values that are not finite are left
    out, so rubbish cannot leak.
    """
    tokens, heads, rank = q_latent.shape
    requests, width = page_table.shape
    num_pages, page, _ = pages.shape[-3:]
    if not (tokens and requests and width):
        return AttnState(
            out=jnp.zeros((tokens, heads, rank), out_dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    f32 = {"precision": "highest", "preferred_element_type": jnp.float32}
    in_layer = () if layer is None else (jnp.clip(layer, 0, pages.shape[0] - 1),)
    cache_scale = cache_scale[in_layer]
    columns = min(width, cdiv(KEYS_PER_STEP, page))
    block = columns * page

    j = jnp.arange(max_query_len, dtype=jnp.int32)
    lens = jnp.diff(query_starts)[:, None]
    token = query_starts[:-1, None] + j  # [requests, queries]
    exists = j < lens
    q = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32)
    q = scale * q[jnp.where(exists, token, 0)]  # [requests, queries, heads, row]
    visible = jnp.where(exists, seq_lens[:, None] - (lens - 1 - j), 0)

    def step(i, carry):
        top, total, acc = carry
        column = i * columns + jnp.arange(columns, dtype=jnp.int32)
        ids = page_table[:, jnp.minimum(column, width - 1)]
        rows = pages[*in_layer, jnp.clip(ids, 0, num_pages - 1)].reshape(requests, block, -1)
        p = i * block + jnp.arange(block, dtype=jnp.int32)
        k = format.decode(rows, cache_scale)
        s = jnp.einsum("rqhd,rkd->rqhk", q, k, **f32)
        v = k[..., :rank]
        # A row that is not finite spoils the queries that see it, and no others.
        s = jnp.where(jnp.isfinite(v).all(axis=-1)[:, None, None], s, jnp.nan)
        seen = (p < visible[..., None]) & (p < width * page)  # [requests, queries, block]
        s = jnp.where(seen[:, :, None], s, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        safe = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        w = jnp.exp(s - safe[..., None])
        shrink = jnp.exp(top - safe)
        total = total * shrink + jnp.sum(w, axis=-1)
        value = jnp.einsum("rqhk,rkd->rqhd", w, jnp.where(jnp.isfinite(v), v, 0.0), **f32)
        return new_top, total, acc * shrink[..., None] + value

    like = q, pages, cache_scale, page_table, seq_lens
    full = functools.partial(full_among, like, heads=(q, 2, 2))
    shape = (requests, max_query_len, heads)
    start = full(shape, -jnp.inf), full(shape, 0.0), full((*shape, rank), 0.0)
    longest = jnp.minimum(jnp.max(seq_lens), width * page)
    top, total, acc = jax.lax.fori_loop(0, (longest + block - 1) // block, step, start)

    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = acc / total[..., None]
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    t = jnp.arange(tokens, dtype=jnp.int32)
    r = jnp.searchsorted(query_starts[1:], t, side="right", method="compare_all")
    r = jnp.minimum(r, requests - 1)
    j = t - query_starts[r]
    real = (j >= 0) & (j < jnp.minimum(lens[r, 0], max_query_len))
    at = r, jnp.where(real, j, 0)
    return AttnState(
        out=jnp.where(real[:, None, None], out.astype(out_dtype)[at], 0),
        lse=jnp.where(real[:, None], lse[at], -jnp.inf),
    )
