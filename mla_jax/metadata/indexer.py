"""Metadata of the sparse indexer: what to score, and where its keys are stored.

Decodes are scored against paged keys, one row per request (native) or per token (flattened);
prefills against gathered keys, chunk by chunk. Where a key stands for several tokens (``ratio``
of its cache group) lengths, slots and tables are those of the compressed cache.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, check_sizes
from mla_jax.metadata.indexer_chunks import (
    NO_CHUNK,
    IndexerChunkMetadata,
    build_chunk,
    indexer_chunks,
    most_chunks,
    with_keys,
)
from mla_jax.metadata.packed import counts_and_rows
from mla_jax.metadata.split import DecodePrefillSplit, SplitCounts
from mla_jax.types import Array, Bool, Int, made

__all__ = [
    "Indexer",
    "IndexerBucket",
    "IndexerDecision",
    "IndexerDecodeMetadata",
    "IndexerMetadata",
    "IndexerPrefillMetadata",
    "build_decode_rows",
]

MAX_LOGITS_BYTES = 512 * 2**20
"""Bytes of float32 logits of one prefill chunk."""

MIN_WORKSPACE = 64 * 1024
"""Gathered key rows of one chunk, where requests are short: 8 MiB of 132-byte keys."""


@dataclass(frozen=True, order=True, kw_only=True)
class IndexerBucket:
    """Static half of one step of indexer metadata."""

    decode_rows: int  # rows of the decode tensors; 0 iff no decodes
    decode_len: int  # query tokens of one row
    chunks: int  # prefill chunks; 0 iff no prefills
    chunk_requests: int  # requests of one chunk
    chunk_queries: int  # query rows of one chunk
    chunk_keys: int  # gathered key rows of one chunk


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerDecodeMetadata:
    """Rows of the paged scoring kernel."""

    page_table: Int[Array, "rows pages"]  # 0 on padding
    seq_lens: Int[Array, "rows queries"]  # keys each query sees; 0 = none
    decode_lens: Int[Array, "rows"]  # queries of a row
    token_index: Int[Array, "rows queries"]  # token of each query, -1 = none: packs and unpacks
    requires_padding: Bool[Array, ""]  # rows have different numbers of queries


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerPrefillMetadata:
    """The chunks of a step. A chunk's arrays are derived where they are used, in its loop."""

    bucket: IndexerBucket = field(metadata={"static": True})
    ratio: int = field(metadata={"static": True})
    plan: Int[Array, "chunks 6"]  # an IndexerChunk per row
    counts: Int[Array, "5"]  # of the whole step
    query_starts: Int[Array, "starts"]
    seq_lens: Int[Array, "requests"]
    page_table: Int[Array, "requests pages"]
    requests: Int[Array, "tokens"]  # of each token
    positions: Int[Array, "tokens"]

    @property
    def num_chunks(self) -> Int[Array, ""]:
        return self.counts[4]

    def chunk(self, i: Int[Array, ""] | int) -> IndexerChunkMetadata:
        """Chunk ``i``; past ``num_chunks`` an inert one."""
        return build_chunk(
            self.query_starts,
            self.seq_lens,
            self.page_table,
            self.requests,
            self.positions,
            self.plan[i],
            requests=self.bucket.chunk_requests,
            queries=self.bucket.chunk_queries,
            keys=self.bucket.chunk_keys,
            ratio=self.ratio,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerMetadata(SplitCounts):
    """One step of the indexer."""

    bucket: IndexerBucket = field(metadata={"static": True})
    seq_lens: Int[Array, "requests"]  # in tokens, whatever a key stands for
    max_seq_len: Int[Array, ""]
    slots: Int[Array, "tokens"]  # key row each token writes; -1 = none
    counts: Int[Array, "5"]  # those of the split; chunks
    prefill: IndexerPrefillMetadata | None  # None iff the bucket has no chunks
    decode: IndexerDecodeMetadata | None  # None iff the bucket has no decode rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerDecision:
    """What the host decides: bucket, counts and chunk plan."""

    bucket: IndexerBucket = field(metadata={"static": True})
    counts: Int[Array | np.ndarray, "5"]  # decodes, prefills, their tokens, chunks
    plan: Int[Array | np.ndarray, "chunks 6"]

    @classmethod
    def nothing(cls, bucket: IndexerBucket) -> "IndexerDecision":
        """The bucket with nothing in it."""
        counts, plans = counts_and_rows((0,) * 5, [[]], bucket.chunks, NO_CHUNK)
        return cls(bucket=bucket, counts=counts, plan=plans[0])


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Plans and builds ``IndexerMetadata`` in a bucket that the caller chooses."""

    group: GroupSpec  # of the keys
    max_logits_bytes: int = MAX_LOGITS_BYTES
    flatten: bool = False  # decode rows are tokens, not requests

    def __post_init__(self):
        check_sizes(**{"float32 logits of a chunk": self.max_logits_bytes // 4})

    def bucket(
        self, *, decodes: int, prefills: int, prefill_tokens: int, width: int
    ) -> IndexerBucket:
        """What any step of these sizes needs, over page tables of ``width``.

        A chunk gathers the longest request that the table can hold, or ``MIN_WORKSPACE`` rows.
        """
        longest = width * self.group.page
        keys = min(max(longest, MIN_WORKSPACE), prefills * longest)
        limits = {"requests": prefills, "queries": prefill_tokens, "keys": keys}
        return IndexerBucket(
            decode_rows=decodes,
            decode_len=1 if decodes else 0,
            chunks=most_chunks(**limits, max_logits=self.max_logits_bytes // 4),
            chunk_requests=prefills,
            chunk_queries=prefill_tokens,
            chunk_keys=keys,
        )

    def chunks(self, host: HostBatch, decodes: int, *, workspace: int) -> list[int]:
        """``IndexerChunk``s of the requests behind the decodes, end to end; none without keys."""
        queries, keys = host.lens_from(decodes)
        if not queries:
            return []
        if (ratio := self.group.ratio) > 1:
            keys = [k // ratio for k in keys]
        found = indexer_chunks(
            keys,
            queries,
            workspace=workspace,
            max_logits=self.max_logits_bytes // 4,
            offset=decodes,
        )
        return with_keys(found) if 0 in keys else found

    def decide(
        self, host: HostBatch, bucket: IndexerBucket, split: DecodePrefillSplit
    ) -> IndexerDecision:
        """The step in a bucket that holds it."""
        workspace = max(bucket.chunk_keys, 1)
        return self.filled(bucket, split, self.chunks(host, split.num_decodes, workspace=workspace))

    def filled(
        self, bucket: IndexerBucket, split: DecodePrefillSplit, chunks: list[int]
    ) -> IndexerDecision:
        """The decision of these parts."""
        given = *split, len(chunks) // len(NO_CHUNK)
        counts, plans = counts_and_rows(given, [chunks], bucket.chunks, NO_CHUNK)
        return made(IndexerDecision, bucket=bucket, counts=counts, plan=plans[0])

    def build(self, common: CommonMetadata, decision: IndexerDecision) -> IndexerMetadata:
        """Device half, over the tables and slots of ``group`` in ``common``."""
        bucket, counts = decision.bucket, jnp.asarray(decision.counts)
        table = common.page_tables[self.group.name]
        decode = prefill = None
        if bucket.decode_rows:
            decode = build_decode_rows(
                common,
                table,
                counts[0],
                rows=bucket.decode_rows,
                decode_len=bucket.decode_len,
                flatten=self.flatten,
                ratio=self.group.ratio,
            )
        if bucket.chunks:
            prefill = IndexerPrefillMetadata(
                bucket=bucket,
                ratio=self.group.ratio,
                plan=jnp.asarray(decision.plan),
                counts=counts,
                query_starts=common.query_starts,
                seq_lens=common.seq_lens,
                page_table=table,
                requests=common.requests,
                positions=common.positions,
            )
        return IndexerMetadata(
            bucket=bucket,
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slots=common.slots[self.group.name],
            counts=counts,
            prefill=prefill,
            decode=decode,
        )


def build_decode_rows(
    common: CommonMetadata,
    page_table: Int[Array, "requests pages"],
    num_decodes: Int[Array, ""],
    *,
    rows: int,
    decode_len: int,
    flatten: bool,
    ratio: int,
) -> IndexerDecodeMetadata:
    """Decode rows of the leading ``num_decodes`` requests.

    Native: row ``i`` is request ``i``, ``decode_len`` queries seeing
    ``max(L - decode_len + 1 + j, 0) // ratio`` keys (all decodes have ``decode_len`` queries or
    none). Flattened: row ``t`` is token ``t``, seeing ``(p + 1) // ratio``.
    """
    query_starts, seq_lens = common.query_starts, common.seq_lens
    lane = jnp.arange(rows, dtype=jnp.int32)
    if flatten:
        token = jnp.minimum(lane, common.bucket.tokens - 1)
        real = common.real[token] & (lane < query_starts[num_decodes])
        request = jnp.where(real, common.requests[token], 0)
        lens = jnp.where(real, jnp.maximum(common.positions[token] + 1, 0), 0)[:, None]
        decode_lens = jnp.ones((rows,), jnp.int32)
        index = jnp.where(real, lane, -1)[:, None]
        requires_padding = jnp.zeros((), bool)
    else:
        row = jnp.minimum(lane, common.bucket.requests - 1)
        real = lane < num_decodes
        request = jnp.where(real, row, 0)
        decode_lens = jnp.where(real, common.query_lens[request], 0)
        j = jnp.arange(decode_len, dtype=jnp.int32)
        lens = seq_lens[request][:, None] - decode_len + 1 + j
        lens = jnp.where(real[:, None], jnp.maximum(lens, 0), 0)
        there = j < decode_lens[:, None]
        index = jnp.where(there, query_starts[request][:, None] + j, -1)
        requires_padding = jnp.any(real & (decode_lens != decode_lens[0]))
    return IndexerDecodeMetadata(
        page_table=jnp.where(real[:, None], page_table[request], 0),
        seq_lens=lens // ratio,
        decode_lens=decode_lens,
        token_index=index,
        requires_padding=requires_padding,
    )
