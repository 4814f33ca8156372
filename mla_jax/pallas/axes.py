"""Arrays that several operations take, with their axes: declared once."""

from typing import NamedTuple

from mla_jax.types import Array, Float, Int

__all__ = ["CacheScale", "Groups", "Layer", "Pages", "PageTable", "PerRequest", "Starts"]

Pages = Float[Array, "*layers pages page row"]
"""Latent rows of a cache, of one layer or of a stack."""

CacheScale = Float[Array, "*layers"]
"""What the bytes of an e4m3 cache are multiplied by."""

Layer = Int[Array, ""] | None
"""Number of a layer in a stack; None if the cache is of one layer."""

PageTable = Int[Array, "requests width"]
"""Page ids of each request, in the order of its tokens."""

PerRequest = Int[Array, "requests"]
"""A number for each request, such as its length."""

Starts = Int[Array, "starts"]
"""Where the rows of each request begin, and behind them where the last one ends."""


class Groups(NamedTuple):
    """The groups of tokens that one step completes, and what waits of each token for later ones.

    A place of a group is a token of this step, a row of its ring, or nobody's.
    """

    ends: Int[Array, "groups"]  # the token that completes it; -1: padding
    tokens: Int[Array, "groups span"]  # this step's token at each place, oldest first; or -1
    kept: Int[Array, "groups span"]  # the ring's row at each place; or -1
    keep: Int[Array, "tokens"]  # the ring's row that a token writes; -1: none
    positions: Int[Array, "tokens"]  # absolute: a token's place in its group
    cos: Float[Array, "groups pairs"]  # at each group's first position
    sin: Float[Array, "groups pairs"]
