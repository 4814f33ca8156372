"""Arrays that several operations take, with their axes: declared once."""

from mla_jax.types import Array, Float, Int

__all__ = ["CacheScale", "Layer", "Pages", "PageTable", "PerRequest", "Starts"]

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
