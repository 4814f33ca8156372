"""Metadata of DeepSeek V4's sliding-window attention, shared by its layer types.

Every layer sees a window of raw tokens; layers of ratio 4 (C4A) add selected compressed states,
layers of ratio 128 (C128A) all of them. Nothing here may assume the indexer's split of the same
batch: per-token arrays of the two are matched by absolute token index only.
"""

from dataclasses import dataclass, field
from functools import cached_property

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
from mla_jax.metadata.packed import counts_and_rows
from mla_jax.metadata.plan import (
    OVERHEAD,
    WorkPlan,
    balanced_plan,
    sparse_row_lens,
    sparse_sm_parts,
)
from mla_jax.metadata.sparse import c128a_width, compressed_lens
from mla_jax.metadata.sparse_buckets import SWABucket, SWALadder, swa_bucket
from mla_jax.metadata.split import split_decodes_and_prefills
from mla_jax.metadata.window import (
    NO_CHUNK,
    WindowLimits,
    compute_prefill_gather_lens,
    gather_lens_of,
    sliding_window_indices,
    window_plans,
)
from mla_jax.types import Array, Bool, Int

__all__ = [
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "SWADecision",
    "layer_type",
]

RATIOS = {"swaonly": 1, "c4a": 4, "c128a": 128}
"""Tokens per compressed state of each layer type; ``swaonly`` has no states."""


def layer_type(compress_ratio: int) -> str:
    """``swaonly``, ``c4a`` or ``c128a``."""
    for name, ratio in RATIOS.items():
        if max(compress_ratio, 1) == ratio:
            return name
    raise ConfigError("compress_ratio of a layer", compress_ratio, "at most 1, 4 or 128")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SWADecision:
    """What the host decides: bucket, counts and the workspace chunks of each layer type."""

    bucket: SWABucket = field(metadata={"static": True})
    counts: Int[Array | np.ndarray, "counts"]  # decodes, prefills, their tokens; chunks per type
    chunks: Int[Array | np.ndarray, "types chunks 4"]  # a WindowChunk per row, then zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepseekSparseSWAMetadata(SplitCounts):
    """One step. Table, slots and indices address the window's cache."""

    bucket: SWABucket = field(metadata={"static": True})
    block_size: int = field(metadata={"static": True})
    layer_types: tuple[str, ...] = field(metadata={"static": True})
    block_table: Int[Array, "requests pages"]
    slot_mapping: Int[Array, "tokens"]
    seq_lens: Int[Array, "requests"]
    query_start_loc: Int[Array, "starts"]
    is_valid_token: Bool[Array, "tokens"]  # has a slot
    token_to_req_indices: Int[Array, "tokens"]  # 0 on padding
    counts: Int[Array, "counts"]  # those of the split; chunks of each layer type
    decode_swa_indices: Int[Array, "decode_tokens 1 window"]  # cache rows, oldest first; then -1
    decode_swa_lens: Int[Array, "decode_tokens"]
    prefill_swa_indices: Int[Array, "prefill_tokens window"]  # row i is token num_decode_tokens+i
    prefill_swa_lens: Int[Array, "prefill_tokens"]
    prefill_seq_lens: Int[Array, "prefills"] | None  # None iff the bucket has no prefills
    prefill_gather_lens: Int[Array, "prefills"] | None  # trailing rows to gather; None likewise
    prefill_chunks: Int[Array, "types chunks 4"]  # of each layer type; requests from 0
    tile_sched_swaonly: WorkPlan | None  # None: no such layer, or no decode tokens
    tile_sched_c4a: WorkPlan | None
    tile_sched_c128a: WorkPlan | None

    def chunks_of(self, name: str) -> tuple[Int[Array, "chunks 4"], Int[Array, ""]]:
        """Workspace chunks of a layer type, a ``WindowChunk`` per row, and how many there are."""
        at = self.layer_types.index(name)
        return self.prefill_chunks[at], self.counts[4 + at]


@dataclass(frozen=True, kw_only=True)
class DeepseekSparseSWAMetadataBuilder(
    AttentionMetadataBuilder[SWADecision, DeepseekSparseSWAMetadata]
):
    """Builds ``DeepseekSparseSWAMetadata`` for the layer types among ``compress_ratios``."""

    ladder: SWALadder
    next_n: int
    window: int
    page: int  # tokens of one page of the window's cache
    compress_ratios: tuple[int, ...]  # one per layer
    max_model_len: int
    max_batched_tokens: int
    num_sms: int
    heads: int
    index_topk: int = 512
    chunk_requests: int = 4  # prefills of the longest kind that the workspace holds
    overhead: int = OVERHEAD  # blocks
    plan_padding: bool = True  # False: plans leave padding rows out, nothing writes their output

    def __post_init__(self):
        for ratio in self.compress_ratios:
            layer_type(ratio)

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """Types present, in the order of ``RATIOS``."""
        present = {layer_type(r) for r in self.compress_ratios} or {"swaonly"}
        return tuple(name for name in RATIOS if name in present)

    @cached_property
    def _workspaces(self) -> list[tuple[int, int]]:
        """Ratio and workspace rows of each layer type."""
        limits = WindowLimits(
            self.window, self.chunk_requests, self.max_model_len, self.max_batched_tokens
        )
        return [(RATIOS[name], limits.rows(RATIOS[name])) for name in self.layer_types]

    def decide(self, host: CommonAttentionHost) -> SWADecision:
        """Split, workspace chunks and bucket."""
        split = split_decodes_and_prefills(host, self.next_n)
        queries, keys = host.lens_from(split.num_decodes)
        tails = gather_lens_of(queries, keys, self.window)
        plans = window_plans(keys, tails, self._workspaces)
        width = 0
        if "c128a" in self.layer_types:
            width = c128a_width(host.max_seq_len, self.max_model_len)
        bucket = swa_bucket(
            decode_tokens=self.ladder.decode_tokens.rung(split.num_decode_tokens),
            prefills=self.ladder.prefills.rung(split.num_prefills),
            prefill_tokens=self.ladder.prefill_tokens.rung(split.num_prefill_tokens),
            chunks=self.ladder.chunks.rung(max(map(len, plans))),
            c128a_width=width,
        )
        given = *split, *map(len, plans)
        counts, chunks = counts_and_rows(given, plans, bucket.chunks, NO_CHUNK)
        return SWADecision(bucket=bucket, counts=counts, chunks=chunks)

    def build(
        self,
        common: CommonAttentionMetadata,
        decision: SWADecision,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> DeepseekSparseSWAMetadata:
        """Device half. ``common`` has the table and slots of the window's cache."""
        del common_prefix_len, fast_build
        bucket, counts = decision.bucket, jnp.asarray(decision.counts)
        decodes, prefills, decode_tokens, prefill_tokens = (counts[i] for i in range(4))
        starts, lens = common.query_start_loc, common.seq_lens
        slots = common.slot_mapping
        tokens = slots.shape[0]
        request, real = token_to_request(starts, tokens)
        positions = token_positions(starts, lens, request, real)
        valid = slots >= 0

        def rows(size, first, count):
            """Request, position and validity of tokens ``[first, first + count)``."""
            lane = jnp.arange(size, dtype=jnp.int32)
            here = (lane < count) & (first + lane < tokens)
            token = jnp.where(here, first + lane, 0)
            return request[token], positions[token], here & valid[token]

        def windows(of):
            return sliding_window_indices(
                common.block_table_tensor, *of, window=self.window, page=self.page
            )

        decode = rows(bucket.decode_tokens, jnp.int32(0), decode_tokens)
        decode_indices, decode_lens = windows(decode)
        prefill_indices, prefill_lens = windows(
            rows(bucket.prefill_tokens, decode_tokens, prefill_tokens)
        )
        prefill_seq_lens, gather_lens = self._prefill_lens(starts, lens, decodes, prefills, bucket)
        plans = self._tile_plans(decode_lens, decode, decode_tokens, bucket)
        return DeepseekSparseSWAMetadata(
            bucket=bucket,
            block_size=self.page,
            layer_types=self.layer_types,
            block_table=common.block_table_tensor,
            slot_mapping=slots,
            seq_lens=lens,
            query_start_loc=starts,
            is_valid_token=valid,
            token_to_req_indices=request,
            counts=counts,
            decode_swa_indices=decode_indices[:, None],
            decode_swa_lens=decode_lens,
            prefill_swa_indices=prefill_indices,
            prefill_swa_lens=prefill_lens,
            prefill_seq_lens=prefill_seq_lens,
            prefill_gather_lens=gather_lens,
            prefill_chunks=jnp.asarray(decision.chunks),
            tile_sched_swaonly=plans.get("swaonly"),
            tile_sched_c4a=plans.get("c4a"),
            tile_sched_c128a=plans.get("c128a"),
        )

    def _prefill_lens(self, starts, seq_lens, decodes, prefills, bucket: SWABucket):
        """Lengths of the prefills and of their gathered tails; 0 on padding."""
        if not bucket.prefills:
            return None, None
        lane = jnp.arange(bucket.prefills, dtype=jnp.int32)
        here = lane < prefills
        row = jnp.where(here, decodes + lane, 0)
        lens = jnp.where(here, seq_lens[row], 0)
        queries = jnp.where(here, jnp.diff(starts)[row], 0)
        return lens, compute_prefill_gather_lens(queries, lens, window=self.window)

    def _tile_plans(self, window_lens, decode, num_decode_tokens, bucket) -> dict[str, WorkPlan]:
        """One plan per layer type: each decode token is a batch row of one query."""
        if not bucket.decode_tokens:
            return {}
        _, positions, valid = decode
        widths = {"c4a": self.index_topk, "c128a": bucket.c128a_width}
        rows = []
        for name in self.layer_types:
            extra = None
            if name in widths:
                extra = compressed_lens(positions, valid, ratio=RATIOS[name], width=widths[name])
            rows.append(sparse_row_lens(window_lens, extra))

        def plan(lens):
            return balanced_plan(
                lens,
                parts=sparse_sm_parts(self.num_sms, queries=1, heads=self.heads),
                overhead=self.overhead,
                num_rows=None if self.plan_padding else num_decode_tokens,
            )

        # All plans in one batch: as many kernels as for one.
        plans = jax.vmap(plan)(jnp.stack(rows))
        return {
            name: jax.tree.map(lambda x, i=i: x[i], plans)
            for i, name in enumerate(self.layer_types)
        }

    def warmup_decision(self, decision: SWADecision) -> SWADecision:
        """The same bucket with nothing in it."""
        return jax.tree.map(np.zeros_like, decision)
