"""A step's facts under upstream's names: one cache group, host and device."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import CommonMetadata, HostBatch
from mla_jax.metadata.context_parallel import WHOLE, ContextShard, dcp_local_seq_lens
from mla_jax.types import PAD_SLOT, Array, Bool, Int

__all__ = ["CommonAttentionMetadata"]


def _pad(array, size: int, mode: Literal["constant", "edge"] = "constant") -> Any:
    """Grow axis 0 to ``size`` with zeros (or the last entry), on the host or the device."""
    module = np if isinstance(array, np.ndarray) else jnp
    widths = [(0, size - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return module.pad(array, widths, mode=mode)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata:
    """What ``CommonMetadata`` says of one cache group, and what only upstream's layers ask.

    Only ``block_table_tensor`` and ``slot_mapping`` differ between groups of a cache.
    """

    bucket: CommonBucket = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})
    query_start_loc: Int[Array, "starts"]  # exclusive sum of query lengths
    seq_lens: Int[Array, "requests"]  # including this step's tokens; 0 = padding
    block_table_tensor: Int[Array, "requests pages"]  # page ids; 0 where unused
    slot_mapping: Int[Array, "tokens"]  # cache row each token writes; -1 = none
    positions: Int[Array, "tokens"]  # absolute; 0 on padding, so test is_valid_token first
    token_to_req: Int[Array, "tokens"]  # 0 on padding
    num_reqs: Int[Array, ""]
    num_actual_tokens: Int[Array, ""]
    max_query_len: Int[Array, ""]
    max_seq_len: Int[Array, ""]
    dcp_local_seq_lens: Int[Array, "requests"] | None  # None = no context parallelism
    encoder_seq_lens: Int[Array, "requests"] | None  # None = no cross attention
    logits_indices_padded: Int[Array, "logits"] | None  # None = every token may have logits
    num_logits_indices: Int[Array, ""] | None  # None exactly with the indices

    @classmethod
    def of(
        cls,
        common: CommonMetadata,
        group: str,
        *,
        causal: bool = True,
        shard: ContextShard = WHOLE,
        encoder_seq_lens: Int[Array, "requests"] | None = None,
        logits_indices_padded: Int[Array, "logits"] | None = None,
        num_logits_indices: Int[Array, ""] | None = None,
    ) -> "CommonAttentionMetadata":
        """The step as the layers of this cache group see it."""
        at = common.groups.index(common.group(group))
        local = None if shard is WHOLE else dcp_local_seq_lens(common.seq_lens, shard)
        return cls(
            bucket=replace(common.bucket, pages=(common.bucket.pages[at],)),
            causal=causal,
            query_start_loc=common.query_starts,
            seq_lens=common.seq_lens,
            block_table_tensor=common.page_tables[group],
            slot_mapping=common.slots[group],
            positions=common.positions,
            token_to_req=common.requests,
            num_reqs=common.num_requests,
            num_actual_tokens=common.num_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            dcp_local_seq_lens=local,
            encoder_seq_lens=encoder_seq_lens,
            logits_indices_padded=logits_indices_padded,
            num_logits_indices=num_logits_indices,
        )

    @property
    def batch_size(self) -> int:
        """Requests of the bucket, padding included."""
        return self.seq_lens.shape[0]

    def query_lens(self) -> Int[Array, "requests"]:
        """Tokens of each request; 0 = padding."""
        return jnp.diff(self.query_start_loc)

    def num_computed_tokens(self) -> Int[Array, "requests"]:
        """Cached tokens before this step."""
        return self.seq_lens - self.query_lens()

    def is_valid_token(self) -> Bool[Array, "tokens"]:
        """Not padding."""
        return jnp.arange(self.bucket.tokens, dtype=jnp.int32) < self.num_actual_tokens

    def with_block_table(
        self, block_table: Int[Array, "requests pages"], slots: Int[Array, "tokens"]
    ) -> "CommonAttentionMetadata":
        """The same step for another group of the cache."""
        bucket = replace(self.bucket, pages=(block_table.shape[1],))
        return replace(self, bucket=bucket, block_table_tensor=block_table, slot_mapping=slots)

    def unpadded(self, host: HostBatch) -> "CommonAttentionMetadata":
        """The real rows only. Host side: its shapes differ from step to step."""
        r, t = host.num_requests, host.num_tokens
        return self._resized(replace(self.bucket, requests=r, tokens=t), lambda x, n, _: x[:n])

    def pad_to(self, bucket: CommonBucket) -> "CommonAttentionMetadata":
        """A larger bucket by the padding rules: repeated starts, lengths 0, page 0, slot -1."""
        have = self.bucket
        bucket.check_holds(requests=have.requests, tokens=have.tokens, pages=have.pages)
        padded = self._resized(bucket, _pad)
        real = np.arange(bucket.tokens) < have.tokens
        module = np if isinstance(padded.slot_mapping, np.ndarray) else jnp
        slots = module.where(real, padded.slot_mapping, module.int32(PAD_SLOT))
        table = padded.block_table_tensor
        table = module.pad(table, ((0, 0), (0, bucket.pages[0] - have.pages[0])))
        return replace(padded, slot_mapping=slots, block_table_tensor=table)

    def _resized(self, bucket: CommonBucket, resize) -> "CommonAttentionMetadata":
        """Apply ``resize(array, size, mode)`` to the array of every request and token."""
        per_request = ("seq_lens", "block_table_tensor", "dcp_local_seq_lens", "encoder_seq_lens")
        per_token = ("slot_mapping", "positions", "token_to_req")
        sizes: dict[str, int] = dict.fromkeys(per_request, bucket.requests)
        sizes |= dict.fromkeys(per_token, bucket.tokens)
        arrays = {n: getattr(self, n) for n in sizes}
        changed = {n: resize(a, sizes[n], "constant") for n, a in arrays.items() if a is not None}
        starts = resize(self.query_start_loc, bucket.requests + 1, "edge")
        return replace(self, bucket=bucket, query_start_loc=starts, **changed)
