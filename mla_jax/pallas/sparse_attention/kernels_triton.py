"""The Triton programs of sparse decode; ``triton.py`` says how they are launched.

A program is a block of heads of one token over one piece of its list, and of its list in a second
cache. ``SIZES`` are tokens, heads, columns of the value and those behind them; ``NEAR`` and ``FAR``
the two caches: layers, slots of each, elements (or bytes) of a row, keys of a list, keys of a piece
(0: no such cache), rows and bytes of a page; ``TILE`` heads of a block and keys of a turn.

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
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["attend", "attend_records", "attend_v4"]


@jit
def _place(SIZES: tl.constexpr, TILE: tl.constexpr):
    """Heads, token and piece of this program."""
    BLOCKS: tl.constexpr = (SIZES[1] + TILE[0] - 1) // TILE[0]
    pid = tl.program_id(0)
    head = (pid % BLOCKS) * TILE[0] + tl.arange(0, TILE[0])
    return head, (pid // BLOCKS) % SIZES[0], pid // (BLOCKS * SIZES[0])


@jit
def _columns(q, head, token, first, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """Columns ``first`` to ``first + COUNT`` of these heads' queries."""
    line = (token.to(tl.int64) * SIZES[1] + head)[:, None] * (SIZES[2] + SIZES[3])
    c = first + tl.arange(0, COUNT)[None, :]
    return tl.load(q + line + c, mask=(head < SIZES[1])[:, None], other=0.0)


@jit
def _end(row, begin, CACHE: tl.constexpr, TILE: tl.constexpr):
    """Behind the last row of a piece: lists end in -1 where a token sees few keys."""
    k = tl.arange(0, TILE[1])
    end = begin
    for i in range(begin, tl.minimum(begin + CACHE[4], CACHE[3]), TILE[1]):
        slot = tl.load(row + i + k, mask=i + k < CACHE[3], other=-1)
        found = (slot >= 0) & (slot < CACHE[1])
        end = tl.maximum(end, tl.max(tl.where(found, i + k + 1, 0)))
    return end


@jit
def _list(cache, token, piece, CACHE: tl.constexpr, TILE: tl.constexpr):
    """A token's list in one cache, where its piece begins and ends, and the cache's layer."""
    layer = tl.load(cache[2])
    row = cache[1] + token.to(tl.int64) * CACHE[3]
    begin = piece * CACHE[4]
    return row, begin, _end(row, begin, CACHE, TILE), layer


@jit
def _slots(row, i, end, layer, CACHE: tl.constexpr, TILE: tl.constexpr):
    """The rows of a turn, 0 where there is none; which of them there are; the layer."""
    k = tl.arange(0, TILE[1])
    slot = tl.load(row + i + k, mask=i + k < end, other=-1)
    there = (layer >= 0) & (layer < CACHE[0])
    slot = tl.where(there, slot, -1)
    inside = (slot >= 0) & (slot < CACHE[1])
    return tl.where(inside, slot, 0), inside, tl.where(there, layer, 0).to(tl.int64)


@jit
def _rows(row, i, end, layer, CACHE: tl.constexpr, TILE: tl.constexpr):
    """Where the rows of a turn begin in the cache, and which of them there are."""
    slot, inside, layer = _slots(row, i, end, layer, CACHE, TILE)
    return (layer * CACHE[1] + slot) * CACHE[2], inside


@jit
def _softmax(s, inside, top, total, SCALE: tl.constexpr):
    """One online step in base 2: probabilities, what to shrink sums by, new maximum and sum."""
    s = tl.where(inside[None, :], s * (SCALE * 1.4426950408889634), float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    return p, shrink, new, total * shrink + tl.sum(p, 1)


@jit
def _store(
    out, lse, acc, first, top, total, head, token, piece,
    COUNT: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Columns ``first`` to ``first + COUNT`` of the result, and ``lse`` in natural logarithms."""
    empty = total == 0.0
    to = (piece.to(tl.int64) * SIZES[0] + token) * SIZES[1] + head
    c = first + tl.arange(0, COUNT)[None, :]
    share = (acc / tl.where(empty, 1.0, total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] * SIZES[2] + c, share, mask=(head < SIZES[1])[:, None])
    natural = (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    tl.store(lse + to, tl.where(empty, float("-inf"), natural), mask=head < SIZES[1])


@jit
def _over_elements(
    q, cache, token, piece, state,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """All turns over one cache ``(pages, slots, layer)``. ``q``: columns of the value, and those
    behind it, which count only if there are any. ``state`` is maxima, sums and values so far.
    """
    q_latent, q_rope = q
    top, total, acc = state
    pages = cache[0]
    row, begin, end, layer = _list(cache, token, piece, CACHE, TILE)
    c = tl.arange(0, SIZES[2])[None, :]
    for i in range(begin, end, TILE[1]):
        at, inside = _rows(row, i, end, layer, CACHE, TILE)
        latent = tl.load(pages + at[:, None] + c, mask=inside[:, None], other=0.0)
        s = tl.dot(q_latent, latent.T)
        if SIZES[3] > 0:
            r = SIZES[2] + tl.arange(0, SIZES[3])[None, :]
            rope = tl.load(pages + at[:, None] + r, mask=inside[:, None], other=0.0)
            s = tl.dot(q_rope, rope.T, acc=s)
        p, shrink, top, total = _softmax(s, inside, top, total, SCALE)
        acc = tl.dot(p.to(latent.dtype), latent, acc=acc * shrink[:, None])
    return top, total, acc


@jit
def attend(
    q, pages, slots, number, more_pages, more_slots, more_number, out, lse,
    SIZES: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Over rows of elements of the queries' dtype."""
    VALUE: tl.constexpr = SIZES[2]
    FEW: tl.constexpr = TILE[0]
    head, token, piece = _place(SIZES, TILE)
    q_latent = _columns(q, head, token, 0, VALUE, SIZES)
    q_rope = q_latent
    if SIZES[3] > 0:
        q_rope = _columns(q, head, token, VALUE, SIZES[3], SIZES)
    top = tl.full((FEW,), float("-inf"), tl.float32)
    total = tl.zeros((FEW,), tl.float32)
    acc = tl.zeros((FEW, VALUE), tl.float32)
    top, total, acc = _over_elements(
        (q_latent, q_rope), (pages, slots, number), token, piece, (top, total, acc),
        SIZES, NEAR, TILE, SCALE,
    )  # fmt: skip
    if FAR[4] > 0:
        top, total, acc = _over_elements(
            (q_latent, q_rope), (more_pages, more_slots, more_number), token, piece,
            (top, total, acc), SIZES, FAR, TILE, SCALE,
        )  # fmt: skip
    _store(out, lse, acc, 0, top, total, head, token, piece, VALUE, SIZES)


@jit
def _v4_keys(pages, slot, inside, layer, like, CACHE: tl.constexpr):
    """Keys of 584-byte records: 448 codes with a scale for every 64, and 64 elements of bf16."""
    page = (slot // CACHE[5]).to(tl.int64)
    begin = (layer * (CACHE[1] // CACHE[5]) + page) * CACHE[6]
    offset = slot % CACHE[5]
    at = (begin + offset * 576)[:, None]
    c = tl.arange(0, 512)[None, :]
    coded = inside[:, None] & (c < 448)
    byte = tl.load(pages + at + c, mask=coded, other=0)
    x = tl.load(
        pages + (begin + CACHE[5] * 576 + offset * 8)[:, None] + c // 64, mask=coded, other=127
    ).to(tl.int32)
    # 2^(x - 127): 0 is subnormal, 255 no number
    bits = tl.where(x == 0, 0x400000, tl.where(x == 255, 0x7FC00000, x << 23))
    values = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    elements = (pages + at + 448 + 2 * (c - 448)).to(tl.pointer_type(tl.bfloat16))
    rotary = tl.load(elements, mask=inside[:, None] & (c >= 448), other=0.0)
    return tl.where(c < 448, values, rotary.to(tl.float32)).to(like.dtype)


@jit
def _over_v4(
    q_row, cache, token, piece, state,
    CACHE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """As ``_over_elements``, with whole rows as values."""
    top, total, acc = state
    pages = cache[0]
    row, begin, end, layer = _list(cache, token, piece, CACHE, TILE)
    for i in range(begin, end, TILE[1]):
        slot, inside, of_layer = _slots(row, i, end, layer, CACHE, TILE)
        keys = _v4_keys(pages, slot, inside, of_layer, q_row, CACHE)
        p, shrink, top, total = _softmax(tl.dot(q_row, keys.T), inside, top, total, SCALE)
        acc = tl.dot(p.to(keys.dtype), keys, acc=acc * shrink[:, None])
    return top, total, acc


@jit
def attend_v4(
    q, pages, slots, number, more_pages, more_slots, more_number, out, lse,
    SIZES: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Over 584-byte records, whose values are whole rows."""
    FEW: tl.constexpr = TILE[0]
    head, token, piece = _place(SIZES, TILE)
    q_row = _columns(q, head, token, 0, 512, SIZES)
    top = tl.full((FEW,), float("-inf"), tl.float32)
    total = tl.zeros((FEW,), tl.float32)
    acc = tl.zeros((FEW, 512), tl.float32)
    top, total, acc = _over_v4(
        q_row, (pages, slots, number), token, piece, (top, total, acc), NEAR, TILE, SCALE
    )
    if FAR[4] > 0:
        top, total, acc = _over_v4(
            q_row, (more_pages, more_slots, more_number), token, piece, (top, total, acc),
            FAR, TILE, SCALE,
        )  # fmt: skip
    _store(out, lse, acc, 0, top, total, head, token, piece, 512, SIZES)


@jit
def _codes(pages, at, inside, first, like):
    """128 codes of each record, from its byte ``first`` on."""
    c = first + tl.arange(0, 128)[None, :]
    byte = tl.load(pages + at[:, None] + c, mask=inside[:, None], other=0)
    return byte.to(tl.float8e4nv, bitcast=True).to(like.dtype)


@jit
def _scale(pages, at, inside, group):
    """The scale of a group of each record."""
    where = (pages + at + 512 + 4 * group).to(tl.pointer_type(tl.float32))
    return tl.load(where, mask=inside, other=0.0)


@jit
def _over_records(
    q, cache, token, piece, state,
    CACHE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """As ``_over_elements``; queries and values in groups of 128 columns."""
    q0, q1, q2, q3, q_rope = q
    top, total, acc0, acc1, acc2, acc3 = state
    pages = cache[0]
    row, begin, end, layer = _list(cache, token, piece, CACHE, TILE)
    r = tl.arange(0, 64)[None, :]
    for i in range(begin, end, TILE[1]):
        at, inside = _rows(row, i, end, layer, CACHE, TILE)
        c0 = _codes(pages, at, inside, 0, q0)
        c1 = _codes(pages, at, inside, 128, q0)
        c2 = _codes(pages, at, inside, 256, q0)
        c3 = _codes(pages, at, inside, 384, q0)
        f0 = _scale(pages, at, inside, 0)[None, :]
        f1 = _scale(pages, at, inside, 1)[None, :]
        f2 = _scale(pages, at, inside, 2)[None, :]
        f3 = _scale(pages, at, inside, 3)[None, :]
        ropes = (pages + at[:, None] + 528 + 2 * r).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(ropes, mask=inside[:, None], other=0.0).to(q0.dtype)
        s = tl.dot(q0, c0.T) * f0 + tl.dot(q1, c1.T) * f1
        s += tl.dot(q2, c2.T) * f2 + tl.dot(q3, c3.T) * f3
        s = tl.dot(q_rope, rope.T, acc=s)
        p, shrink, top, total = _softmax(s, inside, top, total, SCALE)
        less = shrink[:, None]
        acc0 = tl.dot((p * f0).to(c0.dtype), c0, acc=acc0 * less)
        acc1 = tl.dot((p * f1).to(c1.dtype), c1, acc=acc1 * less)
        acc2 = tl.dot((p * f2).to(c2.dtype), c2, acc=acc2 * less)
        acc3 = tl.dot((p * f3).to(c3.dtype), c3, acc=acc3 * less)
    return top, total, acc0, acc1, acc2, acc3


@jit
def attend_records(
    q, pages, slots, number, more_pages, more_slots, more_number, out, lse,
    SIZES: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Over 656-byte records: 512 codes, 4 scales, 64 rotary elements in bf16.

    Codes are multiplied as they are. A group's scale goes to its part of the scores, and to the
    probabilities that its values are multiplied with: exact for powers of two.
    """
    FEW: tl.constexpr = TILE[0]
    head, token, piece = _place(SIZES, TILE)
    q0 = _columns(q, head, token, 0, 128, SIZES)
    q1 = _columns(q, head, token, 128, 128, SIZES)
    q2 = _columns(q, head, token, 256, 128, SIZES)
    q3 = _columns(q, head, token, 384, 128, SIZES)
    q_rope = _columns(q, head, token, 512, 64, SIZES)
    top = tl.full((FEW,), float("-inf"), tl.float32)
    total = tl.zeros((FEW,), tl.float32)
    acc0 = tl.zeros((FEW, 128), tl.float32)
    acc1 = tl.zeros((FEW, 128), tl.float32)
    acc2 = tl.zeros((FEW, 128), tl.float32)
    acc3 = tl.zeros((FEW, 128), tl.float32)
    top, total, acc0, acc1, acc2, acc3 = _over_records(
        (q0, q1, q2, q3, q_rope), (pages, slots, number), token, piece,
        (top, total, acc0, acc1, acc2, acc3), NEAR, TILE, SCALE,
    )  # fmt: skip
    if FAR[4] > 0:
        top, total, acc0, acc1, acc2, acc3 = _over_records(
            (q0, q1, q2, q3, q_rope), (more_pages, more_slots, more_number), token, piece,
            (top, total, acc0, acc1, acc2, acc3), FAR, TILE, SCALE,
        )  # fmt: skip
    _store(out, lse, acc0, 0, top, total, head, token, piece, 128, SIZES)
    _store(out, lse, acc1, 128, top, total, head, token, piece, 128, SIZES)
    _store(out, lse, acc2, 256, top, total, head, token, piece, 128, SIZES)
    _store(out, lse, acc3, 384, top, total, head, token, piece, 128, SIZES)
