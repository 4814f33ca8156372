"""Metadata of DeepSeek V3.2: sparse attention over the latent cache, and its indexer.

A step none of whose sequences is longer than the selection may be dense: the host decides, and such
a step has metadata of dense attention beside the slots of its index keys, and nothing to select.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import jax

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import (
    CONTEXT_ROWS,
    CommonBucket,
    MLABucket,
    StepBucket,
    StepLadder,
    dense_bucket,
)
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.check import check
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.indexer import Indexer, IndexerDecision, IndexerMetadata
from mla_jax.metadata.mla import MLAMetadata, mla_views
from mla_jax.metadata.split import DecodePrefillSplit, split_decodes_and_prefills
from mla_jax.types import Array, Bool, Int

__all__ = ["V32Decision", "V32Metadata", "V32MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Decision:
    """Sizes of the step, and the indexer's part; its counts are those of the split."""

    step: StepBucket = field(metadata={"static": True})
    dense: MLABucket | None = field(metadata={"static": True})  # None: tokens are selected
    common_bucket: CommonBucket = field(metadata={"static": True})
    indexer: IndexerDecision

    @property
    def bucket(self) -> StepBucket:
        """What decides the program: all other static sizes follow from it."""
        return self.dense or self.step


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Metadata:
    """Everything a V3.2 layer needs besides weights and caches."""

    step: StepBucket = field(metadata={"static": True})
    latent: str = field(metadata={"static": True})  # name of the latent cache's group
    common: CommonMetadata
    indexer: IndexerMetadata  # with the counts of decodes and prefills; in a dense step slots only
    dense: MLAMetadata | None  # of a step that selects nothing; None: tokens are selected

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
    ladder: with ``default_steps`` 6 for 128 requests x 4,096 tokens in chunks of 512. With ``topk``
    a rung has a dense program too, and no other one where nothing is ever selected.
    """

    ladder: StepLadder  # pages: of the latent cache
    latent: GroupSpec
    indexer: Indexer
    topk: int | None = None  # up to this length sequences take dense attention; None = never
    context_rows: int = CONTEXT_ROWS  # workspace rows of a dense prefill's cached context
    absorb: Callable[[list[int], list[int]], int] | None = None
    """Of all prefills' queries and contexts: above 0 if they are faster absorbed, hence sparse."""

    def __post_init__(self):
        if self.latent.name == self.indexer.group.name or self.latent.ratio != 1:
            raise MetadataError("latent group", self.latent, "a name of its own, and ratio 1")
        if (self.topk is not None and self.topk < 1) or self.context_rows < 1:
            given = f"topk={self.topk}, context_rows={self.context_rows}"
            raise MetadataError("sizes of dense steps", given, "1 or more (topk may be None)")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Latents, index keys."""
        return self.latent, self.indexer.group

    @cached_property
    def _empty(self) -> dict[StepBucket, V32Decision]:
        """The empty decision of each rung, by its bucket."""
        found = {}
        for step in self.ladder.steps():
            longest = step.pages * self.latent.tokens
            if self.topk is not None:
                bucket = dense_bucket(step, context_rows=self.context_rows)
                found[bucket] = self._nothing(step, bucket)
            always = self.absorb is None or not step.prefills
            if self.topk is None or longest > self.topk or not always:
                found[step] = self._nothing(step, None)
        return found

    def _nothing(self, step: StepBucket, dense: MLABucket | None) -> V32Decision:
        width = self.indexer.group.pages_of(step.pages * self.latent.tokens)
        selects = dense is None
        bucket = self.indexer.bucket(
            decodes=step.decodes * selects,
            prefills=step.prefills * selects,
            prefill_tokens=step.prefill_tokens * selects,
            width=width,
        )
        return V32Decision(
            step=step,
            dense=dense,
            common_bucket=CommonBucket(
                requests=step.requests, tokens=step.tokens, pages=(step.pages, width)
            ),
            indexer=IndexerDecision.nothing(bucket),
        )

    def decide(self, host: HostBatch) -> V32Decision:
        """Split, rung, whether anything is selected, chunks of index keys."""
        split = split_decodes_and_prefills(host, 1)
        step = self.ladder.step(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.latent.pages_of(host.max_seq_len),
        )
        dense = None
        if self._dense(host, split):
            dense = dense_bucket(step, context_rows=self.context_rows)
        empty = self._empty[dense or step]
        bucket = empty.indexer.bucket
        return V32Decision(
            step=step,
            dense=dense,
            common_bucket=empty.common_bucket,
            indexer=self.indexer.decide(host, bucket, split)
            if dense is None
            else self.indexer.filled(bucket, split, []),
        )

    def _dense(self, host: HostBatch, split: DecodePrefillSplit) -> bool:
        """No sequence is longer than the selection, and no prefill is faster absorbed."""
        if self.topk is None or host.max_seq_len > self.topk:
            return False
        if self.absorb is None or not split.num_prefills:
            return True
        queries, keys = host.lens_from(split.num_decodes)
        return not self.absorb(queries, [k - q for q, k in zip(queries, keys, strict=True)])

    def build(self, common: CommonMetadata, decision: V32Decision) -> V32Metadata:
        self.check_common(common, decision)
        indexer, dense = self.indexer.build(common, decision.indexer), None
        if decision.dense is not None:
            given = {"bucket": decision.dense, "group": self.latent.name}
            dense = mla_views(common, indexer.counts[0], **given)
        return V32Metadata(
            step=decision.step,
            latent=self.latent.name,
            common=common,
            indexer=indexer,
            dense=dense,
        )

    def rungs(self) -> tuple[V32Decision, ...]:
        return tuple(self._empty.values())

    def warmup_decision(self, decision: V32Decision) -> V32Decision:
        return self._empty[decision.bucket]


@check.register
def _check(m: V32Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    if m.dense is None:
        check(m.indexer)
        return
    page = next(group.page for group in m.common.groups if group.name == m.latent)
    check(m.dense, page=page, num_pages=num_pages)
