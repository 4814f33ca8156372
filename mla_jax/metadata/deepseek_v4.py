"""Metadata of DeepSeek V4: a window of raw tokens, compressed states, and the C4A indexer.

A model without layers of ratio 4 has no indexer; one of windows alone has no compressed states.

Each group of ``ratio`` tokens becomes one compressed state when its last token arrives. Overlapping
groups take the tokens of the group before as well. What a later step needs of a group, its values
and gates, waits in a ring of each request; the tokens of this step are at hand. So a state is the
same however its sequence was cut into steps.

Tokens carry their absolute index everywhere, so per-token arrays of the parts match.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket, StepBucket
from mla_jax.metadata.builder import StepBuilder, StepDecision, StepMetadata, sizes_of
from mla_jax.metadata.check import check, check_slots, on_host, require
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, slot_mapping
from mla_jax.metadata.indexer import Indexer, IndexerDecision, IndexerMetadata
from mla_jax.metadata.window import WindowDecision, WindowMetadata, Windows
from mla_jax.types import PAD_SLOT, Array, Bool, Int, made

__all__ = ["PoolMetadata", "Pools", "V4Decision", "V4Metadata", "V4MetadataBuilder"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PoolMetadata:
    """The groups that one step completes, ascending by token; padding behind them."""

    overlap: bool = field(metadata={"static": True})  # ``span`` is two groups, else one
    ends: Int[Array, "groups"]  # the token that completes it; -1 on padding
    first: Int[Array, "groups"]  # position of its first token: where its state is rotated
    tokens: Int[Array, "groups span"]  # this step's token at each place; -1: not of this step
    kept: Int[Array, "groups span"]  # ring row at each place; -1: of this step, or nowhere
    keep: Int[Array, "tokens"]  # ring row that each token writes; -1: no later step needs it

    @property
    def there(self) -> Bool[Array, "groups span"]:
        """Places that a token has; the first group of a sequence has no group before it."""
        return (self.tokens >= 0) | (self.kept >= 0)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Builds ``PoolMetadata`` for the layers of one ratio."""

    states: GroupSpec  # of the compressed states
    ring: GroupSpec  # of what waits: as many rows as a group takes tokens

    def __post_init__(self):
        if not self.ring.ring or self.ring.page not in (self.ratio, 2 * self.ratio):
            given = f"{self.ring} for states of {self.ratio} tokens"
            raise MetadataError("Pools.ring", given, "a ring of as many rows, or of twice as many")

    @property
    def ratio(self) -> int:
        """Tokens of a group."""
        return self.states.ratio

    @property
    def overlap(self) -> bool:
        """Whether a state also takes the tokens of the group before."""
        return self.ring.page == 2 * self.ratio

    def build(self, common: CommonMetadata) -> PoolMetadata:
        """Inside the step. At most ``tokens // ratio + requests`` groups are completed."""
        ratio, span, tokens = self.ratio, self.ring.page, common.bucket.tokens
        most = min(tokens, tokens // ratio + common.bucket.requests)
        completes = common.real & ((common.positions + 1) % ratio == 0)
        (ends,) = jnp.nonzero(completes, size=most, fill_value=PAD_SLOT)
        ends = ends.astype(jnp.int32)
        owner = common.requests[jnp.maximum(ends, 0)]
        last = jnp.where(ends >= 0, common.positions[jnp.maximum(ends, 0)], -1)
        place = (last - span + 1)[:, None] + jnp.arange(span, dtype=jnp.int32)
        there = (place >= 0) & (ends >= 0)[:, None]
        step = place - common.context_lens[owner][:, None]  # below 0: of an earlier step
        table = common.page_tables[self.ring.name]
        rows = jnp.broadcast_to(owner[:, None], place.shape)
        kept = slot_mapping(
            table,
            rows.reshape(-1),
            (place % span).reshape(-1),
            (there & (step < 0)).reshape(-1),
            page=span,
        )
        here = common.query_starts[owner][:, None] + step
        begun = common.seq_lens // ratio * ratio - ratio * self.overlap
        needed = common.positions >= begun[common.requests]
        return PoolMetadata(
            overlap=self.overlap,
            ends=ends,
            first=jnp.maximum(last + 1 - ratio, 0),
            tokens=jnp.where(there & (step >= 0), here, PAD_SLOT),
            kept=kept.reshape(place.shape),
            keep=jnp.where(needed, common.slots[self.ring.name], PAD_SLOT),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V4Decision(StepDecision):
    """Sizes of the step, and the parts of windows and indexer."""

    windows: WindowDecision
    indexer: IndexerDecision | None  # None iff the model has none


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class V4Metadata(StepMetadata):
    """Everything a V4 layer needs besides weights and caches.

    ``common`` has the page table and slots of every group; a compressed one's slot is the row of
    the state that a token completes.
    """

    windows: WindowMetadata  # with the counts of decodes and prefills
    indexer: IndexerMetadata | None  # None iff the model has none
    pools: tuple[PoolMetadata, ...]  # in the order of the builder's


@dataclass(frozen=True, kw_only=True)
class V4MetadataBuilder(StepBuilder[V4Decision, V4Metadata]):
    """Groups: window, compressed states (ratios 4 and 128), index keys (ratio 4), open groups."""

    windows: Windows
    compressed: tuple[GroupSpec, ...]
    indexer: Indexer | None
    pools: tuple[Pools, ...] = ()  # () where the model makes its states otherwise

    def __post_init__(self):
        names = [g.name for g in self.groups]
        if len(set(names)) < len(names) or self.windows.group.ratio != 1:
            raise MetadataError("cache groups", names, "different names; a window of ratio 1")

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Window, compressed states, index keys, rings of open groups."""
        keys = () if self.indexer is None else (self.indexer.group,)
        rings = (pool.ring for pool in self.pools)
        return (self.windows.group, *self.compressed, *keys, *rings)

    @property
    def paged(self) -> GroupSpec:
        return self.windows.group

    def programs(
        self, step: StepBucket, common: CommonBucket, longest: int
    ) -> tuple[V4Decision, ...]:
        """One for each rung."""
        sizes, indexer = sizes_of(step), None
        windows = self.windows.bucket(**sizes, max_seq_len=longest)
        if self.indexer is not None:
            width = self.indexer.group.pages_of(longest)
            indexer = IndexerDecision.nothing(self.indexer.bucket(**sizes, width=width))
        empty = V4Decision(
            step=step,
            common_bucket=common,
            windows=WindowDecision.nothing(windows, len(self.windows.layer_types)),
            indexer=indexer,
        )
        return (empty,)

    def decide(self, host: HostBatch) -> V4Decision:
        """Split, rung, workspace chunks of each layer type, chunks of index keys."""
        split, step = self._rung(host)
        empty = self._empty[step]
        windows, indexer = self.windows.decide(host, empty.windows.bucket, split), None
        if self.indexer is not None and empty.indexer is not None:
            indexer = self.indexer.decide(host, empty.indexer.bucket, split)
        return made(
            V4Decision,
            step=step,
            common_bucket=empty.common_bucket,
            windows=windows,
            indexer=indexer,
        )

    def build(self, common: CommonMetadata, decision: V4Decision) -> V4Metadata:
        self.check_common(common, decision)
        indexer = None
        if self.indexer is not None and decision.indexer is not None:
            indexer = self.indexer.build(common, decision.indexer)
        return V4Metadata(
            step=decision.step,
            common=common,
            windows=self.windows.build(common, decision.windows),
            indexer=indexer,
            pools=tuple(pool.build(common) for pool in self.pools),
        )


@check.register
def _check(m: V4Metadata, *, num_pages: int | None = None, **_) -> None:
    check(m.common, num_pages=num_pages)
    check(m.windows)
    if m.indexer is not None:
        check(m.indexer)
    for pool in m.pools:
        check(pool)


@check.register
def _check_pool(given: PoolMetadata, **_) -> None:
    m = on_host(given)
    padding = (m.ends < 0)[:, None]
    both = (m.tokens >= 0) & (m.kept >= 0)
    require("tokens of a group", m.tokens, ~both, "of this step, or kept from an earlier one")
    require("tokens of a group", m.tokens, ~padding | (m.tokens < 0), "-1 on padding")
    require("kept rows of a group", m.kept, ~padding | (m.kept < 0), "-1 on padding")
    ends = m.tokens[:, -1]
    require("last token of a group", ends, ends == m.ends, "the one that completes it")
    check_slots(m.keep)
