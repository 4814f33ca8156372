"""Where a row lies in any cache, and how it is made: static facts that Triton programs read.

Everything is stated in bytes, so one program serves records and elements.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.formats import CACHE_SCALE, Field, RecordFormat
from mla_jax.pallas.registry import OneOf
from mla_jax.types import power_of_two

__all__ = ["ROWS", "FieldLayout", "RowLayout", "layout"]

ROWS = OneOf("bf16", "fp16", "fp32", "v4", "index_key")
"""Formats whose whole rows a program stores by itself; e4m3 elements need a scale."""

KINDS = {
    "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0", "bfloat16": "bf16", "float16": "fp16",
    "float32": "fp32",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FieldLayout:
    """One value of a row. Where: the byte of a page where its first row has it, and how many bytes
    behind it the next row has its own."""

    kind: str  # of its elements, of ``KINDS``
    column: int  # of the row: its first element
    count: int  # of elements
    groups: int  # a power of two that holds its groups
    group: int  # elements of a group, a power of two
    begin: int  # where
    width: int
    scale: str  # of codes: kind of the scales, or CACHE_SCALE; "": none
    scales: int  # how many
    scale_begin: int  # where
    scale_width: int


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """All of a row, and the cache that it is in."""

    layers: int  # 1 if the cache is of one
    slots: int  # of a layer
    page: int  # rows of a page
    page_bytes: int
    first: FieldLayout
    second: FieldLayout | None
    zero: int  # where a byte is always 0; -1: nowhere
    zero_width: int
    rounds: bool  # values to bfloat16 before anything else
    power_of_two: bool  # scales, as ``ScaleRule`` chooses them
    floor: float
    floor_of_amax: bool
    largest: float  # code

    @property
    def fields(self) -> tuple[FieldLayout, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


def layout(cache: LatentCache | RecordCache) -> RowLayout:
    """From the data of the cache's format; rows of elements are one field."""
    if isinstance(cache, LatentCache):
        form = cache.format.record(cache.pages.shape[-1], 0)
        values = form.values[:1]
    else:
        form, values = cache.format, cache.format.values
    page = cache.page
    first, *others = _fields(form, values, page)
    (zero,) = [_where(form, f.name, page) for f in form.fields if f.padding] or [(-1, 0)]
    rule = form.rules[0] if form.rules else None
    return RowLayout(
        layers=cache.layers or 1,
        slots=cache.num_slots,
        page=page,
        page_bytes=form.page_bytes(page),
        first=first,
        second=others[0] if others else None,
        zero=zero[0],
        zero_width=zero[1],
        rounds=bool(form.rounds),
        power_of_two=rule is not None and rule.power_of_two,
        floor=0.0 if rule is None else rule.floor,
        floor_of_amax=rule is not None and rule.floor_of == "amax",
        largest=max((float(jnp.finfo(f.dtype).max) for f in values if f.scale), default=0.0),
    )


def _fields(form: RecordFormat, values: tuple[Field, ...], page: int) -> list[FieldLayout]:
    """Side by side."""
    found, column = [], 0
    for field in values:
        count, kept = field.count, None
        if field.scale not in ("", CACHE_SCALE):
            kept = form.field(field.scale)
        group = power_of_two(count) if kept is None else count // kept.count
        assert group == power_of_two(group), f"{form.name}: groups of {group}"
        begin, width = _where(form, field.name, page)
        scale = (0, 0) if kept is None else _where(form, kept.name, page)
        found.append(
            FieldLayout(
                kind=KINDS[field.dtype],
                column=column,
                count=count,
                groups=1 if kept is None else power_of_two(kept.count),
                group=group,
                begin=begin,
                width=width,
                scale=field.scale if kept is None else KINDS[kept.dtype],
                scales=0 if kept is None else kept.count,
                scale_begin=scale[0],
                scale_width=scale[1],
            )
        )
        column += count
    return found


def _where(form: RecordFormat, name: str, page: int) -> tuple[int, int]:
    """Byte of a page where a field of its first row begins; bytes from one row to the next."""
    first = form.offset(name, 0, page=page)
    return first, form.offset(name, 1, page=page) - first
