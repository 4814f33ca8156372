"""Definition of absorbed decode: attention of a few queries per request over its own pages."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.pallas import axes
from mla_jax.types import AttnState

__all__ = ["dense_decode"]


def dense_decode(
    q_latent: axes.LatentQueries, q_rope: axes.RopeQueries, pages: axes.Pages,
    cache_scale: axes.CacheScale, page_table: axes.PageTable, seq_lens: axes.PerRequest,
    query_starts: axes.Starts, *, max_query_len: int, scale: float, format: CacheFormat,
    out_dtype: DTypeLike, layer: axes.Layer = None,
) -> AttnState:  # fmt: skip
    """``out = softmax(scale * [q_latent | q_rope] row^T) row[:rank]`` over a request's rows.

    Query ``j`` of a request with ``n`` queries sees keys ``p < seq_len - (n - 1 - j)``. Without
    a key, and behind ``query_starts[-1]``, the state is ``(0, -inf)``.
    """
    t, page = jnp.arange(q_latent.shape[0]), pages.shape[-2]
    p = jnp.arange(page_table.shape[1] * page)
    r = jnp.searchsorted(query_starts[1:], t, side="right").clip(0, seq_lens.size - 1)
    visible = jnp.where(t < query_starts[-1], seq_lens[r] - (query_starts[r + 1] - 1 - t), 0)
    at = () if layer is None else (layer.clip(0, pages.shape[0] - 1),)
    rows = pages[*at, page_table[:, p // page].clip(0, pages.shape[-3] - 1), p % page][r]
    seen = p < visible[:, None]  # [tokens, keys]
    k = jnp.where(seen[..., None], format.decode(rows, cache_scale[at]), 0.0)
    q = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32)
    s = scale * jnp.einsum("thd,tkd->thk", q, k, precision="highest")
    lse = jax.nn.logsumexp(s, axis=-1, where=seen[:, None])
    w = jnp.where(seen[:, None], jnp.exp(s - lse[..., None]), 0.0)
    out = jnp.einsum("thk,tkd->thd", w, k[..., : q_latent.shape[-1]], precision="highest")
    return AttnState(out=out.astype(out_dtype), lse=lse)
