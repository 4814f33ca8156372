"""Context parallelism: one rank's share of a sequence dealt out in runs of tokens."""

from dataclasses import dataclass

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.types import Array, Int

__all__ = ["WHOLE", "ContextShard", "dcp_local_seq_lens"]


@dataclass(frozen=True, kw_only=True)
class ContextShard:
    """Rank ``rank`` of ``ranks`` that are dealt runs of ``interleave`` tokens in turn.

    Token ``p`` lives on rank ``p // interleave % ranks``. A page of ``page`` tokens on each rank
    together covers ``page * ranks`` consecutive positions, one entry of the page table.
    """

    ranks: int
    rank: int | Int[Array, ""]  # traced where all ranks run one program
    interleave: int

    def __post_init__(self):
        if self.ranks < 1 or self.interleave < 1:
            given = {"ranks": self.ranks, "interleave": self.interleave}
            raise MetadataError("context shard", given, "positive sizes")
        if isinstance(self.rank, int) and not 0 <= self.rank < self.ranks:
            raise MetadataError("context shard rank", self.rank, f"0 to {self.ranks - 1}")

    def check_page(self, page: int) -> None:
        """Refuse a page that would cut a run in two."""
        if self.ranks > 1 and page % self.interleave:
            raise MetadataError(
                "page under context parallelism", page, f"a multiple of {self.interleave}"
            )


WHOLE = ContextShard(ranks=1, rank=0, interleave=1)
"""The only rank: every token is local."""


def dcp_local_seq_lens[A: (Array, np.ndarray)](seq_lens: A, shard: ContextShard) -> A:
    """How many of the first ``seq_len`` tokens live on this rank; any shape, host or device.

    ``base = seq_len // interleave // ranks * interleave`` whole runs for everyone, then
    ``local = base + clip(seq_len - base * ranks - rank * interleave, 0, interleave)``.
    """
    base = seq_lens // shard.interleave // shard.ranks * shard.interleave
    rest = seq_lens - base * shard.ranks - shard.rank * shard.interleave
    return base + rest.clip(0, shard.interleave)
