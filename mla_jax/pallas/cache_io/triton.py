"""Single rows in and out of a cache in Triton: byte records, and rows of elements to be read.

Computes ``records.write_records``, ``gather_rows`` and ``gather_codes``, byte for byte, from the
formats' data. A program takes some rows by slot: their bytes, the scale of each group, and the
values once. Bound by the bytes that are read and written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.formats import CACHE_SCALE
from mla_jax.pallas import triton_lib
from mla_jax.pallas.cache_io import kernels_triton as kernels
from mla_jax.pallas.cache_io.row_layout import RowLayout, layout
from mla_jax.types import Array, Float, Int, cdiv

__all__ = ["gather_codes", "gather_rows", "write_records"]

READ, WRITTEN = 2048, 512
"""Elements of a program that gathers, and of one that writes."""


def write_records(
    cache: RecordCache,
    values: tuple[Float[Array, "_ _"], ...],
    slots: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | None = None,
) -> RecordCache:
    """``records.write_records``; the pages stay where they are if they are donated."""
    pages, row = cache.pages, layout(cache)
    if not slots.shape[0]:
        return cache
    rows = _rows(row, WRITTEN)
    pages = triton_lib.call(
        kernels.write,
        values[0], values[-1], slots, _number(layer), pages,
        out=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        aliases={4: 0},
        grid=cdiv(slots.shape[0], rows),
        warps=4,
        stages=1,
        ROW=row,
        ROWS=(rows, slots.shape[0]),
    )  # fmt: skip
    return RecordCache(pages=pages, page=cache.page, format=cache.format)


def gather_rows(
    cache: LatentCache | RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*tokens row"]:
    """``records.gather_rows``."""
    number, row = _number(layer), layout(cache)
    scale = cache.scale if isinstance(cache, LatentCache) else number  # any array: not read
    columns = sum(field.count for field in row.fields)
    shape = (*slots.shape, columns)
    if not slots.size:
        return jnp.zeros(shape, dtype)
    rows = _rows(row, READ)
    out = triton_lib.call(
        kernels.gather,
        _as_bytes(cache.pages), scale, slots.reshape(-1), number,
        out=jax.ShapeDtypeStruct((slots.size, columns), dtype),
        grid=cdiv(slots.size, rows),
        warps=4,
        stages=1,
        ROW=row,
        ROWS=(rows, slots.size),
        COLUMNS=columns,
        SCALED=any(field.scale == CACHE_SCALE for field in row.fields),
    )  # fmt: skip
    return out.reshape(shape)


def gather_codes(
    cache: RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "*tokens dim"], Float[Array, "*tokens"]]:
    """``records.gather_codes``."""
    (field,) = cache.format.values
    if not slots.size:
        return jnp.zeros((*slots.shape, field.count), field.dtype), jnp.zeros(slots.shape)
    row = layout(cache)
    rows = _rows(row, READ)
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
        ROW=row,
        ROWS=(rows, slots.size),
    )  # fmt: skip
    codes = lax.bitcast_convert_type(codes, jnp.dtype(field.dtype))
    return codes.reshape(*slots.shape, field.count), scales.reshape(slots.shape)


def _rows(row: RowLayout, elements: int) -> int:
    """Rows of a program with so many elements."""
    return max(1, elements // max(field.groups * field.group for field in row.fields))


def _number(layer: Int[Array, ""] | None) -> Array:
    return jnp.zeros((), jnp.int32) if layer is None else layer


def _as_bytes(pages: Array) -> Array:
    """e4m3 as bytes: Triton has no such type before sm89."""
    if pages.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(pages, jnp.uint8)
    return pages
