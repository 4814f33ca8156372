"""DeepSeek V4's sliding-window builder by itself, with FlashMLA's plans of its decode tokens.

``metadata.deepseek_v4`` builds the same windows as part of a model's step. Nothing here may assume
the indexer's split of the same batch: per-token arrays of the two are matched by absolute token
index only.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

import jax
import jax.numpy as jnp

from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, check_sizes
from mla_jax.metadata.compat.ladders import SWALadder
from mla_jax.metadata.compat.plan import (
    OVERHEAD,
    FlashMLAPlan,
    balanced_plan,
    sparse_row_lens,
    sparse_sm_parts,
)
from mla_jax.metadata.sparse import compressed_lens
from mla_jax.metadata.split import SplitCounts, split_decodes_and_prefills
from mla_jax.metadata.window import (
    NO_CHUNK,
    RATIOS,
    WindowBucket,
    WindowDecision,
    WindowMetadata,
    Windows,
    layer_type,
)
from mla_jax.types import Array, Bool, Int

__all__ = [
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "layer_type",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeepseekSparseSWAMetadata(SplitCounts):
    """One step under upstream's names. Table, slots and indices address the window's cache."""

    block_size: int = field(metadata={"static": True})
    native: WindowMetadata
    common: CommonMetadata
    counts: Int[Array, "counts"]  # those of the split; chunks of each layer type
    tile_sched_swaonly: FlashMLAPlan | None  # None: no such layer, or no decode tokens
    tile_sched_c4a: FlashMLAPlan | None
    tile_sched_c128a: FlashMLAPlan | None

    @property
    def bucket(self) -> WindowBucket:
        return self.native.bucket

    @property
    def layer_types(self) -> tuple[str, ...]:
        return self.native.layer_types

    @property
    def block_table(self) -> Int[Array, "requests pages"]:
        (table,) = self.common.page_tables.values()
        return table

    @property
    def slot_mapping(self) -> Int[Array, "tokens"]:
        (slots,) = self.common.slots.values()
        return slots

    @property
    def seq_lens(self) -> Int[Array, "requests"]:
        return self.common.seq_lens

    @property
    def query_start_loc(self) -> Int[Array, "starts"]:
        return self.common.query_starts

    @property
    def is_valid_token(self) -> Bool[Array, "tokens"]:
        """Has a slot."""
        return self.native.has_slot

    @property
    def token_to_req_indices(self) -> Int[Array, "tokens"]:
        """0 on padding."""
        return self.common.requests

    @property
    def decode_swa_indices(self) -> Int[Array, "decode_tokens 1 window"]:
        """Cache rows, oldest first; then -1."""
        return self.native.decode_indices[:, None]

    @property
    def decode_swa_lens(self) -> Int[Array, "decode_tokens"]:
        return self.native.decode_lens

    @property
    def prefill_swa_indices(self) -> Int[Array, "prefill_tokens window"]:
        """Row ``i`` is token ``num_decode_tokens + i``."""
        return self.native.prefill_indices

    @property
    def prefill_swa_lens(self) -> Int[Array, "prefill_tokens"]:
        return self.native.prefill_lens

    @property
    def prefill_seq_lens(self) -> Int[Array, "prefills"] | None:
        return self.native.prefill_seq_lens

    @property
    def prefill_gather_lens(self) -> Int[Array, "prefills"] | None:
        return self.native.prefill_gather_lens

    def chunks_of(self, name: str) -> tuple[Int[Array, "chunks 4"], Int[Array, ""]]:
        """Workspace chunks of a layer type, a ``WindowChunk`` per row, and how many there are."""
        return self.native.chunks_of(name)


_window_bucket = cache(WindowBucket)  # equal ones are one object


@dataclass(frozen=True, kw_only=True)
class DeepseekSparseSWAMetadataBuilder:
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
        check_sizes(
            next_n=self.next_n,
            num_sms=self.num_sms,
            heads=self.heads,
            index_topk=self.index_topk,
        )
        _ = self.native  # refuses the rest

    @cached_property
    def group(self) -> GroupSpec:
        """The window's cache."""
        return GroupSpec("window", self.page)

    @cached_property
    def native(self) -> Windows:
        """The builder underneath."""
        return Windows(
            group=self.group,
            window=self.window,
            compress_ratios=self.compress_ratios,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.max_batched_tokens,
            chunk_requests=self.chunk_requests,
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Types present, in the order of ``RATIOS``."""
        return self.native.layer_types

    def decide(self, host: HostBatch) -> WindowDecision:
        """Split, workspace chunks and bucket."""
        split = split_decodes_and_prefills(host, self.next_n)
        plans = self.native.plans(host, split.num_decodes)
        bucket = _window_bucket(
            decode_tokens=self.ladder.decode_tokens.rung(split.num_decode_tokens),
            prefills=self.ladder.prefills.rung(split.num_prefills),
            prefill_tokens=self.ladder.prefill_tokens.rung(split.num_prefill_tokens),
            chunks=self.ladder.chunks.rung(max(map(len, plans)) // len(NO_CHUNK)),
            c128a_width=self.native.c128a_width(host.max_seq_len),
        )
        return self.native.filled(bucket, split, plans)

    def build(self, common: CommonMetadata, decision: WindowDecision) -> DeepseekSparseSWAMetadata:
        """Device half. ``common`` has the group ``window``."""
        native = self.native.build(common, decision)
        plans = self._tile_plans(native, common, decision.bucket)
        return DeepseekSparseSWAMetadata(
            block_size=self.page,
            native=native,
            common=common,
            counts=native.counts,
            tile_sched_swaonly=plans.get("swaonly"),
            tile_sched_c4a=plans.get("c4a"),
            tile_sched_c128a=plans.get("c128a"),
        )

    def _tile_plans(
        self, native: WindowMetadata, common: CommonMetadata, bucket: WindowBucket
    ) -> dict[str, FlashMLAPlan]:
        """One plan per layer type: each decode token is a batch row of one query."""
        if not bucket.decode_tokens:
            return {}
        lane = jnp.arange(bucket.decode_tokens, dtype=jnp.int32)
        here = (lane < native.num_decode_tokens) & (lane < common.bucket.tokens)
        token = jnp.where(here, lane, 0)
        positions, valid = common.positions[token], here & native.has_slot[token]
        widths = {"c4a": self.index_topk, "c128a": bucket.c128a_width}
        rows = []
        for name in self.layer_types:
            extra = None
            if name in widths:
                extra = compressed_lens(positions, valid, ratio=RATIOS[name], width=widths[name])
            rows.append(sparse_row_lens(native.decode_lens, extra))

        def plan(lens):
            return balanced_plan(
                lens,
                parts=sparse_sm_parts(self.num_sms, queries=1, heads=self.heads),
                overhead=self.overhead,
                num_rows=None if self.plan_padding else native.num_decode_tokens,
            )

        # All plans in one batch: as many kernels as for one.
        plans = jax.vmap(plan)(jnp.stack(rows))
        return {
            name: jax.tree.map(lambda x, i=i: x[i], plans)
            for i, name in enumerate(self.layer_types)
        }

    def warmup_decision(self, decision: WindowDecision) -> WindowDecision:
        """The same bucket with nothing in it."""
        return WindowDecision.nothing(decision.bucket, len(self.layer_types))
