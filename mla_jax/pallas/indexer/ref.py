"""Definition of the indexer's scores, the codes of its queries, and scores over paged keys."""

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.cache import RECORD_FORMATS
from mla_jax.formats import ScaleRule, to_codes
from mla_jax.pallas.axes import PageTable
from mla_jax.types import Array, Float, Int, UInt8

__all__ = ["QUERY_SCALES", "indexer_logits", "paged_index_logits", "quantise_queries"]

QUERY_SCALES = ScaleRule(name="power_of_two", power_of_two=True, floor=1e-10, floor_of="amax")
"""Of a query head's e4m3 codes; it goes into the head's weight."""


def indexer_logits(
    q: Float[Array, "*batch queries heads dim"],
    weights: Float[Array, "*batch queries heads"],
    keys: Float[Array, "*batch keys dim"],
) -> Float[Array, "*batch queries keys"]:
    """``score[i, j] = sum_h weights[i, h] * relu(q[i, h] . keys[j])`` in float32.

    Weights may be negative, so may scores. Differentiable.
    Source: DeepSeek-V3.2-Exp report, section 2.1.
    """
    q, weights, keys = (x.astype(jnp.float32) for x in (q, weights, keys))
    dots = jnp.einsum("...qhd,...kd->...qhk", q, keys, precision="highest")
    return jnp.einsum("...qhk,...qh->...qk", jax.nn.relu(dots), weights, precision="highest")


def quantise_queries(
    q: Float[Array, "*tokens heads dim"], weights: Float[Array, "*tokens heads"]
) -> tuple[Float[Array, "*tokens heads dim"], Float[Array, "*tokens heads"]]:
    """``(e4m3(q / s), weights * s)`` with a power of two ``s`` for each head of each token."""
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    s = QUERY_SCALES.choose(jnp.max(jnp.abs(q.astype(jnp.float32)), axis=-1), largest)
    return to_codes(q, s[..., None], "float8_e4m3fn"), weights.astype(jnp.float32) * s


def paged_index_logits(
    q_codes: UInt8[Array, "requests queries heads dim"],
    weights: Float[Array, "requests queries heads"], pages: UInt8[Array, "pages page_bytes"],
    row_lens: Int[Array, "requests queries"], page_table: PageTable, *, page: int,
) -> Float[Array, "requests queries keys"]:  # fmt: skip
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
        score = indexer_logits(q, w, jnp.where(used[:, None], k, 0.0))
        return jnp.where(seen, score * jnp.where(used, scales[ids].ravel(), 0.0), -jnp.inf)

    return jax.vmap(one)(q, weights, row_lens, page_table)
