"""Reference indexer scores over a paged key cache."""

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.cache import RECORD_FORMATS
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

    ``pages`` hold ``index_key`` records; ``keys = width * page``. Query scales are folded into
    ``weights``. float32 accumulation.
    Source: spec "Indexer", scores; DeepSeek-V3.2-Exp report, section 2.1.
    """
    record = RECORD_FORMATS["index_key"]
    stored = record.stored(record.split(pages, page=page))
    keys, scales = stored["key"], stored["key_scale"][..., 0]  # [pages, page, dim], [pages, page]
    q = lax.bitcast_convert_type(q_codes, keys.dtype).astype(jnp.float32)

    def one(q: Array, w: Array, lens: Array, table: Array) -> Array:
        ids = jnp.clip(table, 0, pages.shape[0] - 1)
        seen = jnp.arange(ids.shape[0] * page) < lens[:, None]  # [queries, keys]
        used = seen.any(axis=0)
        k = keys[ids].reshape(-1, keys.shape[-1]).astype(jnp.float32)
        dots = jnp.einsum("qhd,kd->qhk", q, jnp.where(used[:, None], k, 0.0), precision="highest")
        score = jnp.einsum("qhk,qh->qk", jax.nn.relu(dots), w, precision="highest")
        return jnp.where(seen, score * jnp.where(used, scales[ids].ravel(), 0.0), -jnp.inf)

    return jax.vmap(one)(q, weights, row_lens, page_table)
