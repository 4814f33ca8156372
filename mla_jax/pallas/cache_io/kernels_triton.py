"""The Triton programs of single rows, in and out of a cache; ``triton.py`` says what for.

Everything is stated in bytes, so one program serves records and elements. ``CACHE`` are layers,
slots of each, rows and bytes of a page. ``ROWS`` are rows of a program and of all programs. A field
is ``(kind, count, groups, group, begin, width, scale, begin, width of the scale)``: the type of an
element; how many there are; powers of two that hold its groups and the elements of one; the byte of
a page where that of row 0 begins, and bytes from one row to the next; the same of its scales. Codes
of e4m3 are taken apart and made with integers, which any GPU does, and to the bit.

Imported only where Triton is there: by ``triton.py``, when it runs.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["gather", "gather_codes", "to_e4m3", "write"]


@jit
def _places(slots, number, CACHE: tl.constexpr, ROWS: tl.constexpr):
    """Rows of this program; the first byte of each one's page, its place there, whether it is."""
    row = tl.program_id(0) * ROWS[0] + tl.arange(0, ROWS[0])
    slot = tl.load(slots + row, mask=row < ROWS[1], other=-1)
    layer = tl.load(number)
    there = (layer >= 0) & (layer < CACHE[0])
    slot = tl.where(there, slot, -1)
    inside = (slot >= 0) & (slot < CACHE[1])
    slot = tl.where(inside, slot, 0)
    layer = tl.where(there, layer, 0).to(tl.int64)
    page = layer * (CACHE[1] // CACHE[2]) + slot // CACHE[2]
    return row, page * CACHE[3], slot % CACHE[2], inside


@jit
def _bytes(pages, begin, place, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to what each row has at byte ``FIRST`` of those of its page's first row."""
    at = begin + FIRST + place.to(tl.int64) * WIDTH
    return (pages.to(tl.pointer_type(tl.uint8)) + at)[:, None, None]


@jit
def _columns(FIELD: tl.constexpr):
    """Group, and element of the field."""
    g = tl.arange(0, FIELD[2])[None, :, None]
    return g, g * FIELD[3] + tl.arange(0, FIELD[3])[None, None, :]


@jit
def _elements(pointer, FIELD: tl.constexpr):
    """Pointers to bytes as such to elements of the field."""
    if FIELD[0] == "bf16":
        found = pointer.to(tl.pointer_type(tl.bfloat16))
    elif FIELD[0] == "fp16":
        found = pointer.to(tl.pointer_type(tl.float16))
    else:
        found = pointer.to(tl.pointer_type(tl.float32))
    return found


@jit
def _from_e4m3(byte):
    """The float32 of codes."""
    code = byte.to(tl.int32)
    low = code & 0x7F
    normal = ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    x = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)  # 2^-9
    x = tl.where(low == 0x7F, float("nan"), x)
    return tl.where(code >= 0x80, -x, x)


@jit
def to_e4m3(x):
    """Codes of float32, to nearest even; above 448 is 448, a NaN a NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    near = tl.minimum(size, 0x43E00000)
    normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - 0x3C0
    small = (near.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    code = tl.where(near < 0x3C800000, small - 0x46800000, normal)  # 2^-6, 2^14
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def _scales(pages, factor, begin, place, inside, g, FIELD: tl.constexpr):
    """What the codes of each group are multiplied by."""
    there = inside[:, None, None] & (g < (FIELD[1] + FIELD[3] - 1) // FIELD[3])
    at = _bytes(pages, begin, place, FIELD[7], FIELD[8])
    if FIELD[6] == "fp32":
        s = tl.load(at.to(tl.pointer_type(tl.float32)) + g, mask=there, other=0.0)
    elif FIELD[6] == "e8m0":
        x = tl.load(at + g, mask=there, other=0).to(tl.int32)
        # 2^(x - 127): 0 is subnormal, 255 no number
        bits = tl.where(x == 0, 0x400000, tl.where(x == 255, 0x7FC00000, x << 23))
        s = bits.to(tl.float32, bitcast=True)
    else:
        s = tl.zeros_like(g).to(tl.float32) + factor
    return s


@jit
def _read(
    pages, factor, out, row, begin, place, inside,
    FIELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A field's values to the first of ``COLUMNS`` columns."""
    g, c = _columns(FIELD)
    there = inside[:, None, None] & (c < FIELD[1])
    at = _bytes(pages, begin, place, FIELD[4], FIELD[5])
    if FIELD[0] == "e4m3":
        codes = _from_e4m3(tl.load(at + c, mask=there, other=0))
        x = codes * _scales(pages, factor, begin, place, inside, g, FIELD)
    else:
        x = tl.load(_elements(at, FIELD) + c, mask=there, other=0.0)
        if x.dtype != out.dtype.element_ty:
            x = x.to(tl.float32)
    to = out + row.to(tl.int64)[:, None, None] * COLUMNS + c
    real = (row < ROWS[1])[:, None, None] & (c < FIELD[1])
    tl.store(to, x.to(out.dtype.element_ty), mask=real)


@jit
def gather(
    pages, scale, slots, number, out,
    FIRST: tl.constexpr, SECOND: tl.constexpr, CACHE: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Some rows' values; ``SCALED``: ``scale`` is that of each layer's codes."""
    row, begin, place, inside = _places(slots, number, CACHE, ROWS)
    factor = 1.0
    if SCALED:
        layer = tl.load(number)
        factor = tl.load(scale + tl.where((layer >= 0) & (layer < CACHE[0]), layer, 0))
    COLUMNS: tl.constexpr = FIRST[1] + SECOND[1]
    _read(pages, factor, out, row, begin, place, inside, FIRST, ROWS, COLUMNS)
    if SECOND[1] > 0:
        behind = out + FIRST[1]
        _read(pages, factor, behind, row, begin, place, inside, SECOND, ROWS, COLUMNS)


@jit
def gather_codes(
    pages, slots, number, codes, scales,
    FIELD: tl.constexpr, CACHE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows' codes as they are, and their scales, one a row; zeros where there is no row."""
    row, begin, place, inside = _places(slots, number, CACHE, ROWS)
    g, c = _columns(FIELD)
    at = _bytes(pages, begin, place, FIELD[4], FIELD[5])
    x = tl.load(at + c, mask=inside[:, None, None] & (c < FIELD[1]), other=0)
    line = row.to(tl.int64)[:, None, None]
    real = (row < ROWS[1])[:, None, None]
    tl.store(codes + line * FIELD[1] + c, x, mask=real & (c < FIELD[1]))
    s = _scales(pages, 1.0, begin, place, inside, g, FIELD)
    tl.store(scales + line + g, s, mask=real & (g < 1))


@jit
def _chosen(amax, RULE: tl.constexpr):
    """The scale of groups with these largest magnitudes: ``ScaleRule.choose``."""
    LARGEST: tl.constexpr = RULE[3]
    if RULE[2]:
        amax = tl.maximum(amax, RULE[1])
    s = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST)
    if not RULE[2]:
        s = tl.maximum(s, RULE[1])
    if RULE[0]:
        bits = s.to(tl.int32, bitcast=True)
        up = ((bits & 0x7FFFFF) != 0).to(tl.int32)
        s = (((bits >> 23) + up) << 23).to(tl.float32, bitcast=True)
    return s


@jit
def _store(
    values, pages, row, begin, place, inside,
    FIELD: tl.constexpr, ROUNDS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """One value of each row, quantised by group if its elements are codes."""
    g, c = _columns(FIELD)
    there = inside[:, None, None] & (c < FIELD[1])
    x = tl.load(values + row.to(tl.int64)[:, None, None] * FIELD[1] + c, mask=there, other=0.0)
    to = _bytes(pages, begin, place, FIELD[4], FIELD[5])
    if ROUNDS and x.dtype != tl.bfloat16:
        x = x.to(tl.float32).to(tl.bfloat16)
    if FIELD[0] == "e4m3":
        x = x.to(tl.float32)
        amax = tl.max(tl.where(x != x, 0.0, tl.abs(x)), axis=2, keep_dims=True)
        s = _chosen(amax, RULE)
        if FIELD[6] == "e8m0":  # which has no infinity
            s = tl.where(s == float("inf"), float("nan"), s)
        tl.store(to + c, to_e4m3(tl.div_rn(x, tl.zeros_like(x) + s)), mask=there)
        kept = inside[:, None, None] & (g < (FIELD[1] + FIELD[3] - 1) // FIELD[3])
        at = _bytes(pages, begin, place, FIELD[7], FIELD[8])
        if FIELD[6] == "e8m0":
            tl.store(at + g, (s.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=kept)
        else:
            tl.store(at.to(tl.pointer_type(tl.float32)) + g, s, mask=kept)
    else:
        pointer = _elements(to, FIELD)
        if x.dtype != pointer.dtype.element_ty:
            x = x.to(tl.float32).to(pointer.dtype.element_ty)
        tl.store(pointer + c, x, mask=there)


@jit
def write(
    first, second, slots, number, before, pages,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ZERO: tl.constexpr, CACHE: tl.constexpr,
    ROWS: tl.constexpr, ROUNDS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Some rows' records; ``before`` and ``pages`` are one array.

    ``ZERO`` are first byte, width and number of a byte that is always 0; ``RULE`` is whether a
    scale is a power of two, its floor, whether that is one of the magnitude, and the largest code.
    """
    row, begin, place, inside = _places(slots, number, CACHE, ROWS)
    _store(first, pages, row, begin, place, inside, FIRST, ROUNDS, RULE)
    if SECOND[1] > 0:
        _store(second, pages, row, begin, place, inside, SECOND, ROUNDS, RULE)
    if ZERO[2] > 0:
        to = _bytes(pages, begin, place, ZERO[0], ZERO[1])
        nothing = tl.zeros_like(inside).to(tl.uint8)[:, None, None]
        tl.store(to, nothing, mask=inside[:, None, None])
