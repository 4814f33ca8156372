"""What Triton kernels store rows with: a slot's place in a cache, and the bits of a row there.

Imported only where Triton is there: by other ``kernels_triton.py``.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from mla_jax.pallas.cache_io.kernels_triton import to_e4m3
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["clamp", "place", "store_row"]


@jit
def place(slots, number, token, CACHE: tl.constexpr):
    """Whether a token's slot is in the cache; its layer and its slot there, 0 if it is not.

    ``CACHE`` begins with layers and slots of each.
    """
    slot = tl.load(slots + token)
    layer = tl.load(number)
    here = (slot >= 0) & (slot < CACHE[1]) & (layer >= 0) & (layer < CACHE[0])
    return here, tl.where(here, layer, 0), tl.where(here, slot, 0)


@jit
def clamp(x, LARGEST: tl.constexpr):
    """``x`` within ``[-LARGEST, LARGEST]``; a NaN stays one."""
    x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def _scale(amax, STORE: tl.constexpr):
    """float32 scales of groups with these maxima, by ``ScaleRule.choose``."""
    FLOOR: tl.constexpr = STORE[16]
    whole = tl.zeros_like(amax) + 448.0  # the largest code
    if STORE[17]:
        s = tl.div_rn(tl.maximum(amax, FLOOR), whole)
    else:
        s = tl.maximum(tl.div_rn(amax, whole), FLOOR)
    if STORE[15]:
        bits = s.to(tl.int32, bitcast=True)
        up = ((bits & 0x7FFFFF) != 0).to(tl.int32)
        s = (((bits >> 23) + up) << 23).to(tl.float32, bitcast=True)
    return s


@jit
def _store_record(x, pages, layer, slot, STORE: tl.constexpr):
    """The bytes of one row in the planes of its page."""
    PAGE: tl.constexpr = STORE[2]
    CODED: tl.constexpr = STORE[4]
    GROUP: tl.constexpr = STORE[5]
    STORED: tl.constexpr = STORE[6]
    COLUMNS: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = COLUMNS // GROUP
    begin = (layer.to(tl.int64) * (STORE[1] // PAGE) + slot // PAGE) * STORE[3]
    offset = slot % PAGE
    if STORE[18]:
        x = x.to(tl.bfloat16)
    x = x.to(tl.float32)
    grouped = tl.reshape(x, (GROUPS, GROUP))
    s = _scale(tl.max(tl.where(grouped != grouped, 0.0, tl.abs(grouped)), 1), STORE)
    i = tl.arange(0, GROUPS)
    to = pages + begin + STORE[9] + offset * STORE[10]
    if STORE[13]:  # exponents; infinity is none
        code = s.to(tl.int32, bitcast=True) >> 23
        s = tl.where(code == 255, float("nan"), s)
        code = tl.where(i < CODED // GROUP, code, 0)
        tl.store(to + i, code.to(tl.uint8), mask=i < STORED)
    else:
        tl.store(to.to(tl.pointer_type(tl.float32)) + i, s, mask=i < STORED)
    divisor = tl.zeros_like(grouped) + tl.reshape(s, (GROUPS, 1))
    codes = tl.reshape(to_e4m3(tl.div_rn(grouped, divisor)), (1, COLUMNS))
    c = tl.arange(0, COLUMNS)[None, :]
    tl.store(pages + begin + STORE[7] + offset * STORE[8] + c, codes, mask=c < CODED)
    if STORE[11] >= 0:
        tail = (pages + begin + STORE[11] + offset * STORE[12]).to(tl.pointer_type(tl.bfloat16))
        wide = (c >= CODED) & (c < CODED + STORE[14])
        tl.store(tail + (c - CODED), x.to(tl.bfloat16), mask=wide)


@jit
def store_row(x, pages, layer, slot, DIM: tl.constexpr, STORE: tl.constexpr):
    """Store ``[1, columns]``, of which ``DIM`` count, as one row of any cache without a scale.

    ``STORE`` as ``cache_io.row_layout.layout`` makes it.
    """
    if STORE[2] == 0:
        c = tl.arange(0, x.shape[1])[None, :]
        to = pages + (layer.to(tl.int64) * STORE[1] + slot) * DIM
        tl.store(to + c, x.to(pages.dtype.element_ty), mask=c < DIM)
    else:
        _store_record(x, pages, layer, slot, STORE)
