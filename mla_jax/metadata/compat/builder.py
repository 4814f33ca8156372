"""The life of a builder as upstream lives it, on top of a builder of ours."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from mla_jax.metadata.builder import AttentionMetadataBuilder, Decision, MLADecision
from mla_jax.metadata.common import CommonMetadata, HostBatch, warmup_common
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.types import Array, Int

__all__ = ["UpstreamBuilder", "UpstreamMLABuilder"]


@dataclass(frozen=True, kw_only=True)
class UpstreamBuilder[D: Decision, M]:
    """Upstream's calls. What was graph capture is here one compiled program per bucket."""

    native: AttentionMetadataBuilder[D, M]
    reorder_batch_threshold: int | None = 1  # the batch is ordered, decodes of one token first
    supports_update_block_table: bool = False

    def build(
        self,
        common_prefix_len: int,
        common: CommonMetadata,
        decision: D,
        *,
        fast_build: bool = False,
    ) -> M:
        """Latent attention has one key head: a shared prefix is not treated apart.

        ``fast_build`` asks for a result that serves few layers; ours is no cheaper.
        """
        del common_prefix_len, fast_build
        return self.native.build(common, decision)

    def decide(self, host: HostBatch) -> D:
        return self.native.decide(host)

    def build_for_cudagraph_capture(self, decision: D) -> M:
        """What to compile a bucket with: same structure and dtypes, no work, no writes."""
        common = warmup_common(decision.common_bucket, self.native.groups)
        return self.native.build(common, self.native.warmup_decision(decision))

    def build_for_drafting(self, common: CommonMetadata, decision: D, *, draft: int) -> M:
        """Step ``draft`` of a chain of drafts."""
        del draft
        return self.build(0, common, decision, fast_build=True)

    def use_cascade_attention(self, common_prefix_len: int) -> bool:
        """Whether a shared prefix is worth an attention of its own: never."""
        del common_prefix_len
        return False


@dataclass(frozen=True, kw_only=True)
class UpstreamMLABuilder(UpstreamBuilder[MLADecision, MLAMetadata]):
    """Of dense latent attention, whose metadata can change tables without building again."""

    supports_update_block_table: bool = True

    def update_block_table(
        self,
        metadata: MLAMetadata,
        block_table: Int[Array, "requests pages"],
        slots: Int[Array, "tokens"],
    ) -> MLAMetadata:
        """The same step for another group of the cache."""
        decode, context = metadata.decode, metadata.context
        if decode is not None:
            rows = metadata.decode_requests
            table = block_table[: metadata.bucket.decodes] if rows is None else block_table[rows]
            decode = replace(decode, page_table=table)
        if context is not None:
            rows = metadata.num_decodes + jnp.arange(metadata.bucket.prefills, dtype=jnp.int32)
            context = replace(context, page_table=block_table[rows])
        return replace(metadata, slots=slots, decode=decode, context=context)
