"""Metadata of DeepSeek V3.2: sparse attention over the latent cache, and its indexer.

A step none of whose sequences is longer than the selection may be dense: the host decides, and such
a step has metadata of dense attention beside the slots of its index keys, and nothing to select.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import (
    CONTEXT_ROWS,
    CommonBucket,
    MLABucket,
    StepBucket,
    dense_bucket,
)
from mla_jax.metadata.builder import StepBuilder, StepDecision, StepMetadata, sizes_of
from mla_jax.metadata.check import check
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.indexer import Indexer, IndexerDecision, IndexerMetadata
from mla_jax.metadata.mla import MLAMetadata, mla_views
from mla_jax.metadata.split import DecodePrefillSplit
from mla_jax.types import Array, Int, made

__all__ = ["V32Decision", "V32Metadata", "V32MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Decision(StepDecision):
    """Sizes of the step, and the indexer's part; its counts are those of the split."""

    dense: MLABucket | None = field(metadata={"static": True})  # None: tokens are selected
    indexer: IndexerDecision

    @property
    def bucket(self) -> StepBucket:
        """A dense step and one that selects are two programs of a rung."""
        return self.dense or self.step


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V32Metadata(StepMetadata):
    """Everything a V3.2 layer needs besides weights and caches."""

    latent: str = field(metadata={"static": True})  # name of the latent cache's group
    indexer: IndexerMetadata  # with the counts of decodes and prefills; in a dense step slots only
    dense: MLAMetadata | None  # of a step that selects nothing; None: tokens are selected

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
    """The groups of the latents and of the index keys, one split and one ladder for both.

    All sizes of the indexer follow from the step's, so each rung has one program. With ``topk`` it
    has a dense program too, and no other one where nothing is ever selected.
    """

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

    @property
    def paged(self) -> GroupSpec:
        return self.latent

    def programs(
        self, step: StepBucket, common: CommonBucket, longest: int
    ) -> tuple[V32Decision, ...]:
        """A dense one, and one that selects, as far as steps of the rung can take them."""
        kinds: list[MLABucket | None] = []
        if self.topk is not None:
            kinds.append(dense_bucket(step, context_rows=self.context_rows))
        sometimes = self.absorb is not None and step.prefills > 0
        if self.topk is None or longest > self.topk or sometimes:
            kinds.append(None)
        width = self.indexer.group.pages_of(longest)
        nothing = dict.fromkeys(sizes_of(step), 0)
        return tuple(
            V32Decision(
                step=step,
                dense=dense,
                common_bucket=common,
                indexer=IndexerDecision.nothing(
                    self.indexer.bucket(**(nothing if dense else sizes_of(step)), width=width)
                ),
            )
            for dense in kinds
        )

    def decide(self, host: HostBatch) -> V32Decision:
        """Split, rung, whether anything is selected, chunks of index keys."""
        split, step = self._rung(host)
        if self._dense(host, split):
            empty = self._empty[dense_bucket(step, context_rows=self.context_rows)]
            indexer = self.indexer.filled(empty.indexer.bucket, split, [])
        else:
            empty = self._empty[step]
            indexer = self.indexer.decide(host, empty.indexer.bucket, split)
        return made(
            V32Decision,
            step=step,
            common_bucket=empty.common_bucket,
            dense=empty.dense,
            indexer=indexer,
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


@check.register
def _check(m: V32Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    if m.dense is None:
        check(m.indexer)
        return
    page = next(group.page for group in m.common.groups if group.name == m.latent)
    check(m.dense, page=page, num_pages=num_pages)
