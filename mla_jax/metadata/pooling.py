"""Which tokens of a step complete a group, and where the parts of that group are (DeepSeek V4).

Each group of ``ratio`` tokens becomes one compressed state when its last token arrives. Overlapping
groups take the tokens of the group before as well. What a later step needs of a group, its values
and gates, waits in a ring of each request; the tokens of this step are at hand. So a state is the
same however its sequence was cut into steps.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import CommonMetadata, GroupSpec, slot_mapping
from mla_jax.types import PAD_SLOT, Array, Bool, Int

__all__ = ["PoolMetadata", "Pools"]


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
