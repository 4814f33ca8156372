"""Token records as data: planes of fields, their scales, and the bytes of a page.

A page holds ``page`` records as one or more planes, one behind the other. Plane ``p`` keeps
``width[p]`` bytes of every token, so that field ``f`` of token ``t`` begins at byte
``page * sum(width[:p]) + t * width[p] + f.offset`` of its page.
Everything else follows from that: sizes, codecs, reference writes and reads
(``pallas/cache_io/records.py``) and ``docs/cache_formats.md``. Elements are little-endian.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mla_jax.errors import ArgumentError, MetadataError
from mla_jax.types import Array, Float, UInt8, round_up

__all__ = [
    "CACHE_SCALE",
    "ELEMENT_FORMATS",
    "FORMATS",
    "RECORD_FORMATS",
    "CacheFormat",
    "Field",
    "RecordFormat",
    "ScaleRule",
    "to_codes",
]

CACHE_SCALE = "scale of the cache"
"""``Field.scale`` of codes that one float32 outside of the records belongs to."""


@dataclass(frozen=True)
class Field:
    """``count`` elements of ``dtype`` starting at byte ``offset`` of a token's part of a plane."""

    name: str
    offset: int
    dtype: str
    count: int
    scale: str = ""  # of codes: the field that holds their scales, or CACHE_SCALE; "" = a cast
    padding: bool = False  # stored as zeros, never read

    @property
    def end(self) -> int:
        """First byte behind the field."""
        return self.offset + self.count * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a writer chooses the scale of a group of values. No reader depends on it.

    ``max(amax, floor) / largest``, or ``max(amax / largest, floor)`` if the floor is that of the
    quotient, with ``largest`` of the codes' dtype; then up to a power of two if asked for.
    """

    name: str
    power_of_two: bool
    floor: float
    floor_of: Literal["amax", "quotient"]

    def equation(self, largest: float) -> str:
        """The rule as the documents print it."""
        floor = "2^-126" if self.floor == 2.0**-126 else f"{self.floor:g}"
        of_amax = f"max(amax, {floor}) / {largest:g}"
        s = of_amax if self.floor_of == "amax" else f"max(amax / {largest:g}, {floor})"
        return f"2^ceil(log2({s}))" if self.power_of_two else s

    def choose(self, amax: Float[Array, "*groups"], largest: float) -> Float[Array, "*groups"]:
        """The float32 scale of groups whose largest magnitude is ``amax``."""
        floor_first = self.floor_of == "amax"
        s = _divide(jnp.maximum(amax, self.floor) if floor_first else amax, largest)
        s = s if floor_first else jnp.maximum(s, self.floor)
        return _up_to_power_of_two(s) if self.power_of_two else s


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """The bytes of one token and of one page, and the codec between values and bytes.

    A *value* is a field that the caller gives and gets; scales and padding are made here.
    A code is ``cast(clamp(float32(x) / s))``, a true division, rounded to nearest even; it is
    read as ``float32(code) * s``. A NaN is stored as NaN and takes no part in its group's
    scale. A group with an infinity has no finite scale and is read as NaN.
    """

    name: str
    planes: tuple[tuple[Field, ...], ...]
    page_multiple: int = 1  # pages begin at multiples of this many bytes
    rules: tuple[ScaleRule, ...] = ()  # of the stored scales: ours, then those of other writers
    rounds: str = ""  # dtype that values are rounded to before anything else; "" = as they come

    def __post_init__(self) -> None:
        what = f"RecordFormat {self.name}"
        for plane in self.planes:
            ends = [0, *(f.end for f in plane)]
            if [f.offset for f in plane] != ends[:-1]:
                raise MetadataError(f"{what}: offsets", [f.offset for f in plane], ends[:-1])
        counts = {f.name: f.count for f in self.fields}
        if len(counts) != len(self.fields):
            raise MetadataError(f"{what}: names", [f.name for f in self.fields], "distinct names")
        for f in self.fields:
            groups = counts.get(f.scale, 1 if f.scale in ("", CACHE_SCALE) else 0)
            if groups < 1 or f.count % groups:
                allowed = "a field of this record whose count divides that of the codes"
                raise MetadataError(f"{what}: scale of {f.name}", repr(f.scale), allowed)
        if bool(self._stored_scales) != bool(self.rules):
            raise MetadataError(f"{what}: rules", self.rules, "given if and only if scales are")

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields, plane after plane."""
        return tuple(f for plane in self.planes for f in plane)

    @property
    def values(self) -> tuple[Field, ...]:
        """The fields that ``encode`` takes and ``decode`` gives, in this order."""
        made = self._stored_scales
        return tuple(f for f in self.fields if not f.padding and f.name not in made)

    @property
    def _stored_scales(self) -> set[str]:
        return {f.scale for f in self.fields} - {"", CACHE_SCALE}

    @property
    def quantised(self) -> bool:
        """Some values are divided by a scale."""
        return any(f.scale for f in self.fields)

    @property
    def row(self) -> int:
        """Elements of all values of one token."""
        return sum(f.count for f in self.values)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of one token in each plane."""
        return tuple(plane[-1].end for plane in self.planes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return sum(self.widths)

    def page_bytes(self, page: int) -> int:
        """Bytes from one page of ``page`` tokens to the next."""
        return round_up(page * self.row_bytes, self.page_multiple)

    def begins(self, page: int) -> tuple[int, ...]:
        """Byte of a page of ``page`` tokens at which each plane begins."""
        return tuple(page * sum(self.widths[:p]) for p in range(len(self.planes)))

    def field(self, name: str) -> Field:
        """The field of that name."""
        found = {f.name: f for f in self.fields}
        if name not in found:
            raise MetadataError(f"field of {self.name}", repr(name), ", ".join(found))
        return found[name]

    def offset(self, name: str, token: int, *, page: int) -> int:
        """Byte of a page of ``page`` tokens at which a field of its token ``token`` begins."""
        field = self.field(name)
        p = next(p for p, plane in enumerate(self.planes) if field in plane)
        return self.begins(page)[p] + token * self.widths[p] + field.offset

    def with_rule(self, name: str) -> "RecordFormat":
        """The same bytes to a reader, written with another of ``rules``."""
        first = [r for r in self.rules if r.name == name]
        if not first:
            allowed = ", ".join(r.name for r in self.rules) or "none: it stores no scales"
            raise MetadataError(f"scale rule of {self.name}", repr(name), allowed)
        return replace(self, rules=(*first, *(r for r in self.rules if r.name != name)))

    def encode(
        self, *values: Float[Array, "*tokens _"], scale: ArrayLike = 1.0
    ) -> tuple[UInt8[Array, "*tokens _"], ...]:
        """Each plane's bytes of tokens whose ``values`` are these; ``scale`` is the cache's.

        Raises:
            ArgumentError: not one array per value, or of another width.
        """
        given, want = tuple(v.shape[-1] for v in values), tuple(f.count for f in self.values)
        if given != want:
            names = ", ".join(f.name for f in self.values)
            raise ArgumentError(f"widths of {self.name} ({names})", given, want)
        tokens = values[0].shape[:-1]
        stored = {f.name: jnp.zeros((*tokens, f.count), f.dtype) for f in self.fields if f.padding}
        for f, x in zip(self.values, values, strict=True):
            x = x.astype(self.rounds) if self.rounds else x
            stored |= self._store(f, x, scale)
        return tuple(
            jnp.concatenate([_as_bytes(stored[f.name]) for f in plane], axis=-1)
            for plane in self.planes
        )

    def _store(self, f: Field, x: Array, scale: ArrayLike) -> dict[str, Array]:
        """The elements of a value, and of its scales if the record keeps them."""
        if not f.scale:
            return {f.name: x.astype(f.dtype)}
        if f.scale == CACHE_SCALE:
            return {f.name: to_codes(x, scale, f.dtype)}
        kept = self.field(f.scale)
        shape = *x.shape[:-1], kept.count, x.shape[-1] // kept.count
        grouped = x.astype(jnp.float32).reshape(shape)
        # Said, not left to the maximum: XLA's on a CPU passes a NaN on in some shapes only.
        amax = jnp.max(jnp.where(jnp.isnan(grouped), 0, jnp.abs(grouped)), axis=-1)
        s = self.rules[0].choose(amax, float(jnp.finfo(f.dtype).max)).astype(kept.dtype)
        codes = to_codes(grouped, s[..., None].astype(jnp.float32), f.dtype)
        return {f.name: codes.reshape(x.shape), kept.name: s}

    def stored(self, parts: tuple[UInt8[Array, "*tokens _"], ...]) -> dict[str, Array]:
        """The elements of every field, ``[*tokens, count]``, from each plane's bytes."""
        return {
            f.name: _from_bytes(part[..., f.offset : f.end], f.dtype, f.count)
            for plane, part in zip(self.planes, parts, strict=True)
            for f in plane
        }

    def decode(
        self,
        parts: tuple[UInt8[Array, "*tokens _"], ...],
        *,
        dtype: DTypeLike = jnp.float32,
        scale: ArrayLike = 1.0,
    ) -> tuple[Float[Array, "*tokens _"], ...]:
        """The values in ``dtype``, rounded to it once; ``scale`` is the cache's."""
        stored = self.stored(parts)
        return tuple(self._value(f, stored, scale).astype(dtype) for f in self.values)

    def _value(self, f: Field, stored: dict[str, Array], scale: ArrayLike) -> Array:
        x = stored[f.name]
        if not f.scale:
            return x
        if f.scale == CACHE_SCALE:
            return x.astype(jnp.float32) * scale
        s = stored[f.scale].astype(jnp.float32)
        grouped = x.astype(jnp.float32).reshape(*s.shape, x.shape[-1] // s.shape[-1])
        return (grouped * s[..., None]).reshape(x.shape)

    def split(
        self, pages: UInt8[Array, "*pages page_bytes"], *, page: int
    ) -> tuple[UInt8[Array, "*pages {page} _"], ...]:
        """The planes of whole pages, what ``stored`` and ``decode`` take.

        Raises:
            ArgumentError: pages of another size.
        """
        if pages.shape[-1] != self.page_bytes(page):
            what = f"bytes of a page of {page} {self.name} records"
            raise ArgumentError(what, pages.shape[-1], self.page_bytes(page))
        return tuple(
            pages[..., begin : begin + page * width].reshape(*pages.shape[:-1], page, width)
            for begin, width in zip(self.begins(page), self.widths, strict=True)
        )


@dataclass(frozen=True)
class CacheFormat:
    """One element dtype for a record of any width: ``row = rank + rope`` elements, in that order.

    A plain format stores the element cast to ``dtype``; casting to its own dtype keeps every
    bit. A quantised format divides by one float32 scale of the whole cache and saturates.
    """

    name: str
    dtype: str  # of one stored element
    quantised: bool  # divided by the cache's scale before the cast

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def record(self, rank: int, rope: int) -> RecordFormat:
        """The bytes of one token at these widths."""
        scale = CACHE_SCALE if self.quantised else ""
        latent = Field("kv_latent", 0, self.dtype, rank, scale)
        rotary = Field("k_rope", latent.end, self.dtype, rope, scale)
        return RecordFormat(name=self.name, planes=((latent, rotary),))

    def fields(self, rank: int, rope: int) -> tuple[Field, ...]:
        """The record of one token, in byte order and without gaps."""
        return self.record(rank, rope).fields

    def row_bytes(self, rank: int, rope: int) -> int:
        """Bytes of one token in one layer."""
        return self.record(rank, rope).row_bytes

    def encode(self, x: Float[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
        """Stored elements of ``x``: ``cast(x)``, or ``cast(clamp(x / scale))`` if quantised.

        The cast rounds to nearest even; the clamp is to the largest finite value of the
        format, so nothing but a NaN is stored as NaN.
        """
        return to_codes(x, scale, self.dtype) if self.quantised else x.astype(self.dtype)

    def decode(self, stored: Float[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
        """Values of stored elements in float32: ``float32(stored) * scale`` if quantised."""
        x = stored.astype(jnp.float32)
        return x * scale if self.quantised else x


def _divide(x: Array, divisor: ArrayLike) -> Array:
    """A true division: compilers multiply by the reciprocal of a constant or a scalar."""
    divisor = jnp.broadcast_to(jnp.asarray(divisor, jnp.float32), x.shape)
    return x.astype(jnp.float32) / lax.optimization_barrier(divisor)


def to_codes(x: Array, scale: ArrayLike, dtype: str) -> Array:
    """``x / scale`` in ``dtype``, saturating at its largest finite value; a NaN stays a NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(_divide(x, scale), -largest, largest).astype(dtype)


def _up_to_power_of_two(x: Array) -> Array:
    """Smallest ``2^e >= x``, for positive normal float32: exact, from the bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    up = ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return lax.bitcast_convert_type(((bits >> 23) + up) << 23, jnp.float32)


def _as_bytes(x: Array) -> Array:
    """Little-endian bytes of the last axis."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(raw: Array, dtype: str, count: int) -> Array:
    """Inverse of ``_as_bytes``."""
    size = jnp.dtype(dtype).itemsize
    shape = (*raw.shape[:-1], count, size) if size > 1 else raw.shape
    return lax.bitcast_convert_type(raw.reshape(shape), jnp.dtype(dtype))


ELEMENT_FORMATS = {
    f.name: f
    for f in (
        CacheFormat("bf16", "bfloat16", quantised=False),
        CacheFormat("fp16", "float16", quantised=False),
        CacheFormat("fp32", "float32", quantised=False),
        CacheFormat("fp8_e4m3", "float8_e4m3fn", quantised=True),
    )
}
"""What ``LatentCache`` holds: elements of one dtype, of any width."""

E4M3, BF16, E8M0 = "float8_e4m3fn", "bfloat16", "float8_e8m0fnu"

RECORD_FORMATS = {
    f.name: f
    for f in (
        RecordFormat(
            name="ds_mla",  # V3.2: latent and rotary key
            planes=(
                (
                    Field("kv_latent", 0, E4M3, 512, scale="kv_scale"),
                    Field("kv_scale", 512, "float32", 4),
                    Field("k_rope", 528, BF16, 64),
                ),
            ),
            rules=(
                ScaleRule(name="power_of_two", power_of_two=True, floor=1e-4, floor_of="quotient"),
                ScaleRule(name="plain", power_of_two=False, floor=2.0**-126, floor_of="quotient"),
            ),
        ),
        RecordFormat(
            name="v4",  # V4: a window's or a compressed key, which is the value too
            planes=(
                (
                    Field("k_nope", 0, E4M3, 448, scale="k_scale"),
                    Field("k_rope", 448, BF16, 64),
                ),
                (
                    Field("k_scale", 0, E8M0, 7),
                    Field("zero", 7, "uint8", 1, padding=True),
                ),
            ),
            page_multiple=576,
            rules=(
                ScaleRule(name="floor_of_amax", power_of_two=True, floor=1e-4, floor_of="amax"),
                ScaleRule(
                    name="floor_of_quotient", power_of_two=True, floor=1e-4, floor_of="quotient"
                ),
            ),
            rounds=BF16,
        ),
        RecordFormat(
            name="index_key",  # V3.2 and V4: a key of the indexer
            planes=(
                (Field("key", 0, E4M3, 128, scale="key_scale"),),
                (Field("key_scale", 0, "float32", 1),),
            ),
            rules=(
                ScaleRule(name="power_of_two", power_of_two=True, floor=1e-4, floor_of="amax"),
                ScaleRule(name="plain", power_of_two=False, floor=1e-4, floor_of="amax"),
            ),
        ),
    )
}
"""What ``RecordCache`` holds: bytes, of the widths that their models have."""

FORMATS: dict[str, CacheFormat | RecordFormat] = {**ELEMENT_FORMATS, **RECORD_FORMATS}
