"""Reference indexer scores over a paged key cache."""

import jax
import jax.numpy as jnp

from mla_jax.pallas.cache_io.records import from_e4m3, split_index_pages
from mla_jax.types import Array, Float, Int, UInt8

__all__ = ["paged_index_logits"]


def paged_index_logits(
    q_codes: UInt8[Array, "requests queries heads dim"],
    weights: Float[Array, "requests queries heads"],
    pages: UInt8[Array, "pages page_bytes"],
    row_lens: Int[Array, "requests queries"],
    page_table: Int[Array, "requests width"],
    *,
    page: int,
) -> Float[Array, "requests queries keys"]:
    """``scale[p] * sum_h w[h] * relu(q[h] . k[p])`` for ``p < row_len``, else ``-inf``.

    ``keys = width * page``. Query scales are folded into ``weights``. float32 accumulation.
    Source: spec "Indexer", scores; DeepSeek-V3.2-Exp report, section 2.1.
    """
    dim = q_codes.shape[-1]
    codes, scales = split_index_pages(pages, page=page, dim=dim)
    q = from_e4m3(q_codes)

    def one(q: Array, w: Array, lens: Array, table: Array) -> Array:
        slot = (jnp.clip(table, 0, pages.shape[0] - 1)[:, None] * page + jnp.arange(page)).ravel()
        seen = jnp.arange(slot.shape[0]) < lens[:, None]  # [queries, keys]
        used = seen.any(axis=0)
        k = jnp.where(used[:, None], from_e4m3(codes[slot]), 0.0)
        dots = jnp.einsum("qhd,kd->qhk", q, k, precision="highest")
        score = jnp.einsum("qhk,qh->qk", jax.nn.relu(dots), w, precision="highest")
        return jnp.where(seen, score * jnp.where(used, scales[slot], 0.0), -jnp.inf)

    return jax.vmap(one)(q, weights, row_lens, page_table)
