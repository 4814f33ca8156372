"""Prefill of the sparse indexer in chunks: keys gathered end to end, queries scored against them.

The host packs requests under two limits, gathered rows and logits elements; the device derives
one chunk from one row of that plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import check_chunks, exclusive_sum
from mla_jax.types import Array, Bool, Int, cdiv

__all__ = [
    "NO_CHUNK",
    "IndexerChunk",
    "IndexerChunkMetadata",
    "build_chunk",
    "indexer_chunks",
    "most_chunks",
    "with_keys",
]


class IndexerChunk(NamedTuple):
    """One chunk: requests ``[start, stop)``, and of their queries ``[query_start, query_stop)``."""

    start: int
    stop: int
    query_start: int
    query_stop: int
    total_seq_lens: int  # gathered rows, by the host's bound
    skip_kv_gather: int  # 1: the previous chunk gathered the same requests


NO_CHUNK = IndexerChunk(0, 0, 0, 0, 0, 1)
"""A padding chunk: no requests, no queries, no gather."""


def indexer_chunks(
    compressed_seq_lens: list[int],
    query_lens: list[int],
    *,
    workspace: int,
    max_logits: int,
    offset: int,
) -> list[int]:
    """``IndexerChunk``s end to end, from host integers: those without keys too.

    Consecutive requests are taken while their keys sum to at most ``workspace`` rows and
    keys times queries to at most ``max_logits`` elements. A request that fits neither stands
    alone and is cut along its queries into pieces of ``max(1, max_logits // keys)`` rows. Queries
    count from the group's first token; ``offset`` is added to requests.
    """
    if workspace < 0 or max_logits < 0:
        raise MetadataError("workspace, logits of a chunk", (workspace, max_logits), "0 or more")
    chunks: list[int] = []
    start, i, n, m = offset, offset, 0, 0  # requests [start, i): n keys, m queries
    for keys, queries in zip(compressed_seq_lens, query_lens, strict=True):
        total, rows = n + keys, m + queries
        if (total > workspace or total * rows > max_logits) and i > start:
            if n * m > max_logits:
                chunks += _pieces(start, i, n, m, max_logits)
            elif m:
                chunks += start, i, 0, m, n, 0
            start, total, rows = i, keys, queries
        i, n, m = i + 1, total, rows
    if n * m > max_logits:
        chunks += _pieces(start, i, n, m, max_logits)
    elif m:
        chunks += start, i, 0, m, n, 0
    return chunks


def _pieces(start: int, stop: int, keys: int, queries: int, max_logits: int) -> Iterator[int]:
    """A group cut along its queries."""
    step = max_logits // keys or 1
    check_chunks(cdiv(queries, step), max_logits)
    for first in range(0, queries, step):
        yield from (start, stop, first, min(first + step, queries), keys, int(first > 0))


def with_keys(chunks: list[int]) -> list[int]:
    """Chunks, end to end, without those that gather nothing."""
    rows = batched(chunks, len(NO_CHUNK))
    return [x for row in rows if IndexerChunk(*row).total_seq_lens for x in row]


def most_chunks(*, requests: int, queries: int, keys: int, max_logits: int) -> int:
    """As many as ``indexer_chunks`` gives of such a step at most.

    A group starts with a request of its own and is cut every ``max_logits // keys`` queries or
    more; no piece is without queries.
    """
    return min(queries, requests + cdiv(queries, max(max_logits // max(keys, 1), 1)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerChunkMetadata:
    """Keys to gather and the columns each query may see, for one chunk.

    Top-k positions of a query are relative to its ``cu_seqlen_ks``.
    """

    page_table: Int[Array, "requests pages"]  # 0 on padding
    cu_seq_lens: Int[Array, "starts"]  # exclusive sum of compressed lengths
    token_to_seq: Int[Array, "keys"]  # request of each gathered row; ``requests`` = no row
    cu_seqlen_ks: Int[Array, "queries"]  # first visible column
    cu_seqlen_ke: Int[Array, "queries"]  # one past the last; equal = sees nothing
    token_start: Int[Array, ""]  # query rows are tokens [token_start, token_end)
    token_end: Int[Array, ""]
    num_reqs: Int[Array, ""]
    total_seq_lens: Int[Array, ""]  # the host's bound, at least ``cu_seq_lens[-1]``
    skip_kv_gather: Bool[Array, ""]  # the keys of the previous chunk are these


def build_chunk(
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    page_table: Int[Array, "requests pages"],
    owners: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    chunk: Int[Array, "6"],
    *,
    requests: int,
    queries: int,
    keys: int,
    ratio: int,
) -> IndexerChunkMetadata:
    """One chunk of a batch from its ``IndexerChunk``, in arrays of the given sizes.

    ``owners`` and ``positions`` are the request and the position of each token of the batch.
    A query at position ``p`` of chunk-local request ``g`` sees columns
    ``[cu[g], cu[g] + (p + 1) // ratio)``.
    """
    start, stop, first, last, total, skip = (chunk[i] for i in range(6))
    local = jnp.arange(requests, dtype=jnp.int32)
    inside = local < stop - start
    rows = jnp.where(inside, start + local, 0)
    lens = jnp.where(inside, seq_lens[rows] // ratio, 0)
    cu = exclusive_sum(lens)
    key = jnp.arange(keys, dtype=jnp.int32)
    owner = jnp.searchsorted(cu[1:], key, side="right", method="scan_unrolled")

    # A slice that reaches past the chunk's tokens ends with them.
    last = jnp.minimum(last, query_starts[stop] - query_starts[start])
    token_start = query_starts[start] + first
    token = token_start + jnp.arange(queries, dtype=jnp.int32)
    token_end = token_start + jnp.maximum(last - first, 0)
    is_query = token < token_end
    inner = jnp.minimum(token, owners.shape[0] - 1)
    ks = cu[jnp.clip(owners[inner] - start, 0, requests)]
    ke = ks + jnp.maximum(positions[inner] + 1, 0) // ratio
    return IndexerChunkMetadata(
        page_table=jnp.where(inside[:, None], page_table[rows], 0),
        cu_seq_lens=cu,
        token_to_seq=owner.astype(jnp.int32),
        cu_seqlen_ks=jnp.where(is_query, ks, 0),
        cu_seqlen_ke=jnp.where(is_query, ke, 0),
        token_start=token_start,
        token_end=token_end,
        num_reqs=stop - start,
        total_seq_lens=total,
        skip_kv_gather=skip > 0,
    )
