"""The indexer's builder by itself, with DeepGEMM's schedule of its decode rows.

``metadata.deepseek_v32`` and ``deepseek_v4`` build the same metadata as part of a model's step.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import batched
from typing import Literal

import jax
import numpy as np

from mla_jax.errors import ConfigError
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, check_sizes
from mla_jax.metadata.compat.ladders import IndexerLadder
from mla_jax.metadata.compat.paged_logits_schedule import paged_mqa_logits_schedule
from mla_jax.metadata.indexer import (
    MAX_LOGITS_BYTES,
    Indexer,
    IndexerBucket,
    IndexerDecision,
    IndexerDecodeMetadata,
    IndexerMetadata,
    IndexerPrefillMetadata,
)
from mla_jax.metadata.indexer_chunks import NO_CHUNK, IndexerChunk, indexer_chunks, with_keys
from mla_jax.metadata.split import SplitCounts, split_decodes_and_prefills
from mla_jax.types import Array, Int

__all__ = [
    "DeepseekV32IndexerMetadata",
    "DeepseekV32IndexerMetadataBuilder",
    "get_max_prefill_buffer_size",
    "plan_indexer_chunks",
    "split_indexer_prefill_chunks",
    "use_flattening",
]


def get_max_prefill_buffer_size(max_model_len: int, *, factor: int = 5, ratio: int = 1) -> int:
    """Gathered key rows that fit the sparse prefill's workspace.

    That workspace holds ``factor * max_model_len`` rows of 1152 bytes; a key takes 132, hence
    ``8 * factor * max_model_len // ratio``.
    """
    if factor < 2:
        raise ConfigError("factor of the prefill workspace", factor, "at least 2")
    check_sizes(max_model_len=max_model_len, ratio=ratio)
    return 8 * factor * max_model_len // ratio


def use_flattening(*, next_n: int, sm100: bool, fp4_cache: bool = False) -> bool:
    """Whether decodes of several tokens become one row per token: no native kernel for them."""
    if fp4_cache and not sm100:
        raise ConfigError("fp4 indexer cache", "a device below sm100", "sm100")
    return (fp4_cache or not sm100) and next_n not in (1, 2)


def split_indexer_prefill_chunks(
    compressed_seq_lens: Int[np.ndarray, "requests"],
    query_lens: Int[np.ndarray, "requests"],
    *,
    workspace: int,
    max_logits: int,
    offset: int = 0,
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pieces ``((request start, stop), (query start, stop))`` in order.

    Consecutive requests are taken while their keys sum to at most ``workspace`` rows and
    keys times queries to at most ``max_logits`` elements. A request that fits neither stands
    alone and is cut along its queries into pieces of ``max(1, max_logits // keys)`` rows. Queries
    count from the group's first token; ``offset`` is added to requests.
    """
    sizes = compressed_seq_lens.tolist(), query_lens.tolist()
    chunks = indexer_chunks(*sizes, workspace=workspace, max_logits=max_logits, offset=offset)
    rows = batched(chunks, len(NO_CHUNK))
    return [((start, stop), (first, last)) for start, stop, first, last, *_ in rows]


def plan_indexer_chunks(
    compressed_seq_lens: Int[np.ndarray, "requests"],
    query_lens: Int[np.ndarray, "requests"],
    *,
    workspace: int,
    max_logits: int,
    offset: int = 0,
) -> list[IndexerChunk]:
    """The pieces that have keys, with what the host knows of each."""
    sizes = compressed_seq_lens.tolist(), query_lens.tolist()
    chunks = indexer_chunks(*sizes, workspace=workspace, max_logits=max_logits, offset=offset)
    return [IndexerChunk(*c) for c in batched(with_keys(chunks), len(NO_CHUNK))]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepseekV32IndexerMetadata(SplitCounts):
    """One step of the indexer under upstream's names."""

    native: IndexerMetadata
    counts: Int[Array, "5"]
    schedule_metadata: Int[Array, "sms 2"] | None  # None iff the bucket has no decode rows

    @property
    def bucket(self) -> IndexerBucket:
        return self.native.bucket

    @property
    def slot_mapping(self) -> Int[Array, "tokens"]:
        """Key row each token writes; -1 = none."""
        return self.native.slots

    @property
    def seq_lens(self) -> Int[Array, "requests"]:
        return self.native.seq_lens

    @property
    def prefill(self) -> IndexerPrefillMetadata | None:
        return self.native.prefill

    @property
    def decode(self) -> IndexerDecodeMetadata | None:
        return self.native.decode


_indexer_bucket = cache(IndexerBucket)  # equal ones are one object


@dataclass(frozen=True, kw_only=True)
class DeepseekV32IndexerMetadataBuilder:
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

    def __post_init__(self):
        check_sizes(
            next_n=self.next_n,
            num_sms=self.num_sms,
            max_prefill_buffer_size=self.max_prefill_buffer_size,
        )
        if self.remainder not in ("first", "last"):
            raise ConfigError("remainder", repr(self.remainder), "'first' or 'last'")
        _ = self.native  # refuses the rest

    @cached_property
    def group(self) -> GroupSpec:
        """The indexer's cache."""
        return GroupSpec("index_keys", self.page, self.compress_ratio)

    @cached_property
    def native(self) -> Indexer:
        """The builder underneath."""
        return Indexer(
            group=self.group, max_logits_bytes=self.max_logits_bytes, flatten=self.use_flattening
        )

    def decide(self, host: HostBatch) -> IndexerDecision:
        """Split, chunk plan and bucket. A step without tokens is empty."""
        if host.num_tokens == 0:
            return self._decision((0, 0, 0, 0), 0, [])
        split = split_decodes_and_prefills(
            host, self.next_n, require_uniform=not self.use_flattening
        )
        d = split.num_decodes
        chunks = self.native.chunks(host, d, workspace=self.max_prefill_buffer_size)
        decode_len = 1
        if self.next_n > 1:
            decode_len = int(np.maximum.reduce(host.query_lens[:d], initial=1))
        return self._decision(split, decode_len, chunks)

    def _decision(self, split, decode_len: int, plan: list[int]) -> IndexerDecision:
        decodes, prefills, decode_tokens, _ = split
        chunks = [IndexerChunk(*c) for c in batched(plan, len(NO_CHUNK))]
        rows = decode_tokens if self.use_flattening else decodes
        ladder = self.ladder
        bucket = _indexer_bucket(
            decode_rows=ladder.decode_rows.rung(rows),
            decode_len=(1 if self.use_flattening else decode_len) if rows else 0,
            chunks=ladder.chunks.rung(max(len(chunks), 1) if prefills else 0),
            chunk_requests=ladder.chunk_requests.rung(_most(c[1] - c[0] for c in chunks)),
            chunk_queries=ladder.chunk_queries.rung(_most(c[3] - c[2] for c in chunks)),
            chunk_keys=ladder.chunk_keys.rung(_most(c[4] for c in chunks)),
        )
        return self.native.filled(bucket, split, plan)

    def build(
        self, common: CommonMetadata, decision: IndexerDecision
    ) -> DeepseekV32IndexerMetadata:
        """Device half. ``common`` has the group ``index_keys``."""
        native = self.native.build(common, decision)
        schedule = None
        if native.decode is not None:
            schedule = paged_mqa_logits_schedule(
                native.decode.seq_lens, num_sms=self.num_sms, remainder=self.remainder
            )
        return DeepseekV32IndexerMetadata(
            native=native, counts=native.counts, schedule_metadata=schedule
        )

    def warmup_decision(self, decision: IndexerDecision) -> IndexerDecision:
        """The same bucket with nothing in it."""
        return IndexerDecision.nothing(decision.bucket)


def _most(sizes) -> int:
    return max(sizes, default=0)
