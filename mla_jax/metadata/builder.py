"""The life of a metadata builder: decide on the host, build on the device, once per step.

``build`` is pure, its static half comes with the decision, and a padded lane is inert: one
compiled program per bucket serves every batch of it. ``rungs`` says beforehand which.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket, MLABucket, MLALadder, StepBucket, StepLadder
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.mla import MLAMetadata, mla_views
from mla_jax.metadata.split import DecodePrefillSplit, split_decodes_and_prefills
from mla_jax.types import Array, Bool, Int, made

__all__ = [
    "AttentionMetadataBuilder",
    "Decision",
    "MLADecision",
    "MLAMetadataBuilder",
    "StepBuilder",
    "StepDecision",
    "StepMetadata",
    "sizes_of",
]


class Decision(Protocol):
    """What the host decides: a pytree, its static half the bucket, its leaves int32 of numpy.

    One of which ``decodes_only`` is true has nothing that a layer loops over: its program is
    compiled so (``model.step.UNROLLED``). A decision need not say it.
    """

    @property
    def common_bucket(self) -> CommonBucket:
        """The shapes that the common metadata must have."""
        ...


class AttentionMetadataBuilder[D: Decision, M](ABC):
    """Builds the metadata ``M`` of a family's layers from a host decision ``D``.

    A decision passes through ``jax.jit`` together with the common metadata. A decode is a leading
    request of one new token, be it the first of a prompt; ``decide`` makes the only split.
    """

    @property
    @abstractmethod
    def groups(self) -> tuple[GroupSpec, ...]:
        """The cache groups whose page tables ``common`` must have, in the bucket's order."""

    @abstractmethod
    def decide(self, host: HostBatch) -> D:
        """Host work: counts, plans, and the bucket that holds them.

        Raises:
            MetadataError: no rung holds the step.
        """

    @abstractmethod
    def build(self, common: CommonMetadata, decision: D) -> M:
        """Device work, pure and traceable.

        Raises:
            MetadataError: ``common`` has other sizes than ``decision.common_bucket``.
        """

    @abstractmethod
    def rungs(self) -> tuple[D, ...]:
        """An empty decision for every bucket that ``decide`` can return, each once."""

    @abstractmethod
    def warmup_decision(self, decision: D) -> D:
        """The same bucket with nothing in it."""

    def check_common(self, common: CommonMetadata, decision: D) -> None:
        """Refuse common metadata that was not built for this decision."""
        wanted = decision.common_bucket
        for name in ("requests", "tokens", "pages"):
            given, want = getattr(common.bucket, name), getattr(wanted, name)
            if given != want:
                raise MetadataError(
                    f"{name} of the common metadata's bucket",
                    given,
                    f"{want}, as in the decision's",
                    "Build it for decision.common_bucket.",
                )


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """Sizes of a step; families add their parts, whose counts are those of the split."""

    step: StepBucket = field(metadata={"static": True})
    common_bucket: CommonBucket = field(metadata={"static": True})

    @property
    def bucket(self) -> StepBucket:
        """What decides the program: all other static sizes follow from it.

        The rung itself, in a family with one program for each rung; others return a type of step
        that differs between the programs of a rung.
        """
        return self.step

    @property
    def decodes_only(self) -> bool:
        """No prefills."""
        return self.step.prefills == 0


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
    """A builder whose programs are those that a family names for each rung of a ladder.

    With ``default_steps`` these are 6 rungs for 128 requests x 4,096 tokens in chunks of 512.
    """

    ladder: StepLadder  # pages: of ``paged``

    @property
    @abstractmethod
    def paged(self) -> GroupSpec:
        """The group whose page-table width is that of a rung."""

    @abstractmethod
    def programs(self, step: StepBucket, common: CommonBucket, longest: int) -> tuple[D, ...]:
        """The empty decisions of a rung, whose requests have at most ``longest`` tokens: one for
        each program that steps of this rung can take, with different ``bucket``.
        """

    @cached_property
    def _empty(self) -> dict[StepBucket, D]:
        """The empty decision of each program, by its bucket."""
        found = {}
        for step in self.ladder.steps():
            longest = step.pages * self.paged.tokens
            pages = tuple(g.pages_of(longest) for g in self.groups)
            common = CommonBucket(requests=step.requests, tokens=step.tokens, pages=pages)
            found |= {empty.bucket: empty for empty in self.programs(step, common, longest)}
        return found

    def _rung(self, host: HostBatch) -> tuple[DecodePrefillSplit, StepBucket]:
        """The split of a batch, and the smallest rung that holds it."""
        split = split_decodes_and_prefills(host, 1)
        step = self.ladder.step(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.paged.pages_of(host.max_seq_len),
        )
        return split, step

    def rungs(self) -> tuple[D, ...]:
        return tuple(self._empty.values())

    def warmup_decision(self, decision: D) -> D:
        return self._empty[decision.bucket]


def sizes_of(step: StepBucket) -> dict[str, int]:
    """The sizes from which the parts of a builder derive theirs."""
    return {
        "decodes": step.decodes,
        "prefills": step.prefills,
        "prefill_tokens": step.prefill_tokens,
    }


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
        return self.bucket.common

    @property
    def decodes_only(self) -> bool:
        """No prefills, hence no chunks of cached context."""
        return self.bucket.prefills == 0


@dataclass(frozen=True, kw_only=True)
class MLAMetadataBuilder(AttentionMetadataBuilder[MLADecision, MLAMetadata]):
    """Metadata of dense latent attention: decodes of one token, prefills, context chunks.

    ``absorb(queries, contexts)`` of all prefills of a step says whether they run over their
    pages, as rows of at most ``absorb_run`` queries: it returns that number, or 0.
    """

    ladder: MLALadder
    group: GroupSpec
    absorb: Callable[[list[int], list[int]], int] | None = None  # None = never
    absorb_run: int = 0  # 0 iff absorb is None

    def __post_init__(self):
        if (self.absorb is None) != (self.absorb_run == 0) or self.absorb_run < 0:
            raise MetadataError(
                "absorb_run",
                self.absorb_run,
                "0" if self.absorb is None else "what absorb returns, above 0",
            )
        if self.group.ratio != 1:
            raise MetadataError("ratio of the latent group", self.group.ratio, 1)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The latent cache."""
        return (self.group,)

    def decide(self, host: HostBatch) -> MLADecision:
        """Split, rungs, and whether the prefills run over their pages."""
        split = split_decodes_and_prefills(host, 1)
        bucket = self.ladder.bucket(
            decodes=split.num_decodes,
            prefills=split.num_prefills,
            prefill_tokens=split.num_prefill_tokens,
            pages=self.group.pages_of(host.max_seq_len),
            absorb=self._absorb(host, split.num_decodes),
        )
        return made(
            MLADecision,
            bucket=bucket,
            num_decodes=np.asarray(split.num_decodes, np.int32),
            num_prefills=np.asarray(split.num_prefills, np.int32),
        )

    def _absorb(self, host: HostBatch, decodes: int) -> int:
        if self.absorb is None or decodes == host.num_requests:
            return 0
        queries, keys = host.lens_from(decodes)
        found = self.absorb(queries, [k - q for q, k in zip(queries, keys, strict=True)])
        if found not in (0, self.absorb_run):
            raise MetadataError("absorb's run length", found, f"0 or {self.absorb_run}")
        return found

    def build(self, common: CommonMetadata, decision: MLADecision) -> MLAMetadata:
        self.check_common(common, decision)
        num_decodes = jnp.asarray(decision.num_decodes)
        return mla_views(common, num_decodes, bucket=decision.bucket, group=self.group.name)

    def rungs(self) -> tuple[MLADecision, ...]:
        return tuple(map(_nothing, self.ladder.buckets(absorb=self.absorb_run)))

    def warmup_decision(self, decision: MLADecision) -> MLADecision:
        return _nothing(decision.bucket)


def _nothing(bucket: MLABucket) -> MLADecision:
    none = np.zeros((), np.int32)
    return MLADecision(bucket=bucket, num_decodes=none, num_prefills=none)
