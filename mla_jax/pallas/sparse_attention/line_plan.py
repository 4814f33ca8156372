"""Which thread blocks attend to which keys of equal lists: known before anything runs.

All blocks of 64 keys of all tokens lie on a line, token after token. Worker ``w`` has ``share``
neighbouring blocks of it; a *piece* is what it has of one token. Tokens in one piece are finished
by their worker. Pieces of the others go to *slots*, numbered along the line, and are merged.
Everything follows from four numbers, so nothing is computed on the device.
"""

import functools
from dataclasses import dataclass

import numpy as np

from mla_jax.types import cdiv, round_up

__all__ = ["Line", "divide"]

START_COST = 2.0
"""Blocks of work that starting a piece is worth."""

SPLIT_COST = 0.00035
"""Blocks of one worker that a part costs for each head: 2 KB, at 3.5 TB/s and 1.7 us a block."""

MERGE_COST = 2.0
"""Blocks of one worker that merging anything at all costs."""

ROWS = 128
"""Rows of the list of merges are a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The line, and how it is cut."""

    tokens: int
    blocks: int  # of a token
    share: int  # blocks of a worker; the last one may have fewer

    @property
    def total(self) -> int:
        """Blocks of all tokens."""
        return self.tokens * self.blocks

    @property
    def workers(self) -> int:
        """Workers that have a block."""
        return cdiv(self.total, self.share)

    @property
    def parts(self) -> np.ndarray:
        """Pieces of each token."""
        first = np.arange(self.tokens) * self.blocks
        return (first + self.blocks - 1) // self.share - first // self.share + 1

    @property
    def split(self) -> bool:
        """Whether anything is merged."""
        return bool((self.parts > 1).any())

    @property
    def slots(self) -> int:
        """Pieces of tokens that are split."""
        return int(np.sum(self.parts, where=self.parts > 1))

    def first_slots(self) -> np.ndarray:
        """Of each worker, the slot of its first piece of a token that is split; then -1.

        Without that XLA finds a rule in the constant, and computes it in every call.
        """
        parts = self.parts
        bases = np.cumsum(np.where(parts > 1, parts, 0)) - np.where(parts > 1, parts, 0)
        start = np.arange(self.workers) * self.share
        token = start // self.blocks
        before = start // self.share - token * self.blocks // self.share  # pieces of that token
        later = np.append(bases, self.slots)[token + 1]
        found = np.where(parts[token] > 1, bases[token] + before, later)
        return np.append(found, -1).astype(np.int32)

    def merges(self) -> np.ndarray:
        """``WorkPlan.merges`` of dense decode: first slot, parts, 0 and token of what is split."""
        parts = self.parts
        (token,) = np.nonzero(parts > 1)
        rows = np.zeros((round_up(1 + self.tokens, ROWS), 8), np.int32)
        rows[0, 0] = len(token)
        ends = np.cumsum(parts[token])
        found = (ends - parts[token], parts[token], np.zeros_like(token), token)
        rows[1 : 1 + len(token), :4] = np.stack(found, axis=1)
        return rows


@functools.lru_cache(maxsize=256)
def divide(tokens: int, blocks: int, *, workers: int, heads: int) -> Line:
    """The cheapest line: even shares, a little more, whole tokens, or tokens in equal pieces."""
    even = cdiv(tokens * blocks, workers)
    shares = {even + k * max(1, even // 128) for k in range(17)}
    shares |= {round_up(even, blocks)}
    shares |= {cdiv(blocks, n) for n in range(1, blocks + 1) if cdiv(blocks, n) >= even}

    def cost(share: int) -> tuple[float, int]:
        line = Line(tokens=tokens, blocks=blocks, share=share)
        starts = START_COST * (1 + cdiv(share - 1, blocks))  # pieces of a worker, at most
        splits = line.slots - int((line.parts > 1).sum())
        merge = MERGE_COST + splits * SPLIT_COST * heads if splits else 0.0
        return share + starts + merge, share

    best = min((s for s in shares if cdiv(tokens * blocks, s) <= workers), key=cost)
    return Line(tokens=tokens, blocks=blocks, share=best)
