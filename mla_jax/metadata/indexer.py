"""Metadata of the DeepSeek V3.2 indexer: what to score, and where its keys are stored.

Decodes are scored against paged keys, one row per request (native) or per token (flattened);
prefills against gathered keys, chunk by chunk. With ``compress_ratio > 1`` (V4) a key stands for
that many tokens and lengths, slots and tables are those of the compressed cache.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import ConfigError
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.common import (
    CommonAttentionHost,
    CommonAttentionMetadata,
    token_positions,
    token_to_request,
)
from mla_jax.metadata.counts import SplitCounts
from mla_jax.metadata.indexer_chunks import (
    NO_CHUNK,
    DeepseekV32IndexerPrefillChunkMetadata,
    build_prefill_chunk_metadata,
    indexer_chunks,
)
from mla_jax.metadata.indexer_decode import (
    DeepSeekV32IndexerDecodeMetadata,
    build_decode_tensors,
)
from mla_jax.metadata.packed import counts_and_rows
from mla_jax.metadata.sparse import get_compressed_slot_mapping
from mla_jax.metadata.sparse_buckets import IndexerBucket, IndexerLadder, indexer_bucket
from mla_jax.metadata.split import split_decodes_and_prefills
from mla_jax.types import Array, Int

__all__ = [
    "DeepseekV32IndexerMetadata",
    "DeepseekV32IndexerMetadataBuilder",
    "DeepseekV32IndexerPrefillMetadata",
    "IndexerDecision",
    "get_max_prefill_buffer_size",
    "use_flattening",
]

MAX_LOGITS_BYTES = 512 * 2**20
"""Bytes of float32 logits of one prefill chunk."""


def get_max_prefill_buffer_size(max_model_len: int, *, factor: int = 5, ratio: int = 1) -> int:
    """Gathered key rows that fit the sparse prefill's workspace.

    That workspace holds ``factor * max_model_len`` rows of 1152 bytes; a key takes 132, hence
    ``8 * factor * max_model_len // ratio``.
    """
    if factor < 2:
        raise ConfigError("factor of the prefill workspace", factor, "at least 2")
    return 8 * factor * max_model_len // ratio


def use_flattening(*, next_n: int, sm100: bool, fp4_cache: bool = False) -> bool:
    """Whether decodes of several tokens become one row per token: no native kernel for them."""
    if fp4_cache and not sm100:
        raise ConfigError("fp4 indexer cache", "a device below sm100", "sm100")
    return (fp4_cache or not sm100) and next_n not in (1, 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepseekV32IndexerPrefillMetadata:
    """The chunks of a step. A chunk's arrays are derived where they are used, in its loop."""

    bucket: IndexerBucket = field(metadata={"static": True})
    compress_ratio: int = field(metadata={"static": True})
    plan: Int[Array, "chunks 6"]  # an IndexerChunk per row
    counts: Int[Array, "5"]  # of the whole step
    query_start_loc: Int[Array, "starts"]
    seq_lens: Int[Array, "requests"]
    block_table: Int[Array, "requests pages"]

    @property
    def num_chunks(self) -> Int[Array, ""]:
        return self.counts[4]

    def chunk(self, i: Int[Array, ""] | int) -> DeepseekV32IndexerPrefillChunkMetadata:
        """Chunk ``i``; past ``num_chunks`` an inert one."""
        return build_prefill_chunk_metadata(
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.plan[i],
            requests=self.bucket.chunk_requests,
            queries=self.bucket.chunk_queries,
            keys=self.bucket.chunk_keys,
            ratio=self.compress_ratio,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepseekV32IndexerMetadata(SplitCounts):
    """One step of the indexer."""

    bucket: IndexerBucket = field(metadata={"static": True})
    seq_lens: Int[Array, "requests"]  # in tokens, not compressed
    max_seq_len: Int[Array, ""]
    slot_mapping: Int[Array, "tokens"]  # key row each token writes; -1 = none
    counts: Int[Array, "5"]  # those of the split; chunks
    prefill: DeepseekV32IndexerPrefillMetadata | None  # None iff the bucket has no chunks
    decode: DeepSeekV32IndexerDecodeMetadata | None  # None iff the bucket has no decode rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IndexerDecision:
    """What the host decides: bucket, counts and chunk plan."""

    bucket: IndexerBucket = field(metadata={"static": True})
    counts: Int[Array | np.ndarray, "5"]  # decodes, prefills, their tokens, chunks
    plan: Int[Array | np.ndarray, "chunks 6"]


@dataclass(frozen=True, kw_only=True)
class DeepseekV32IndexerMetadataBuilder(
    AttentionMetadataBuilder[IndexerDecision, DeepseekV32IndexerMetadata]
):
    """Builds ``DeepseekV32IndexerMetadata``; ``next_n`` is one more than the drafted tokens."""

    ladder: IndexerLadder
    next_n: int
    use_flattening: bool
    page: int  # key rows of one page of the indexer's cache
    num_sms: int
    max_prefill_buffer_size: int  # key rows of the gather workspace
    compress_ratio: int = 1
    max_logits_bytes: int = MAX_LOGITS_BYTES
    remainder: Literal["first", "last"] = "first"  # SMs with one item more

    def decide(self, host: CommonAttentionHost) -> IndexerDecision:
        """Split, chunk plan and bucket. A step without tokens is empty."""
        if host.num_actual_tokens == 0:
            return self._decision((0, 0, 0, 0), 0, [])
        split = split_decodes_and_prefills(
            host, self.next_n, require_uniform=not self.use_flattening
        )
        d = split.num_decodes
        queries, keys = host.lens_from(d)
        chunks = indexer_chunks(
            keys if self.compress_ratio == 1 else [k // self.compress_ratio for k in keys],
            queries,
            workspace=self.max_prefill_buffer_size,
            max_logits=self.max_logits_bytes // 4,
            offset=d,
        )
        decode_len = 1
        if self.next_n > 1:
            decode_len = int(np.maximum.reduce(host.query_lens_cpu[:d], initial=1))
        return self._decision(split, decode_len, [c for c in chunks if c[4]])

    def _decision(self, split, decode_len: int, chunks) -> IndexerDecision:
        decodes, prefills, decode_tokens, _ = split
        rows = decode_tokens if self.use_flattening else decodes
        ladder = self.ladder
        requests = queries = keys = 0  # of the largest chunk
        for start, stop, first, last, gathered, _ in chunks:
            if stop - start > requests:
                requests = stop - start
            if last - first > queries:
                queries = last - first
            if gathered > keys:
                keys = gathered
        bucket = indexer_bucket(
            decode_rows=ladder.decode_rows.rung(rows),
            decode_len=(1 if self.use_flattening else decode_len) if rows else 0,
            chunks=ladder.chunks.rung(max(len(chunks), 1) if prefills else 0),
            chunk_requests=ladder.chunk_requests.rung(requests),
            chunk_queries=ladder.chunk_queries.rung(queries),
            chunk_keys=ladder.chunk_keys.rung(keys),
        )
        given = *split, len(chunks)
        counts, plans = counts_and_rows(given, [chunks], bucket.chunks, NO_CHUNK)
        return IndexerDecision(bucket=bucket, counts=counts, plan=plans[0])

    def build(
        self,
        common: CommonAttentionMetadata,
        decision: IndexerDecision,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> DeepseekV32IndexerMetadata:
        """Device half. ``common`` has the table and slots of the indexer's cache."""
        del common_prefix_len, fast_build
        bucket, counts = decision.bucket, jnp.asarray(decision.counts)
        starts, lens, table = (
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
        )
        slots = common.slot_mapping
        if self.compress_ratio > 1:
            request, real = token_to_request(starts, slots.shape[0])
            slots = get_compressed_slot_mapping(
                table,
                request,
                token_positions(starts, lens, request, real),
                real & (slots >= 0),
                page=self.page,
                ratio=self.compress_ratio,
            )
        decode = prefill = None
        if bucket.decode_rows:
            decode = build_decode_tensors(
                starts,
                lens,
                table,
                counts[0],
                rows=bucket.decode_rows,
                decode_len=bucket.decode_len,
                flatten=self.use_flattening,
                ratio=self.compress_ratio,
                num_sms=self.num_sms,
                remainder=self.remainder,
            )
        if bucket.chunks:
            prefill = DeepseekV32IndexerPrefillMetadata(
                bucket=bucket,
                compress_ratio=self.compress_ratio,
                plan=jnp.asarray(decision.plan),
                counts=counts,
                query_start_loc=starts,
                seq_lens=lens,
                block_table=table,
            )
        return DeepseekV32IndexerMetadata(
            bucket=bucket,
            seq_lens=lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=slots,
            counts=counts,
            prefill=prefill,
            decode=decode,
        )

    def warmup_decision(self, decision: IndexerDecision) -> IndexerDecision:
        """The same bucket with nothing in it."""
        counts, plans = counts_and_rows((0,) * 5, [[]], decision.bucket.chunks, NO_CHUNK)
        return IndexerDecision(bucket=decision.bucket, counts=counts, plan=plans[0])
