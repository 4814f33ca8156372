"""Metadata of DeepSeek V3.2: sparse attention over the latent cache, and its indexer."""

from dataclasses import dataclass, field
from functools import cached_property

import jax

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket, StepBucket, StepLadder
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.check import check
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.indexer import Indexer, IndexerDecision, IndexerMetadata
from mla_jax.metadata.split import split_decodes_and_prefills
from mla_jax.types import Array, Bool, Int

__all__ = ["V32Decision", "V32Metadata", "V32MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Decision:
    """Sizes of the step, and the indexer's part; its counts are those of the split."""

    step: StepBucket = field(metadata={"static": True})
    common_bucket: CommonBucket = field(metadata={"static": True})
    indexer: IndexerDecision

    @property
    def bucket(self) -> StepBucket:
        """What decides the program: all other static sizes follow from it."""
        return self.step


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Metadata:
    """Everything a V3.2 layer needs besides weights and caches."""

    step: StepBucket = field(metadata={"static": True})
    latent: str = field(metadata={"static": True})  # name of the latent cache's group
    common: CommonMetadata
    indexer: IndexerMetadata  # with the counts of decodes and prefills

    @property
    def positions(self) -> Int[Array, "tokens"]:
        """Absolute; 0 on padding."""
        return self.common.positions

    @property
    def real(self) -> Bool[Array, "tokens"]:
        """Not padding."""
        return self.common.real

    @property
    def slots(self) -> Int[Array, "tokens"]:
        """Latent row each token writes; -1 = none."""
        return self.common.slots[self.latent]

    @property
    def page_table(self) -> Int[Array, "requests pages"]:
        """Of the latent cache."""
        return self.common.page_tables[self.latent]


@dataclass(frozen=True, kw_only=True)
class V32MetadataBuilder(AttentionMetadataBuilder[V32Decision, V32Metadata]):
    """The groups of the latents and of the index keys, one split and one ladder for both.

    All sizes of the indexer follow from the step's, so there are as many programs as rungs of the
    ladder: with ``default_steps`` 6 for 128 requests x 4,096 tokens in chunks of 512.
    """

    ladder: StepLadder  # pages: of the latent cache
    latent: GroupSpec
    indexer: Indexer

    def __post_init__(self):
        if self.latent.name == self.indexer.group.name or self.latent.ratio != 1:
            raise MetadataError("latent group", self.latent, "a name of its own, and ratio 1")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Latents, index keys."""
        return self.latent, self.indexer.group

    @cached_property
    def _empty(self) -> dict[StepBucket, V32Decision]:
        """The empty decision of each rung."""
        found = {}
        for step in self.ladder.steps():
            longest = step.pages * self.latent.tokens
            widths = step.pages, self.indexer.group.pages_of(longest)
            bucket = self.indexer.bucket(
                decodes=step.decodes,
                prefills=step.prefills,
                prefill_tokens=step.prefill_tokens,
                width=widths[1],
            )
            found[step] = V32Decision(
                step=step,
                common_bucket=CommonBucket(
                    requests=step.requests, tokens=step.tokens, pages=widths
                ),
                indexer=IndexerDecision.nothing(bucket),
            )
        return found

    def decide(self, host: HostBatch) -> V32Decision:
        """Split, rung, chunks of index keys."""
        split = split_decodes_and_prefills(host, 1)
        step = self.ladder.step(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.latent.pages_of(host.max_seq_len),
        )
        empty = self._empty[step]
        return V32Decision(
            step=step,
            common_bucket=empty.common_bucket,
            indexer=self.indexer.decide(host, empty.indexer.bucket, split),
        )

    def build(self, common: CommonMetadata, decision: V32Decision) -> V32Metadata:
        self.check_common(common, decision)
        return V32Metadata(
            step=decision.step,
            latent=self.latent.name,
            common=common,
            indexer=self.indexer.build(common, decision.indexer),
        )

    def rungs(self) -> tuple[V32Decision, ...]:
        return tuple(self._empty.values())

    def warmup_decision(self, decision: V32Decision) -> V32Decision:
        return self._empty[decision.step]


@check.register
def _check(m: V32Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    check(m.indexer)
