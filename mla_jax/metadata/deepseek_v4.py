"""Metadata of DeepSeek V4: a window of raw tokens, compressed states, and the C4A indexer.

Tokens carry their absolute index everywhere, so per-token arrays of the parts match.
"""

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
from mla_jax.metadata.window import WindowDecision, WindowMetadata, Windows
from mla_jax.types import Array, Bool, Int

__all__ = ["V4Decision", "V4Metadata", "V4MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V4Decision:
    """Sizes of the step, and the parts of windows and indexer."""

    step: StepBucket = field(metadata={"static": True})
    common_bucket: CommonBucket = field(metadata={"static": True})
    windows: WindowDecision
    indexer: IndexerDecision

    @property
    def bucket(self) -> StepBucket:
        """What decides the program: all other static sizes follow from it."""
        return self.step

    @property
    def decodes_only(self) -> bool:
        """No prefills, hence no chunks of cached context."""
        return self.step.prefills == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V4Metadata:
    """Everything a V4 layer needs besides weights and caches.

    ``common`` has the page table and slots of every group; a compressed one's slot is the row of
    the state that a token completes.
    """

    step: StepBucket = field(metadata={"static": True})
    common: CommonMetadata
    windows: WindowMetadata  # with the counts of decodes and prefills
    indexer: IndexerMetadata

    @property
    def positions(self) -> Int[Array, "tokens"]:
        """Absolute; 0 on padding."""
        return self.common.positions

    @property
    def real(self) -> Bool[Array, "tokens"]:
        """Not padding."""
        return self.common.real


@dataclass(frozen=True, kw_only=True)
class V4MetadataBuilder(AttentionMetadataBuilder[V4Decision, V4Metadata]):
    """Groups: the window, compressed states (ratios 4 and 128), index keys (ratio 4).

    All sizes of the parts follow from the step's, so there are as many programs as rungs of the
    ladder: with ``default_steps`` 6 for 128 requests x 4,096 tokens in chunks of 512.
    """

    ladder: StepLadder  # pages: of the window's cache
    windows: Windows
    compressed: tuple[GroupSpec, ...]
    indexer: Indexer

    def __post_init__(self):
        names = [g.name for g in self.groups]
        if len(set(names)) < len(names) or self.windows.group.ratio != 1:
            raise MetadataError("cache groups", names, "different names; a window of ratio 1")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Window, compressed states, index keys."""
        return (self.windows.group, *self.compressed, self.indexer.group)

    @cached_property
    def _empty(self) -> dict[StepBucket, V4Decision]:
        """The empty decision of each rung."""
        found = {}
        for step in self.ladder.steps():
            longest = step.pages * self.windows.group.tokens
            widths = tuple(g.pages_of(longest) for g in self.groups)
            sizes = {
                "decodes": step.decodes,
                "prefills": step.prefills,
                "prefill_tokens": step.prefill_tokens,
            }
            windows = self.windows.bucket(**sizes, max_seq_len=longest)
            found[step] = V4Decision(
                step=step,
                common_bucket=CommonBucket(
                    requests=step.requests, tokens=step.tokens, pages=widths
                ),
                windows=WindowDecision.nothing(windows, len(self.windows.layer_types)),
                indexer=IndexerDecision.nothing(self.indexer.bucket(**sizes, width=widths[-1])),
            )
        return found

    def decide(self, host: HostBatch) -> V4Decision:
        """Split, rung, workspace chunks of each layer type, chunks of index keys."""
        split = split_decodes_and_prefills(host, 1)
        step = self.ladder.step(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.windows.group.pages_of(host.max_seq_len),
        )
        empty = self._empty[step]
        return V4Decision(
            step=step,
            common_bucket=empty.common_bucket,
            windows=self.windows.decide(host, empty.windows.bucket, split),
            indexer=self.indexer.decide(host, empty.indexer.bucket, split),
        )

    def build(self, common: CommonMetadata, decision: V4Decision) -> V4Metadata:
        self.check_common(common, decision)
        return V4Metadata(
            step=decision.step,
            common=common,
            windows=self.windows.build(common, decision.windows),
            indexer=self.indexer.build(common, decision.indexer),
        )

    def rungs(self) -> tuple[V4Decision, ...]:
        return tuple(self._empty.values())

    def warmup_decision(self, decision: V4Decision) -> V4Decision:
        return self._empty[decision.step]


@check.register
def _check(m: V4Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    check(m.windows)
    check(m.indexer)
