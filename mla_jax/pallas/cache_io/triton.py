"""Single rows in and out of a cache in Triton: byte records, and rows of elements to be read.

Computes ``records.write_records``, ``gather_rows`` and ``gather_codes``, byte for byte, from the
formats' data. A program takes some rows by slot: their bytes, the scale of each group, and the
values once. Bound by the bytes that are read and written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.formats import CACHE_SCALE, Field, RecordFormat
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, Float, Int, cdiv, power_of_two

__all__ = ["CODES", "GATHER", "WRITE", "gather_codes", "gather_rows", "write_records"]

_ELEMENTS = "bf16", "fp16", "fp32", "fp8_e4m3"
_RECORDS = "ds_mla", "v4", "index_key"

_MACHINE = {"sm": Within(low=80), "packages": ("triton",)}

WRITE = Requirement(features={"cache": OneOf(*_RECORDS)}, **_MACHINE)
GATHER = Requirement(features={"cache": OneOf(*_RECORDS, *_ELEMENTS)}, **_MACHINE)
CODES = Requirement(features={"cache": OneOf("index_key")}, **_MACHINE)

READ, WRITTEN = 2048, 512
"""Elements of a program that gathers, and of one that writes."""

_KINDS = {
    "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0", "bfloat16": "bf16", "float16": "fp16",
    "float32": "fp32",
}  # fmt: skip

_NONE = ("", 0, 1, 1, 0, 0, "", 0, 0)
"""No field."""


def write_records(
    cache: RecordCache,
    values: tuple[Float[Array, "_ _"], ...],
    slots: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | None = None,
) -> RecordCache:
    """``records.write_records``; the pages stay where they are if they are donated."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.cache_io import kernels_triton as kernels

    form, pages = cache.format, cache.pages
    if not slots.shape[0]:
        return cache
    fields = [_field(form, f, cache.page) for f in form.values]
    rows = _rows(fields, WRITTEN)
    zeros = [_where(form, f.name, cache.page) for f in form.fields if f.padding]
    rule = form.rules[0]
    largest = max(float(jnp.finfo(f.dtype).max) for f in form.values if f.scale)
    pages = triton_lib.call(
        kernels.write,
        values[0], values[-1], slots, _number(layer), pages,
        out=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        aliases={4: 0},
        grid=cdiv(slots.shape[0], rows),
        warps=4,
        stages=1,
        FIRST=fields[0],
        SECOND=fields[1] if len(fields) > 1 else _NONE,
        ZERO=(*zeros[0], 1) if zeros else (0, 0, 0),
        CACHE=_sizes(cache, form),
        ROWS=(rows, slots.shape[0]),
        ROUNDS=bool(form.rounds),
        RULE=(rule.power_of_two, rule.floor, rule.floor_of == "amax", largest),
    )  # fmt: skip
    return RecordCache(pages=pages, page=cache.page, format=form)


def gather_rows(
    cache: LatentCache | RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*tokens row"]:
    """``records.gather_rows``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.cache_io import kernels_triton as kernels

    number = _number(layer)
    if isinstance(cache, LatentCache):  # all of a row is one field
        form = cache.format.record(cache.pages.shape[-1], 0)
        fields, scale = [_field(form, form.values[0], cache.page)], cache.scale
    else:
        form, scale = cache.format, number  # any array: records have their scales
        fields = [_field(form, f, cache.page) for f in form.values]
    shape = (*slots.shape, form.row)
    if not slots.size:
        return jnp.zeros(shape, dtype)
    rows = _rows(fields, READ)
    out = triton_lib.call(
        kernels.gather,
        _as_bytes(cache.pages), scale, slots.reshape(-1), number,
        out=jax.ShapeDtypeStruct((slots.size, form.row), dtype),
        grid=cdiv(slots.size, rows),
        warps=4,
        stages=1,
        FIRST=fields[0],
        SECOND=fields[1] if len(fields) > 1 else _NONE,
        CACHE=_sizes(cache, form),
        ROWS=(rows, slots.size),
        SCALED=any(f[6] == CACHE_SCALE for f in fields),
    )  # fmt: skip
    return out.reshape(shape)


def gather_codes(
    cache: RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "*tokens dim"], Float[Array, "*tokens"]]:
    """``records.gather_codes``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.cache_io import kernels_triton as kernels

    form = cache.format
    (field,) = form.values
    if not slots.size:
        return jnp.zeros((*slots.shape, field.count), field.dtype), jnp.zeros(slots.shape)
    made = _field(form, field, cache.page)
    rows = _rows([made], READ)
    codes, scales = triton_lib.call(
        kernels.gather_codes,
        cache.pages, slots.reshape(-1), _number(layer),
        out=(
            jax.ShapeDtypeStruct((slots.size, field.count), jnp.uint8),
            jax.ShapeDtypeStruct((slots.size,), jnp.float32),
        ),
        grid=cdiv(slots.size, rows),
        warps=4,
        stages=1,
        FIELD=made,
        CACHE=_sizes(cache, form),
        ROWS=(rows, slots.size),
    )  # fmt: skip
    codes = lax.bitcast_convert_type(codes, jnp.dtype(field.dtype))
    return codes.reshape(*slots.shape, field.count), scales.reshape(slots.shape)


def _field(form: RecordFormat, field: Field, page: int) -> tuple[Any, ...]:
    """A value as the programs know it."""
    kind, count, at = _KINDS[field.dtype], field.count, _where(form, field.name, page)
    if field.scale in ("", CACHE_SCALE):
        return (kind, count, 1, power_of_two(count), *at, field.scale, 0, 0)
    kept = form.field(field.scale)
    group = count // kept.count
    assert group == power_of_two(group), f"{form.name}: groups of {group}"
    groups = power_of_two(kept.count)
    scale = _KINDS[kept.dtype], *_where(form, kept.name, page)
    return (kind, count, groups, group, *at, *scale)


def _where(form: RecordFormat, name: str, page: int) -> tuple[int, int]:
    """Byte of a page where a field of its first row begins; bytes from one row to the next."""
    first = form.offset(name, 0, page=page)
    return first, form.offset(name, 1, page=page) - first


def _rows(fields: list[tuple[Any, ...]], elements: int) -> int:
    """Rows of a program with so many elements."""
    return max(1, elements // max(f[2] * f[3] for f in fields))


def _sizes(cache: LatentCache | RecordCache, form: RecordFormat) -> tuple[int, int, int, int]:
    return cache.layers or 1, cache.num_slots, cache.page, form.page_bytes(cache.page)


def _number(layer: Int[Array, ""] | None) -> Array:
    return jnp.zeros((), jnp.int32) if layer is None else layer


def _as_bytes(pages: Array) -> Array:
    """e4m3 as bytes: Triton has no such type before sm89."""
    if pages.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(pages, jnp.uint8)
    return pages
