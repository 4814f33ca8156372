"""Metadata of DeepSeek V3.2: sparse attention over the latent cache, and its indexer."""

from dataclasses import dataclass, field, replace

import jax

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket, StepBucket
from mla_jax.metadata.builder import StepBuilder, StepDecision, StepMetadata, sizes_of
from mla_jax.metadata.check import check
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.indexer import Indexer, IndexerDecision, IndexerMetadata
from mla_jax.types import Array, Int

__all__ = ["V32Decision", "V32Metadata", "V32MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Decision(StepDecision):
    """Sizes of the step, and the indexer's part."""

    indexer: IndexerDecision


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Metadata(StepMetadata):
    """Everything a V3.2 layer needs besides weights and caches."""

    latent: str = field(metadata={"static": True})  # name of the latent cache's group
    indexer: IndexerMetadata  # with the counts of decodes and prefills

    @property
    def slots(self) -> Int[Array, "tokens"]:
        """Latent row each token writes; -1 = none."""
        return self.common.slots[self.latent]

    @property
    def page_table(self) -> Int[Array, "requests pages"]:
        """Of the latent cache."""
        return self.common.page_tables[self.latent]


@dataclass(frozen=True, kw_only=True)
class V32MetadataBuilder(StepBuilder[V32Decision, V32Metadata]):
    """The groups of the latents and of the index keys, one split and one ladder for both."""

    latent: GroupSpec
    indexer: Indexer

    def __post_init__(self):
        if self.latent.name == self.indexer.group.name or self.latent.ratio != 1:
            raise MetadataError("latent group", self.latent, "a name of its own, and ratio 1")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Latents, index keys."""
        return self.latent, self.indexer.group

    @property
    def paged(self) -> GroupSpec:
        return self.latent

    def nothing(self, step: StepBucket, common: CommonBucket, longest: int) -> V32Decision:
        bucket = self.indexer.bucket(**sizes_of(step), width=self.indexer.group.pages_of(longest))
        indexer = IndexerDecision.nothing(bucket)
        return V32Decision(step=step, common_bucket=common, indexer=indexer)

    def decide(self, host: HostBatch) -> V32Decision:
        """Split, rung, chunks of index keys."""
        split, empty = self._rung(host)
        return replace(empty, indexer=self.indexer.decide(host, empty.indexer.bucket, split))

    def build(self, common: CommonMetadata, decision: V32Decision) -> V32Metadata:
        self.check_common(common, decision)
        return V32Metadata(
            step=decision.step,
            latent=self.latent.name,
            common=common,
            indexer=self.indexer.build(common, decision.indexer),
        )


@check.register
def _check(m: V32Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    check(m.indexer)
