"""The Triton programs of single rows, in and out of a cache; ``triton.py`` says what for.

``ROW`` is a ``RowLayout``; ``ROWS`` are rows of a program and of all programs.

Imported only where Triton is there: by ``triton.py``.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from mla_jax.pallas.cache_io.row_triton import (
    begins,
    columns,
    inside,
    read_codes,
    read_field,
    scales,
    store_field,
    store_zero,
)
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["gather", "gather_codes", "write"]


@jit
def _places(slots, number, ROW: tl.constexpr, ROWS: tl.constexpr):
    """Rows of this program; the first byte of each one's page, its row there, whether it is."""
    row = tl.program_id(0) * ROWS[0] + tl.arange(0, ROWS[0])
    slot = tl.load(slots + row, mask=row < ROWS[1], other=-1)
    here, layer, slot = inside(slot, tl.load(number), ROW.layers, ROW.slots)
    begin, place = begins(layer, slot, ROW)
    here, begin, place = here[:, None, None], begin[:, None, None], place[:, None, None]
    return row[:, None, None], begin, place, here


@jit
def _put(x, out, row, c, FIELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Values of a field, or its codes, to their columns of ``COLUMNS``."""
    if x.dtype != out.dtype.element_ty:
        x = x.to(tl.float32).to(out.dtype.element_ty)
    to = out + row.to(tl.int64) * COLUMNS + FIELD.column + c
    tl.store(to, x, mask=(row < ROWS[1]) & (c < FIELD.count))


@jit
def gather(
    pages, scale, slots, number, out,
    ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Some rows' values; ``SCALED``: ``scale`` is that of each layer's codes."""
    row, begin, place, here = _places(slots, number, ROW, ROWS)
    factor = 1.0
    if SCALED:
        layer = tl.load(number)
        factor = tl.load(scale + tl.where((layer >= 0) & (layer < ROW.layers), layer, 0))
    FIRST: tl.constexpr = ROW.first
    SECOND: tl.constexpr = ROW.second
    x, c = read_field(pages, factor, begin, place, here, FIRST)
    _put(x, out, row, c, FIRST, ROWS, COLUMNS)
    if SECOND is not None:
        x, c = read_field(pages, factor, begin, place, here, SECOND)
        _put(x, out, row, c, SECOND, ROWS, COLUMNS)


@jit
def gather_codes(
    pages, slots, number, codes, factors,
    ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows' codes as they are, and their scales, one a row; zeros where there is no row."""
    row, begin, place, here = _places(slots, number, ROW, ROWS)
    FIELD: tl.constexpr = ROW.first
    x, g, c = read_codes(pages, begin, place, here, FIELD)
    _put(x, codes, row, c, FIELD, ROWS, FIELD.count)
    s = scales(pages, 1.0, begin, place, here, g, FIELD)
    tl.store(factors + row.to(tl.int64) + g, s, mask=(row < ROWS[1]) & (g < 1))


@jit
def _stored(
    values, pages, row, begin, place, here,
    FIELD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """One value of each row."""
    _, c = columns(FIELD.groups, FIELD.group)
    at = row.to(tl.int64) * FIELD.count + c
    x = tl.load(values + at, mask=here & (c < FIELD.count), other=0.0)
    store_field(x, pages, begin, place, here, FIELD, ROW, 0)


@jit
def write(
    first, second, slots, number, before, pages,
    ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows' records; ``before`` and ``pages`` are one array."""
    row, begin, place, here = _places(slots, number, ROW, ROWS)
    FIRST: tl.constexpr = ROW.first
    SECOND: tl.constexpr = ROW.second
    _stored(first, pages, row, begin, place, here, FIRST, ROW)
    if SECOND is not None:
        _stored(second, pages, row, begin, place, here, SECOND, ROW)
    store_zero(pages, begin, place, here, ROW)
