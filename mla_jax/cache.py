"""The paged latent cache: a token record as data, and the pytree that holds the pages.

A row is ``[kv_latent (rank) | k_rope (rope)]``; the rotary part is stored after rotation and
the latent after its norm. A slot is a flat row number, ``page_id * page + offset``.
Byte layouts are listed in ``docs/cache_formats.md``, which is generated from ``FORMATS``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.types import Array, Float

__all__ = ["FORMATS", "CacheFormat", "LatentCache"]


@dataclass(frozen=True)
class CacheFormat:
    """How one token is stored: ``row = rank + rope`` elements of ``dtype``, in that order.

    A quantised format stores ``round(clamp(x / scale, -448, 448))`` with one float32 scale
    for the whole cache, and reads ``x = byte * scale``.
    """

    name: str
    dtype: str  # of one stored element
    quantised: bool  # divided by the cache's scale before the cast

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def row_bytes(self, rank: int, rope: int) -> int:
        """Bytes of one token in one layer."""
        return (rank + rope) * self.itemsize


FORMATS = {
    f.name: f
    for f in (
        CacheFormat("bf16", "bfloat16", quantised=False),
        CacheFormat("fp16", "float16", quantised=False),
        CacheFormat("fp32", "float32", quantised=False),
        CacheFormat("fp8_e4m3", "float8_e4m3fn", quantised=True),
    )
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """Pages of one layer. Functions return a new one; donate the old one to reuse its memory."""

    pages: Float[Array, "pages page row"]  # stored elements, dtype of the format
    scale: Float[Array, ""]  # float32; 1 for formats that are not quantised
    rank: int = field(metadata={"static": True})  # latent elements at the head of a row
    format: CacheFormat = field(metadata={"static": True})

    @property
    def page(self) -> int:
        """Tokens in one page."""
        return self.pages.shape[-2]

    @property
    def rope(self) -> int:
        return self.pages.shape[-1] - self.rank

    @property
    def num_pages(self) -> int:
        return self.pages.shape[-3]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page

    @classmethod
    def alloc(
        cls,
        *,
        num_pages: int,
        page: int,
        rank: int,
        rope: int,
        format: str | CacheFormat = "bf16",
        scale: float = 1.0,
    ) -> "LatentCache":
        """A zeroed cache of one layer. Slots are int32, so ``num_pages * page < 2**31``."""
        fmt = _format(format)
        if num_pages * page >= 2**31:
            raise MetadataError(
                "LatentCache.alloc: pages * page",
                num_pages * page,
                "below 2**31 slots (slots are int32)",
                "Use fewer pages.",
            )
        return cls(
            pages=jnp.zeros((num_pages, page, rank + rope), fmt.dtype),
            scale=jnp.asarray(scale, jnp.float32),
            rank=rank,
            format=fmt,
        )


def _format(name: str | CacheFormat) -> CacheFormat:
    if isinstance(name, CacheFormat):
        return name
    if name not in FORMATS:
        allowed: Sequence[str] = sorted(FORMATS)
        raise MetadataError("cache format", repr(name), ", ".join(allowed))
    return FORMATS[name]
