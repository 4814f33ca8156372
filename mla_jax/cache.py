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
    """Pages of one layer, or of a stack of layers that operations take with ``layer=``.

    In a stack page ``i`` of every layer has one page table and one slot mapping; nothing is ever
    sliced out of it. Functions return a new cache; donate the old one to reuse its memory.
    """

    pages: Float[Array, "*layers pages page row"]  # stored elements, dtype of the format
    scale: Float[Array, "*layers"]  # float32, of each layer; 1 for formats that are not quantised
    rank: int = field(metadata={"static": True})  # latent elements at the head of a row
    format: CacheFormat = field(metadata={"static": True})

    @property
    def layers(self) -> int | None:
        """Layers of a stack; None for the cache of one layer."""
        return self.pages.shape[0] if len(self.pages.shape) == 4 else None

    @property
    def page(self) -> int:
        """Tokens in one page."""
        return self.pages.shape[-2]

    @property
    def rope(self) -> int:
        return self.pages.shape[-1] - self.rank

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.pages.shape[-3]

    @property
    def num_slots(self) -> int:
        """Slots of each layer."""
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
        layers: int | None = None,
    ) -> "LatentCache":
        """A zeroed cache of one layer, or of a stack of ``layers``.

        Row numbers are int32, so ``layers * num_pages * page < 2**31``; sizes are checked before
        anything is allocated. ``scale`` is that of every layer.

        Raises:
            MetadataError: an unknown format, sizes that are not positive, too many rows, or
                a scale that is not positive and finite (or not 1 in a plain format).
        """
        fmt = _format(format)
        stack = () if layers is None else (layers,)
        if min(num_pages, page, rank, *stack) < 1 or rope < 0:
            sizes = f"num_pages={num_pages}, page={page}, rank={rank}, rope={rope}"
            sizes += f", layers={layers}" if stack else ""
            raise MetadataError("LatentCache.alloc", sizes, "positive sizes (rope may be 0)")
        if math.prod(stack) * num_pages * page >= 2**31:
            factors = "layers * pages * page" if stack else "pages * page"
            raise MetadataError(
                f"LatentCache.alloc: {factors}",
                math.prod(stack) * num_pages * page,
                "below 2**31 slots (slots are int32)",
                "Use fewer pages.",
            )
        if not (math.isfinite(scale) and scale > 0) or (scale != 1 and not fmt.quantised):
            allowed = "a positive finite number" if fmt.quantised else "1 (nothing is scaled)"
            raise MetadataError(f"LatentCache.alloc: scale of {fmt.name}", scale, allowed)
        return cls(
            pages=jnp.zeros((*stack, num_pages, page, rank + rope), fmt.dtype),
            scale=jnp.full(stack, scale, jnp.float32),
            rank=rank,
            format=fmt,
        )


def _format(name: str | CacheFormat) -> CacheFormat:
    if isinstance(name, CacheFormat):
        return name
    if name not in FORMATS:
        raise MetadataError("cache format", repr(name), ", ".join(sorted(FORMATS)))
    return FORMATS[name]
