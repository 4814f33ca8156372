"""The paged caches: the pytrees that hold the pages.

A slot is a flat row number, ``page_id * page + offset``. ``LatentCache`` holds elements of one
dtype, ``[kv_latent (rank) | k_rope (rope)]`` a row, the rotary part stored after rotation and the
latent after its norm; ``RecordCache`` holds the byte records of the sparse models.
The formats are data (``mla_jax.formats``), listed in ``docs/cache_formats.md``.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.checks import is_int, is_real
from mla_jax.errors import MetadataError
from mla_jax.formats import (
    CACHE_SCALE,
    ELEMENT_FORMATS,
    FORMATS,
    RECORD_FORMATS,
    CacheFormat,
    Field,
    RecordFormat,
)
from mla_jax.types import Array, Float, Int, UInt8

__all__ = [
    "ELEMENT_FORMATS",
    "FORMATS",
    "RECORD_FORMATS",
    "CacheFormat",
    "Field",
    "LatentCache",
    "RecordCache",
    "RecordFormat",
    "SparseScope",
    "StatePool",
]


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
        counts = num_pages, page, rank, *stack
        if not all(map(is_int, (*counts, rope))) or min(counts) < 1 or rope < 0:
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
        with np.errstate(over="ignore"):
            stored = np.float32(scale) if is_real(scale) else np.float32(np.nan)
        normal = np.finfo(np.float32).tiny  # devices take what is smaller for 0
        if not (np.isfinite(stored) and stored >= normal) or (scale != 1 and not fmt.quantised):
            allowed = "1 (nothing is scaled)"
            if fmt.quantised:
                allowed = f"a finite number of at least {normal:.3g}, in float32 too"
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
    if not isinstance(name, str) or name not in ELEMENT_FORMATS:
        known = isinstance(name, str) and name in RECORD_FORMATS
        hint = f"RecordCache holds {name}." if known else ""
        raise MetadataError("cache format", repr(name), ", ".join(sorted(ELEMENT_FORMATS)), hint)
    return ELEMENT_FORMATS[name]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RecordCache:
    """Pages of byte records, of one layer or of a stack of layers.

    A page is ``format.page_bytes(page)`` bytes, its planes one behind the other. Functions
    return a new cache; donate the old one to reuse its memory.
    """

    pages: UInt8[Array, "*layers pages page_bytes"]
    page: int = field(metadata={"static": True})  # tokens in one page
    format: RecordFormat = field(metadata={"static": True})

    @property
    def layers(self) -> int | None:
        """Layers of a stack; None for the cache of one layer."""
        return self.pages.shape[0] if len(self.pages.shape) == 3 else None

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.pages.shape[-2]

    @property
    def num_slots(self) -> int:
        """Slots of each layer."""
        return self.num_pages * self.page

    @classmethod
    def alloc(
        cls, *, num_pages: int, page: int, format: str | RecordFormat, layers: int | None = None
    ) -> "RecordCache":
        """A zeroed cache of one layer, or of a stack of ``layers``.

        Raises:
            MetadataError: not the name of a byte record, a record whose scale is kept outside
                of it, sizes that are not positive, or ``layers * num_pages * page >= 2**31``.
        """
        stack = () if layers is None else (layers,)
        counts = num_pages, page, *stack
        if not all(map(is_int, counts)) or min(counts) < 1:
            sizes = f"num_pages={num_pages}, page={page}, layers={layers}"
            raise MetadataError("RecordCache.alloc", sizes, "positive sizes (layers may be None)")
        if (rows := math.prod(stack) * num_pages * page) >= 2**31:
            allowed = "below 2**31 (slots are int32)"
            raise MetadataError("RecordCache.alloc: rows", rows, allowed, "Use fewer pages.")
        fmt = _record_format(format)
        shape = (*stack, num_pages, fmt.page_bytes(page))
        return cls(pages=jnp.zeros(shape, jnp.uint8), page=page, format=fmt)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SparseScope:
    """Rows of a cache that each token attends to beside those of another one (V4)."""

    cache: LatentCache | RecordCache
    slots: Int[Array, "tokens keys"]  # outside of the cache, such as -1: no row
    lengths: Int[Array, "tokens"] | None  # entries of ``slots`` that count; None: all
    layer: int | Int[Array, ""] | None  # of a stacked cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StatePool:
    """What a step's tokens give to the compressed states of one pool (V4), and where these go."""

    cache: LatentCache | RecordCache  # of the states
    values: Float[Array, "tokens halves dim"]  # float32; two halves: for the next group, its own
    gates: Float[Array, "tokens halves dim"]  # float32, without bias
    bias: Float[Array, "ratio halves dim"]  # float32, of each place in a group
    gain: Float[Array, "dim"]  # of the norm; states are rounded to its dtype
    slots: Int[Array, "tokens"]  # of the state that a token completes


def _record_format(name: str | RecordFormat) -> RecordFormat:
    fmt = RECORD_FORMATS.get(name) if isinstance(name, str) else name
    if not isinstance(fmt, RecordFormat | None):
        raise MetadataError("record format", repr(name), ", ".join(sorted(RECORD_FORMATS)))
    if fmt is None or any(f.scale == CACHE_SCALE for f in fmt.fields):
        hint = "LatentCache holds elements of one dtype." if fmt or name in FORMATS else ""
        raise MetadataError("record format", repr(name), ", ".join(sorted(RECORD_FORMATS)), hint)
    return fmt
