"""Chunked-local attention as ordinary attention over virtual requests.

A query at position ``p`` sees the keys of its own chunk only, ``[chunk * (p // chunk), p]``.
Every (request, chunk) pair that holds queries becomes a causal request of its own.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import CommonMetadata, check_sizes, token_to_request
from mla_jax.types import Array, Int

__all__ = [
    "LocalAttentionBatch",
    "build_local_attention",
    "make_local_attention_virtual_batches",
    "max_virtual_batches",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LocalAttentionBatch:
    """Virtual requests, ordered by request then chunk: the order of tokens is unchanged.

    Padding: query and key length 0, page 0, repeated starts.
    """

    pages_per_chunk: int = field(metadata={"static": True})
    query_lens: Int[Array | np.ndarray, "virtual"]  # seqlens_q_local
    query_starts: Int[Array | np.ndarray, "starts"]  # cu_seqlens_q_local
    seq_lens: Int[Array | np.ndarray, "virtual"]  # seqlens_k_local; 0 = padding
    page_table: Int[Array | np.ndarray, "virtual chunkpages"]  # last page repeated past the table
    request: Int[Array | np.ndarray, "virtual"]  # which request; 0 on padding
    chunk: Int[Array | np.ndarray, "virtual"]  # which chunk of it; 0 on padding
    num_virtual: Int[Array | np.ndarray, ""]

    def remap(self, block_table):
        """The pages of every virtual request in another page table of the same requests."""
        xp = np if isinstance(block_table, np.ndarray) else jnp
        pages = xp.arange(self.pages_per_chunk, dtype=xp.int32)
        column = self.chunk[:, None] * self.pages_per_chunk + pages
        column = xp.minimum(column, block_table.shape[1] - 1)
        table = block_table[self.request[:, None], column]
        return xp.where((self.seq_lens > 0)[:, None], table, 0)

    def common(self, common: CommonMetadata) -> CommonMetadata:
        """The step as its virtual requests: tokens, slots and positions stay."""
        (name,) = common.page_tables
        virtual, width = self.page_table.shape
        tokens = common.bucket.tokens
        return replace(
            common,
            bucket=CommonBucket(requests=virtual, tokens=tokens, pages=(width,)),
            query_starts=self.query_starts,
            seq_lens=self.seq_lens,
            requests=token_to_request(jnp.asarray(self.query_starts), tokens)[0],
            page_tables={name: self.page_table},
            num_requests=self.num_virtual,
            max_query_len=jnp.max(self.query_lens, initial=0),
            max_seq_len=jnp.max(self.seq_lens, initial=0),
        )


def max_virtual_batches(*, requests: int, tokens: int, chunk: int) -> int:
    """``2 requests + tokens // chunk``: queries of one request touch at most that many chunks."""
    return 2 * requests + tokens // chunk


def _chunks_of(xp, query_starts, seq_lens, chunk: int):
    """First chunk and number of chunks of every request; none without queries."""
    query_lens = xp.diff(query_starts)
    first = (seq_lens - query_lens) // chunk
    return first, xp.where(query_lens > 0, (seq_lens - 1) // chunk - first + 1, 0)


def _virtual(xp, query_starts, seq_lens, block_table, *, chunk: int, page: int, size: int):
    """The closed form, on the host (``numpy``) or the device (``jax.numpy``).

    Virtual request ``(i, k)`` with context ``n`` holds queries ``[max(n, k c), min(L, (k+1) c))``
    and the keys from ``k c`` on.
    """
    first, count = _chunks_of(xp, query_starts, seq_lens, chunk)
    ends = xp.cumsum(count, dtype=xp.int32)
    v = xp.arange(size, dtype=xp.int32)
    total = ends[-1] if len(ends) else xp.zeros((), xp.int32)
    real = v < total
    i = xp.where(real, (ends <= v[:, None]).sum(axis=1), 0).astype(xp.int32)
    k = xp.where(real, first[i] + v - (ends - count)[i], 0).astype(xp.int32)
    context = (seq_lens - xp.diff(query_starts))[i]
    low = xp.maximum(context, k * chunk)
    high = xp.minimum(seq_lens[i], (k + 1) * chunk)
    query_lens = xp.where(real, high - low, 0).astype(xp.int32)
    zero = xp.zeros((1,), xp.int32)
    batch = LocalAttentionBatch(
        pages_per_chunk=chunk // page,
        query_lens=query_lens,
        query_starts=xp.concatenate([zero, xp.cumsum(query_lens, dtype=xp.int32)]),
        seq_lens=xp.where(real, high - k * chunk, 0).astype(xp.int32),
        page_table=zero,
        request=i,
        chunk=k,
        num_virtual=total.astype(xp.int32),
    )
    return replace(batch, page_table=batch.remap(block_table))


def _check_chunk(chunk: int, page: int) -> None:
    check_sizes(page=page)
    if chunk < 1 or chunk % page:
        raise MetadataError("attention chunk", chunk, f"a positive multiple of page={page}")


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc: Int[np.ndarray, "starts"],
    seq_lens: Int[np.ndarray, "requests"],
    block_table: Int[np.ndarray, "requests pages"],
    block_size: int,
) -> LocalAttentionBatch:
    """On the host: exactly as many virtual requests as there are (no padding)."""
    _check_chunk(attn_chunk_size, block_size)
    _, count = _chunks_of(np, query_start_loc, seq_lens, attn_chunk_size)
    return _virtual(
        np,
        query_start_loc,
        seq_lens,
        block_table,
        chunk=attn_chunk_size,
        page=block_size,
        size=int(count.sum()),
    )


def build_local_attention(common: CommonMetadata, *, chunk: int, page: int) -> LocalAttentionBatch:
    """On the device: the bucket's largest number of virtual requests, padding at the end."""
    _check_chunk(chunk, page)
    bucket = common.bucket
    (table,) = common.page_tables.values()
    return _virtual(
        jnp,
        common.query_starts,
        common.seq_lens,
        table,
        chunk=chunk,
        page=page,
        size=max_virtual_batches(requests=bucket.requests, tokens=bucket.tokens, chunk=chunk),
    )
