"""The paged latent cache: a token record as data, and the pytree that holds the pages.

A row is ``[kv_latent (rank) | k_rope (rope)]``; the rotary part is stored after rotation and
the latent after its norm. A slot is a flat row number, ``page_id * page + offset``.
Byte layouts are listed in ``docs/cache_formats.md``, which is generated from ``FORMATS``.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.types import Array, Float

__all__ = ["FORMATS", "CacheFormat", "Field", "LatentCache"]


@dataclass(frozen=True)
class Field:
    """``count`` elements of ``dtype`` starting at byte ``offset`` of a token record."""

    name: str
    offset: int
    dtype: str
    count: int

    @property
    def end(self) -> int:
        """First byte behind the field."""
        return self.offset + self.count * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CacheFormat:
    """How one token is stored: ``row = rank + rope`` elements of ``dtype``, in that order.

    A plain format stores the element cast to ``dtype``; casting to its own dtype keeps every
    bit. A quantised format divides by one float32 scale of the whole cache and saturates.
    """

    name: str
    dtype: str  # of one stored element
    quantised: bool  # divided by the cache's scale before the cast

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def fields(self, rank: int, rope: int) -> tuple[Field, ...]:
        """The record of one token, in byte order and without gaps."""
        latent = Field("kv_latent", 0, self.dtype, rank)
        return latent, Field("k_rope", latent.end, self.dtype, rope)

    def row_bytes(self, rank: int, rope: int) -> int:
        """Bytes of one token in one layer."""
        return self.fields(rank, rope)[-1].end

    def encode(self, x: Float[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
        """Stored elements of ``x``: ``cast(x)``, or ``cast(clamp(x / scale))`` if quantised.

        The cast rounds to nearest even; the clamp is to the largest finite value of the
        format, so nothing but a NaN is stored as NaN.
        """
        if not self.quantised:
            return x.astype(self.dtype)
        # The barrier keeps a true division: compilers multiply by 1 / scale otherwise.
        divisor = jax.lax.optimization_barrier(jnp.broadcast_to(scale, x.shape))
        largest = float(jnp.finfo(self.dtype).max)
        return jnp.clip(x.astype(jnp.float32) / divisor, -largest, largest).astype(self.dtype)

    def decode(self, stored: Float[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
        """Values of stored elements in float32: ``float32(stored) * scale`` if quantised."""
        x = stored.astype(jnp.float32)
        return x * scale if self.quantised else x


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
        """A zeroed cache of one layer. Slots are int32, so ``num_pages * page < 2**31``.

        Raises:
            MetadataError: an unknown format, sizes that are not positive, too many slots, or
                a scale that is not positive and finite (or not 1 in a plain format).
        """
        fmt = _format(format)
        if min(num_pages, page, rank) < 1 or rope < 0:
            sizes = f"num_pages={num_pages}, page={page}, rank={rank}, rope={rope}"
            raise MetadataError("LatentCache.alloc", sizes, "positive sizes (rope may be 0)")
        if num_pages * page >= 2**31:
            raise MetadataError(
                "LatentCache.alloc: pages * page",
                num_pages * page,
                "below 2**31 slots (slots are int32)",
                "Use fewer pages.",
            )
        if not (math.isfinite(scale) and scale > 0) or (scale != 1 and not fmt.quantised):
            allowed = "a positive finite number" if fmt.quantised else "1 (nothing is scaled)"
            raise MetadataError(f"LatentCache.alloc: scale of {fmt.name}", scale, allowed)
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
        raise MetadataError("cache format", repr(name), ", ".join(sorted(FORMATS)))
    return FORMATS[name]
