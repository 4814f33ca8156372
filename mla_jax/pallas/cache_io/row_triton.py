"""What Triton programs read and write rows of caches with; ``row_layout`` says where they lie.

``ROW`` is a ``RowLayout``, ``FIELD`` one of its fields. Values are ``[rows, groups, group]``; what
there is one of for a row is ``[rows, 1, 1]``. Codes of e4m3 are taken apart and made with integers,
which any GPU does, and to the bit.

Imported only where Triton is there: by ``kernels_triton.py`` of several operations.
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

__all__ = [
    "begins",
    "clamp",
    "columns",
    "inside",
    "place",
    "read_codes",
    "read_field",
    "scales",
    "store_field",
    "store_row",
    "store_zero",
]


@jit
def inside(slot, layer, LAYERS: tl.constexpr, SLOTS: tl.constexpr):
    """Whether slots are in the cache; the layer and the slots, 0 where they are not."""
    there = (layer >= 0) & (layer < LAYERS)
    slot = tl.where(there, slot, -1)
    here = (slot >= 0) & (slot < SLOTS)
    return here, tl.where(there, layer, 0), tl.where(here, slot, 0)


@jit
def place(slots, number, token, LAYERS: tl.constexpr, SLOTS: tl.constexpr):
    """``inside`` of a token's slot."""
    return inside(tl.load(slots + token), tl.load(number), LAYERS, SLOTS)


@jit
def begins(layer, slot, ROW: tl.constexpr):
    """The first byte of slots' pages, and their rows there."""
    page = layer.to(tl.int64) * (ROW.slots // ROW.page) + slot // ROW.page
    return page * ROW.page_bytes, slot % ROW.page


@jit
def clamp(x, LARGEST: tl.constexpr):
    """``x`` within ``[-LARGEST, LARGEST]``; a NaN stays one."""
    x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def _bytes(pages, begin, row, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to what rows have at byte ``FIRST`` of those of their page's first row."""
    return pages.to(tl.pointer_type(tl.uint8)) + (begin + FIRST + row.to(tl.int64) * WIDTH)


@jit
def columns(GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Groups of a field, and numbers of its elements."""
    g = tl.arange(0, GROUPS)[None, :, None]
    return g, g * GROUP + tl.arange(0, GROUP)[None, None, :]


@jit
def _elements(pointer, FIELD: tl.constexpr):
    """Pointers to bytes as such to elements of the field."""
    if FIELD.kind == "bf16":
        found = pointer.to(tl.pointer_type(tl.bfloat16))
    elif FIELD.kind == "fp16":
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
def _to_e4m3(x):
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
def scales(pages, factor, begin, row, here, g, FIELD: tl.constexpr):
    """What the codes of each group are multiplied by; ``factor`` if it is the cache's scale."""
    there = here & (g < FIELD.scales)
    at = _bytes(pages, begin, row, FIELD.scale_begin, FIELD.scale_width)
    if FIELD.scale == "fp32":
        s = tl.load(at.to(tl.pointer_type(tl.float32)) + g, mask=there, other=0.0)
    elif FIELD.scale == "e8m0":
        x = tl.load(at + g, mask=there, other=0).to(tl.int32)
        # 2^(x - 127): 0 is subnormal, 255 no number
        bits = tl.where(x == 0, 0x400000, tl.where(x == 255, 0x7FC00000, x << 23))
        s = bits.to(tl.float32, bitcast=True)
    else:
        s = tl.zeros_like(g).to(tl.float32) + factor
    return s


@jit
def read_codes(pages, begin, row, here, FIELD: tl.constexpr):
    """Elements as they are stored, zeros where there are none; their groups and numbers."""
    g, c = columns(FIELD.groups, FIELD.group)
    at = _bytes(pages, begin, row, FIELD.begin, FIELD.width)
    there = here & (c < FIELD.count)
    if FIELD.kind == "e4m3":
        x = tl.load(at + c, mask=there, other=0)
    else:
        x = tl.load(_elements(at, FIELD) + c, mask=there, other=0.0)
    return x, g, c


@jit
def read_field(pages, factor, begin, row, here, FIELD: tl.constexpr):
    """A field's values, zeros where there are none; and their numbers."""
    x, g, c = read_codes(pages, begin, row, here, FIELD)
    if FIELD.kind == "e4m3":
        x = _from_e4m3(x) * scales(pages, factor, begin, row, here, g, FIELD)
    return x, c


@jit
def _chosen(amax, ROW: tl.constexpr):
    """The scale of groups with these largest magnitudes: ``ScaleRule.choose``."""
    if ROW.floor_of_amax:
        amax = tl.maximum(amax, ROW.floor)
    s = tl.div_rn(amax, tl.zeros_like(amax) + ROW.largest)
    if not ROW.floor_of_amax:
        s = tl.maximum(s, ROW.floor)
    if ROW.power_of_two:
        bits = s.to(tl.int32, bitcast=True)
        up = ((bits & 0x7FFFFF) != 0).to(tl.int32)
        s = (((bits >> 23) + up) << 23).to(tl.float32, bitcast=True)
    return s


@jit
def store_field(
    x, pages, begin, row, here,
    FIELD: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """What lies behind column ``COLUMN`` of ``x``, quantised by group if it becomes codes."""
    g, c = columns(x.shape[1], x.shape[2])
    c -= COLUMN
    there = here & (c >= 0) & (c < FIELD.count)
    to = _bytes(pages, begin, row, FIELD.begin, FIELD.width)
    if ROW.rounds and x.dtype != tl.bfloat16:
        x = x.to(tl.float32).to(tl.bfloat16)
    if FIELD.kind == "e4m3":
        tl.static_assert(x.shape[2] == FIELD.group and COLUMN == 0)
        x = x.to(tl.float32)
        amax = tl.max(tl.where(x != x, 0.0, tl.abs(x)), axis=2, keep_dims=True)
        s = _chosen(amax, ROW)
        if FIELD.scale == "e8m0":  # which has no infinity
            s = tl.where(s == float("inf"), float("nan"), s)
        tl.store(to + c, _to_e4m3(tl.div_rn(x, tl.zeros_like(x) + s)), mask=there)
        kept = here & (g < FIELD.scales)
        at = _bytes(pages, begin, row, FIELD.scale_begin, FIELD.scale_width)
        if FIELD.scale == "e8m0":
            tl.store(at + g, (s.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=kept)
        else:
            tl.store(at.to(tl.pointer_type(tl.float32)) + g, s, mask=kept)
    else:
        pointer = _elements(to, FIELD)
        if x.dtype != pointer.dtype.element_ty:
            x = x.to(tl.float32).to(pointer.dtype.element_ty)
        tl.store(pointer + c, x, mask=there)


@jit
def store_zero(pages, begin, row, here, ROW: tl.constexpr):
    """The byte of each row that is always 0, if its format has one."""
    if ROW.zero >= 0:
        to = _bytes(pages, begin, row, ROW.zero, ROW.zero_width)
        tl.store(to, (row * 0).to(tl.uint8), mask=here)


@jit
def store_row(x, pages, layer, slot, ROW: tl.constexpr):
    """Store ``[1, columns]`` of all fields as one row; ``layer`` and ``slot`` are in the cache."""
    slot += tl.arange(0, 1)[None, None, :]
    begin, row = begins(layer, slot, ROW)
    here = slot >= 0
    FIRST: tl.constexpr = ROW.first
    SECOND: tl.constexpr = ROW.second
    x = tl.reshape(x, (1, x.shape[1] // FIRST.group, FIRST.group))
    store_field(x, pages, begin, row, here, FIRST, ROW, 0)
    if SECOND is not None:
        store_field(x, pages, begin, row, here, SECOND, ROW, SECOND.column)
    store_zero(pages, begin, row, here, ROW)
