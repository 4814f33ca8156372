"""Definition of expanded attention: a ragged batch of per-head queries and keys."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.pallas.axes import KeyValues, Queries, RopeKeys, Starts
from mla_jax.types import Array, AttnState, Int

__all__ = ["dense_prefill", "key_spans"]


def key_spans(
    query_starts: Starts, key_starts: Starts, *, tokens: int, keys: int, causal: bool
) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"]]:
    """Keys ``[begin, end)`` that each token sees; ``(0, 0)`` on padding.

    Query ``j`` of ``n`` sees key ``i`` of ``m`` if ``i - m <= j - n`` (bottom-right), or all
    ``m`` without ``causal``.
    """
    t = jnp.arange(tokens, dtype=query_starts.dtype)
    owner = jnp.searchsorted(query_starts[1:], t, side="right")
    real = (owner < query_starts.shape[0] - 1) & (t >= query_starts[0])
    r = jnp.where(real, owner, 0)
    begin, end = key_starts[r], key_starts[r + 1]
    if causal:
        end = jnp.maximum(begin, end - (query_starts[r + 1] - 1 - t))
    return jnp.where(real, begin, 0), jnp.where(real, jnp.minimum(end, keys), 0)


def dense_prefill(
    q: Queries, kv: KeyValues, k_rope: RopeKeys, query_starts: Starts, key_starts: Starts, *,
    scale: float, causal: bool, out_dtype: DTypeLike,
) -> AttnState:  # fmt: skip
    """``out = softmax(scale * q [k_nope | k_rope]^T) v`` per request, with ``kv = [k_nope | v]``.

    ``nope = qk - rope``. A query without keys gives ``(0, -inf)``. A value that is not finite
    spoils the queries that see it, and no others. ``xla.dense_prefill`` needs less memory.
    """
    keys, nope = kv.shape[0], q.shape[2] - k_rope.shape[1]
    einsum = functools.partial(jnp.einsum, precision="highest")
    begin, end = key_spans(query_starts, key_starts, tokens=len(q), keys=keys, causal=causal)
    at = jnp.arange(keys)
    seen = (begin[:, None] <= at) & (at < end[:, None])  # [tokens, keys]
    q, kv, k_rope = (x.astype(jnp.float32) for x in (q, kv, k_rope))
    k, v = kv[..., :nope], kv[..., nope:]
    s = einsum("thd,khd->htk", q[..., :nope], k)
    s = scale * (s + einsum("thd,kd->htk", q[..., nope:], k_rope))
    s = jnp.where(jnp.isfinite(v).all(axis=-1).T[:, None], s, jnp.nan)
    lse = jax.nn.logsumexp(s, axis=-1, where=seen)
    w = jnp.where(seen, jnp.exp(s - lse[..., None]), 0.0)
    out = einsum("htk,khd->thd", w, jnp.where(jnp.isfinite(v), v, 0.0))
    return AttnState(out=out.astype(out_dtype), lse=lse.T)
