"""What the builders of V3.2 and V4 share: one ladder of steps from which all other sizes follow."""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

from mla_jax.metadata.buckets import CommonBucket, StepBucket, StepLadder
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.split import DecodePrefillSplit, split_decodes_and_prefills
from mla_jax.types import Array, Bool, Int

__all__ = ["StepBuilder", "StepDecision", "StepMetadata", "sizes_of"]


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """Sizes of a step; families add their parts, whose counts are those of the split."""

    step: StepBucket = field(metadata={"static": True})
    common_bucket: CommonBucket = field(metadata={"static": True})

    @property
    def bucket(self) -> StepBucket:
        """What decides the program: all other static sizes follow from it."""
        return self.step


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """A step with the page table and slots of every group; families add their parts."""

    step: StepBucket = field(metadata={"static": True})
    common: CommonMetadata

    @property
    def positions(self) -> Int[Array, "tokens"]:
        """Absolute; 0 on padding."""
        return self.common.positions

    @property
    def real(self) -> Bool[Array, "tokens"]:
        """Not padding."""
        return self.common.real


@dataclass(frozen=True, kw_only=True)
class StepBuilder[D: StepDecision, M](AttentionMetadataBuilder[D, M]):
    """A builder with as many programs as its ladder has rungs.

    With ``default_steps`` these are 6 for 128 requests x 4,096 tokens in chunks of 512.
    """

    ladder: StepLadder  # pages: of ``paged``

    @property
    @abstractmethod
    def paged(self) -> GroupSpec:
        """The group whose page-table width is that of a rung."""

    @abstractmethod
    def nothing(self, step: StepBucket, common: CommonBucket, longest: int) -> D:
        """The empty decision of a rung, whose requests have at most ``longest`` tokens."""

    @cached_property
    def _empty(self) -> dict[StepBucket, D]:
        found = {}
        for step in self.ladder.steps():
            longest = step.pages * self.paged.tokens
            pages = tuple(g.pages_of(longest) for g in self.groups)
            common = CommonBucket(requests=step.requests, tokens=step.tokens, pages=pages)
            found[step] = self.nothing(step, common, longest)
        return found

    def _rung(self, host: HostBatch) -> tuple[DecodePrefillSplit, D]:
        """The split of a batch, and the empty decision of the smallest rung that holds it."""
        split = split_decodes_and_prefills(host, 1)
        step = self.ladder.step(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.paged.pages_of(host.max_seq_len),
        )
        return split, self._empty[step]

    def rungs(self) -> tuple[D, ...]:
        return tuple(self._empty.values())

    def warmup_decision(self, decision: D) -> D:
        return self._empty[decision.step]


def sizes_of(step: StepBucket) -> dict[str, int]:
    """The sizes from which the parts of a builder derive theirs."""
    return {
        "decodes": step.decodes,
        "prefills": step.prefills,
        "prefill_tokens": step.prefill_tokens,
    }
