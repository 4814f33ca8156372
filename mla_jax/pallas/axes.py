"""Arrays that several operations take, with their axes: declared once."""

from typing import NamedTuple

from mla_jax.types import Array, Float, Int

__all__ = [
    "AbsorbedKeys",
    "Angles",
    "CacheScale",
    "ChoiceWeights",
    "Choices",
    "ExpertsIn",
    "ExpertsOut",
    "Groups",
    "Hidden",
    "KeyValues",
    "LatentQueries",
    "Layer",
    "Mixed",
    "PageTable",
    "Pages",
    "PerRequest",
    "Queries",
    "RopeKeys",
    "RopeQueries",
    "RowQueries",
    "Slots",
    "Starts",
    "StreamRows",
]

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

Slots = Int[Array, "tokens"]
"""Where the row of each token is stored; -1 stores nothing."""

Angles = Float[Array, "tokens pairs"]
"""Cosines, or sines, of each token's pairs of channels."""

AbsorbedKeys = Float[Array, "heads nope rank"]
"""Up-projection of the keys, as queries meet it: ``U_k^T`` of each head."""

LatentQueries = Float[Array, "tokens heads rank"]
"""Queries with the up-projection of the keys absorbed."""

RopeQueries = Float[Array, "tokens heads rope"]
"""Rotated part of the queries."""

RowQueries = Float[Array, "tokens heads row"]
"""Both parts of the queries side by side, as wide as a cached row."""

Queries = Float[Array, "tokens heads qk"]
"""Queries of expanded heads, ``qk = nope + rope``."""

KeyValues = Float[Array, "keys heads nope_v"]
"""``[k_nope | v]`` of each head, as the up-projection leaves them."""

RopeKeys = Float[Array, "keys rope"]
"""Rotated part of the keys, which all heads share."""

Hidden = Float[Array, "tokens hidden"]
"""Activations of a layer."""

ExpertsIn = Float[Array, "experts hidden width"]
"""Weights of the experts' products into their inner width: gate, and up."""

ExpertsOut = Float[Array, "experts width hidden"]
"""Weights of the experts' products back."""

ChoiceWeights = Float[Array, "tokens topk"]
"""Weight of each chosen expert in its token's sum."""

Choices = Int[Array, "tokens topk"]
"""Experts that each token chose; an index that is no expert adds nothing."""


class RowNorm(NamedTuple):
    """A norm by root mean square of each row: ``gain * x / sqrt(mean(x^2) + eps)``."""

    gain: Float[Array, "hidden"]
    eps: float


class AddNorm(NamedTuple):
    """What follows a sub-block: its result is added to the residual, and the sum is normalised."""

    residual: Hidden
    gain: Float[Array, "hidden"]  # of the norm by root mean square that the next one reads
    eps: float


StreamRows = Float[Array, "tokens streams hidden"]
"""The residual as parallel streams."""

Mixed = tuple[Hidden, Float[Array, "tokens streams"], Float[Array, "tokens streams streams"]]
"""What a sub-block reads of the streams, how much of its result each gets, and the matrix that
mixes them; both float32."""


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
