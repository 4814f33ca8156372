"""The life of a metadata builder: decide on the host, build on the device, once per step.

What was graph capture is here one compiled program per bucket: ``build`` is pure, its static
half comes with the decision, and a padded lane is inert.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError, UnsupportedError
from mla_jax.metadata.buckets import CommonBucket, MLABucket, MLALadder
from mla_jax.metadata.common import CommonAttentionHost, CommonAttentionMetadata, build_common
from mla_jax.metadata.mla import MLAMetadata, mla_views
from mla_jax.metadata.split import split_decodes_and_prefills
from mla_jax.types import Array, Int, cdiv

__all__ = [
    "AttentionMetadataBuilder",
    "GraphSupport",
    "MLACommonMetadataBuilder",
    "MLADecision",
    "warmup_common",
]


class GraphSupport(IntEnum):
    """Batches that one compiled program may serve; an engine takes the least of its builders."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # all queries of one length
    ALWAYS = 3


def warmup_common(bucket: CommonBucket, *, page: int) -> CommonAttentionMetadata:
    """A step of padding only: every slot is -1, so compiling with it touches no cache."""
    return build_common(
        jnp.zeros((bucket.requests + 1,), jnp.int32),
        jnp.zeros((bucket.requests,), jnp.int32),
        jnp.zeros((bucket.requests, bucket.pages), jnp.int32),
        jnp.zeros((), jnp.int32),
        bucket=bucket,
        page=page,
    )


class AttentionMetadataBuilder[D, M](ABC):
    """Builds the metadata ``M`` of one group of layers from a host decision ``D``.

    ``D`` is a pytree whose static half is the bucket and whose leaves are counts; it passes
    through ``jax.jit`` together with the common metadata.
    """

    support: GraphSupport = GraphSupport.ALWAYS
    reorder_batch_threshold: int | None = None  # None = does not care about the batch's order
    supports_update_block_table: bool = False

    @abstractmethod
    def decide(self, host: CommonAttentionHost) -> D:
        """Host work: counts and the bucket that holds them."""

    @abstractmethod
    def build(
        self,
        common: CommonAttentionMetadata,
        decision: D,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> M:
        """Device work, pure and traceable.

        ``common_prefix_len``: leading tokens that all requests share (cascade attention).
        ``fast_build``: the result serves few layers; it must be as right, but may be cheaper.
        """

    @abstractmethod
    def warmup_decision(self, decision: D) -> D:
        """The same bucket with nothing in it."""

    def build_for_warmup(self, common: CommonAttentionMetadata, decision: D) -> M:
        """What to compile a bucket with: same structure and dtypes, no work, no writes."""
        return self.build(common, self.warmup_decision(decision))

    def build_for_drafting(self, common: CommonAttentionMetadata, decision: D, *, draft: int) -> M:
        """Step ``draft`` of a chain of drafts."""
        del draft
        return self.build(common, decision, fast_build=True)

    def update_block_table(
        self, metadata: M, block_table: Int[Array, "requests pages"], slots: Int[Array, "tokens"]
    ) -> M:
        """The same step for another group of the cache, without building again."""
        raise UnsupportedError(
            f"{type(self).__name__}.update_block_table",
            None,
            ["this builder derives more than the table and the slots"],
            ["build"],
        )

    def use_cascade_attention(self, common_prefix_len: int) -> bool:
        """Whether a shared prefix is worth an attention of its own."""
        return False


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLADecision:
    """Bucket and counts of one MLA step."""

    bucket: MLABucket = field(metadata={"static": True})
    num_decodes: Int[Array | np.ndarray, ""]
    num_prefills: Int[Array | np.ndarray, ""]

    @property
    def common_bucket(self) -> CommonBucket:
        """The shapes that the common metadata must have."""
        b = self.bucket
        return CommonBucket(requests=b.requests, tokens=b.tokens, pages=b.pages)


@dataclass(frozen=True, kw_only=True)
class MLACommonMetadataBuilder(AttentionMetadataBuilder[MLADecision, MLAMetadata]):
    """Metadata of dense latent attention: decodes of one token, prefills, context chunks."""

    ladder: MLALadder
    page: int
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = True

    def decide(self, host: CommonAttentionHost) -> MLADecision:
        split = split_decodes_and_prefills(host, 1)
        prefills = slice(split.num_decodes, host.num_reqs)
        longer = host.seq_lens_cpu_upper_bound[prefills] > host.query_lens_cpu[prefills]
        bucket = self.ladder.bucket(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=cdiv(host.max_seq_len, self.page),
            context=bool(np.count_nonzero(longer)),
        )
        return MLADecision(
            bucket=bucket,
            num_decodes=np.asarray(split.num_decodes, np.int32),
            num_prefills=np.asarray(split.num_prefills, np.int32),
        )

    def build(
        self,
        common: CommonAttentionMetadata,
        decision: MLADecision,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> MLAMetadata:
        """Latent attention has one key head: a shared prefix is not treated apart.

        Raises:
            MetadataError: ``common`` has other sizes than ``decision.common_bucket``.
        """
        del common_prefix_len, fast_build
        for name in ("requests", "tokens"):
            given, wanted = (getattr(b, name) for b in (common.bucket, decision.common_bucket))
            if given != wanted:
                raise MetadataError(
                    f"{name} of the common metadata's bucket",
                    given,
                    f"{wanted}, as in the decision's",
                    "Build it for decision.common_bucket.",
                )
        return mla_views(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            jnp.asarray(decision.num_decodes),
            common.positions,
            common.slot_mapping,
            bucket=decision.bucket,
        )

    def warmup_decision(self, decision: MLADecision) -> MLADecision:
        none = np.zeros((), np.int32)
        return MLADecision(bucket=decision.bucket, num_decodes=none, num_prefills=none)

    def update_block_table(
        self,
        metadata: MLAMetadata,
        block_table: Int[Array, "requests pages"],
        slots: Int[Array, "tokens"],
    ) -> MLAMetadata:
        return metadata.with_page_table(block_table, slots)
