"""What every step shares: which request a token belongs to, its position, its cache slot.

Requests are in batch order, tokens of one request contiguous and in position order.
``query_starts`` is the exclusive sum of query lengths; padding repeats its last value.
"""

import jax.numpy as jnp

from mla_jax.types import PAD_SLOT, Array, Bool, Int

__all__ = ["slot_mapping", "token_positions", "token_to_request"]


def token_to_request(
    query_starts: Int[Array, "starts"], tokens: int
) -> tuple[Int[Array, "tokens"], Bool[Array, "tokens"]]:
    """``(request of each token, is a real token)``; padding lanes map to request 0.

    ``request[t] = #{i : query_starts[i + 1] <= t}``; zero-length requests are skipped.
    """
    t = jnp.arange(tokens, dtype=jnp.int32)
    real = t < query_starts[-1]
    request = jnp.searchsorted(query_starts[1:], t, side="right").astype(jnp.int32)
    return jnp.where(real, request, 0), real


def token_positions(
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    request: Int[Array, "tokens"],
    real: Bool[Array, "tokens"],
) -> Int[Array, "tokens"]:
    """Absolute position of each token, ``seq_len - query_len + index``; 0 on padding."""
    t = jnp.arange(request.shape[0], dtype=jnp.int32)
    p = t + (seq_lens - query_starts[1:])[request]
    return jnp.where(real, p, 0)


def slot_mapping(
    page_table: Int[Array, "requests pages"],
    request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    real: Bool[Array, "tokens"],
    *,
    page: int,
) -> Int[Array, "tokens"]:
    """``page_table[request, p // page] * page + p % page``; ``PAD_SLOT`` where not real.

    A position outside the table has no slot either, so a wrong length can lose a token but
    never write another request's page.
    """
    column = positions // page
    inside = real & (positions >= 0) & (column < page_table.shape[1])
    page_id = page_table[request, jnp.where(inside, column, 0)]
    return jnp.where(inside, page_id * page + positions % page, PAD_SLOT)
