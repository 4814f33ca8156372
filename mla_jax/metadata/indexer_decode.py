"""Decode rows of the sparse indexer: what the paged scoring kernel reads.

Native rows are requests with up to ``next_n`` queries; flattened rows are single tokens.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from mla_jax.metadata.common import token_positions, token_to_request
from mla_jax.metadata.paged_logits_schedule import paged_mqa_logits_schedule
from mla_jax.types import Array, Bool, Int

__all__ = ["DeepSeekV32IndexerDecodeMetadata", "build_decode_tensors"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepSeekV32IndexerDecodeMetadata:
    """Rows of the paged scoring kernel."""

    block_table: Int[Array, "rows pages"]  # 0 on padding
    seq_lens: Int[Array, "rows queries"]  # compressed keys each query sees; 0 = none
    decode_lens: Int[Array, "rows"]  # queries of a row
    token_index: Int[Array, "rows queries"]  # token of each query, -1 = none: packs and unpacks
    requires_padding: Bool[Array, ""]  # rows have different numbers of queries
    schedule_metadata: Int[Array, "sms 2"]


def build_decode_tensors(
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    page_table: Int[Array, "requests pages"],
    num_decodes: Int[Array, ""],
    *,
    rows: int,
    decode_len: int,
    flatten: bool,
    ratio: int,
    num_sms: int,
    remainder: Literal["first", "last"] = "first",
) -> DeepSeekV32IndexerDecodeMetadata:
    """Decode rows of the leading ``num_decodes`` requests.

    Native: row ``i`` is request ``i``, ``decode_len`` queries seeing
    ``max(L - decode_len + 1 + j, 0) // ratio`` keys (all decodes have ``decode_len`` queries or
    none). Flattened: row ``t`` is token ``t``, seeing ``(p + 1) // ratio``.
    """
    lane = jnp.arange(rows, dtype=jnp.int32)
    if flatten:
        request, real = token_to_request(query_starts, rows)
        real = real & (lane < query_starts[num_decodes])
        request = jnp.where(real, request, 0)
        positions = token_positions(query_starts, seq_lens, request, real)
        lens = jnp.where(real, jnp.maximum(positions + 1, 0), 0)[:, None]
        decode_lens = jnp.ones((rows,), jnp.int32)
        token = jnp.where(real, lane, -1)[:, None]
        requires_padding = jnp.zeros((), bool)
    else:
        real = lane < num_decodes
        request = jnp.where(real, lane, 0)
        decode_lens = jnp.where(real, jnp.diff(query_starts)[request], 0)
        j = jnp.arange(decode_len, dtype=jnp.int32)
        lens = seq_lens[request][:, None] - decode_len + 1 + j
        lens = jnp.where(real[:, None], jnp.maximum(lens, 0), 0)
        there = j < decode_lens[:, None]
        token = jnp.where(there, query_starts[request][:, None] + j, -1)
        requires_padding = jnp.any(real & (decode_lens != decode_lens[0]))
    lens = lens // ratio
    return DeepSeekV32IndexerDecodeMetadata(
        block_table=jnp.where(real[:, None], page_table[request], 0),
        seq_lens=lens,
        decode_lens=decode_lens,
        token_index=token,
        requires_padding=requires_padding,
        schedule_metadata=paged_mqa_logits_schedule(lens, num_sms=num_sms, remainder=remainder),
    )
