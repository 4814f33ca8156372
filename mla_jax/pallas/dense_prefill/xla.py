"""Expanded attention on any device: ``ref.dense_prefill`` in tiles, small in memory."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.pallas.axes import KeyValues, Queries, RopeKeys, Starts
from mla_jax.pallas.dense_prefill.ref import key_spans
from mla_jax.types import Array, AttnState, cdiv, full_among

__all__ = ["dense_prefill"]

TILE = 128
"""Queries of one tile and keys of one step."""


def dense_prefill(
    q: Queries, kv: KeyValues, k_rope: RopeKeys, query_starts: Starts, key_starts: Starts, *,
    scale: float, causal: bool, out_dtype: DTypeLike,
) -> AttnState:  # fmt: skip
    """``out = softmax(scale * q [k_nope | k_rope]^T) v`` per request, with ``kv = [k_nope | v]``.

    ``nope = qk - rope``. A query without keys, and every token behind ``query_starts[-1]``,
    gives ``(0, -inf)``. Float32 inside; memory grows with ``tokens + keys``, not their
    product; key tiles that no query of a tile sees are skipped. Reverse-differentiable.
    """
    tokens, heads, qk = q.shape
    keys, _, nope_v = kv.shape
    rope = k_rope.shape[1]
    nope = qk - rope
    v = nope_v - nope
    if not (tokens and keys and query_starts.shape[0] > 1):
        return AttnState(
            out=jnp.zeros((tokens, heads, v), out_dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    f32 = {"precision": "highest", "preferred_element_type": jnp.float32}
    begin, end = key_spans(query_starts, key_starts, tokens=tokens, keys=keys, causal=causal)
    # Selecting before the arithmetic keeps rubbish of padded rows out of it, and out of
    # every gradient.
    q = jnp.where((begin < end)[:, None, None], q, 0)
    owned = jnp.arange(keys, dtype=key_starts.dtype) < key_starts[-1]
    kv = jnp.where(owned[:, None, None], kv, 0)
    k_rope = jnp.where(owned[:, None], k_rope, 0)

    rows, cols = min(TILE, tokens), min(TILE, keys)
    q_tiles, begins, ends = (_tiles(x, rows) for x in (q, begin, end))
    kv_tiles, rope_tiles = _tiles(kv, cols), _tiles(k_rope, cols)
    key_tiles = (
        jnp.arange(cdiv(keys, cols), dtype=begin.dtype) * cols,
        kv_tiles,
        rope_tiles,
    )

    @jax.checkpoint
    def query_tile(tile):
        q, begin, end = tile  # [rows, heads, qk], [rows], [rows]
        q = scale * q.astype(jnp.float32)
        some = begin < end
        low = jnp.min(jnp.where(some, begin, keys))
        high = jnp.max(jnp.where(some, end, 0))

        def attend(carry, first, kv, k_rope):
            top, total, acc = carry
            kv, k_rope = kv.astype(jnp.float32), k_rope.astype(jnp.float32)
            s = jnp.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope], **f32)
            if rope:
                s = s + jnp.einsum("qhd,kd->hqk", q[..., nope:], k_rope, **f32)
            key = first + jnp.arange(cols, dtype=first.dtype)
            # A value that is not finite spoils the queries that see it, and no others.
            v_tile = kv[..., nope:]
            spoilt = ~jnp.isfinite(v_tile).all(axis=-1).T[:, None]  # [heads, 1, keys]
            s = jnp.where(spoilt, jnp.nan, s)
            s = jnp.where((begin[:, None] <= key) & (key < end[:, None]), s, -jnp.inf)
            new_top = jnp.maximum(top, lax.stop_gradient(jnp.max(s, axis=-1)))
            safe = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            w = jnp.exp(s - safe[..., None])
            shrink = jnp.exp(top - safe)
            v_tile = jnp.where(jnp.isfinite(v_tile), v_tile, 0.0)
            value = jnp.einsum("hqk,khd->hqd", w, v_tile, **f32)
            total = total * shrink + jnp.sum(w, axis=-1)
            return new_top, total, acc * shrink[..., None] + value

        def step(carry, tile):
            first = tile[0]
            needed = (first < high) & (first + cols > low)
            return lax.cond(needed, attend, lambda c, *_: c, carry, *tile), None

        like = q, kv_tiles, rope_tiles, begin
        full = functools.partial(full_among, like, heads=(q, 1, 0))
        start = full((heads, rows), -jnp.inf), full((heads, rows), 0.0), full((heads, rows, v), 0.0)
        (top, total, acc), _ = lax.scan(step, start, key_tiles)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        out = (acc / total[..., None]).astype(out_dtype)
        lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
        return out.swapaxes(0, 1), lse.T

    out, lse = lax.map(query_tile, (q_tiles, begins, ends))
    return AttnState(out=out.reshape(-1, heads, v)[:tokens], lse=lse.reshape(-1, heads)[:tokens])


def _tiles(x: Array, size: int) -> Array:
    """``[n, ...] -> [ceil(n / size), size, ...]``, padded with zeros."""
    n = cdiv(x.shape[0], size)
    x = jnp.pad(x, ((0, n * size - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(n, size, *x.shape[1:])
