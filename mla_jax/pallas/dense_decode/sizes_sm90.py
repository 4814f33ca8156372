"""Sizes of the Hopper kernel, apart from it: Mosaic GPU takes more than a second to import."""

import math
from dataclasses import dataclass

from mla_jax.types import cdiv

__all__ = ["BLOCK", "RANK", "ROPE", "ROWS", "Sizes", "most_columns"]

BLOCK = 64  # keys of one step
ROWS = 64  # query rows of a tile
RANK, ROPE = 512, 64


def most_columns(quantised: bool) -> int:
    """Query rows that may be columns of the products: what fits beside the keys."""
    return 32 if quantised else 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the kernel is compiled for, besides dtypes and array shapes."""

    heads: int  # of one query token, a multiple of 8
    queries: int  # of one request, at most
    page: int  # tokens, 16 to 128
    workers: int

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows that a request needs, at most."""
        return cdiv(self.heads * self.queries, ROWS)

    @property
    def live(self) -> int:
        """Rows of a tile that are live, at most: a power of two."""
        return min(1 << (self.heads * self.queries - 1).bit_length(), ROWS)

    @property
    def step(self) -> int:
        """Live rows of any tile are a multiple of this."""
        return math.gcd(self.heads, ROWS)

    @property
    def copies(self) -> int:
        """Pages that one block touches."""
        return self.pages_of(BLOCK)

    def pages_of(self, keys: int) -> int:
        """Pages that so many keys touch, from a multiple of their number on."""
        return max(keys // self.page, 1)
