"""Triton programs of products with block-scaled e4m3 weights; ``triton.py`` says how they are used.

A step of the loop over channels is one block of scales: e4m3 bytes are widened to the rows' dtype,
which is exact, multiplied, and the step's sum times its scale is added in float32.

Tiles of fewer than 16 rows multiply the weights with the rows, not the rows with the weights: a
tensor core's instruction has 16 lines of its first operand and 8 of its second, and such a step is
bound by instructions. Elements add up the same numbers in the same order either way.

Widening puts the bits of a byte at their places in 16 bits, with three instructions for two
elements where Triton's own conversion takes six slower ones. Exponents are then too small, by
``2**-120`` of bfloat16 and ``2**-8`` of float16: ``BITS`` makes up for both this and what the rows
are too large (``triton.raised``), so that nothing on the way is below float32's normal numbers. A
byte that is NaN becomes 480.

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
# pyright: reportAssignmentType=false

from mla_jax.pallas.grouped_matmul.kernels_triton import (
    _choices,
    _chosen,
    _lead,
    _own,
    _place,
    _put,
    _rows,
    _sole,
    _swiglu,
)
from mla_jax.pallas.triton_lib import INTERPRETED, jit, tl

__all__ = ["down", "gate_up", "matmul"]

DEPTH = tl.constexpr(128)
"""Channels of a block of scales."""


def _widening(shift: int, mask: str) -> str:
    """Assembly for four bytes: sign-extend each to 16 bits, shift it, clear the extra signs."""
    pair = """
    prmt.b32 t, $2, 0, {bytes};
    shl.b32 t, t, {shift};
    and.b32 ${number}, t, {mask};"""
    pairs = (
        pair.format(bytes=bytes, shift=shift, mask=mask, number=number)
        for number, bytes in enumerate(("0x9180", "0xb3a2"))
    )
    return "{\n    .reg .b32 t;" + "".join(pairs) + "\n}"


TO_BFLOAT16 = tl.constexpr(_widening(4, "0x87f087f0"))
TO_FLOAT16 = tl.constexpr(_widening(7, "0xbf80bf80"))

RAISED = tl.constexpr(2.0**64)
"""How much larger rows of bfloat16 are when they are multiplied."""


WHOLE = tl.constexpr(16)
"""Rows from which on they are the first operand."""


@jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of a tile before the first step."""
    if ROWS < WHOLE:
        return tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        return tl.zeros((ROWS, COLUMNS), tl.float32)


@jit
def _by_rows(total, ROWS: tl.constexpr):
    """The sums of a tile, ``[rows, columns]``."""
    if ROWS < WHOLE:
        return tl.trans(total)
    else:
        return total


if INTERPRETED:

    @jit
    def _widened(w, a):
        """What the assembly makes of bytes."""
        return (w.to(tl.float32) * (2.0**-120 if a.dtype == tl.bfloat16 else 2.0**-8)).to(a.dtype)

else:

    @jit
    def _widened(w, a):
        """Bytes as numbers of a's dtype with the same digits and too small exponents."""
        WIDEN: tl.constexpr = TO_BFLOAT16 if a.dtype == tl.bfloat16 else TO_FLOAT16
        return tl.inline_asm_elementwise(WIDEN, "=r,=r,r", [w], dtype=a.dtype, is_pure=True, pack=4)


@jit
def _step(a, w, scale, total):
    """``total + scale * (a w^T)``, or its transpose: rows and one block of e4m3 weights."""
    BITS: tl.constexpr = 2.0**56 if a.dtype == tl.bfloat16 else 2.0**8
    wide = _widened(w, a)
    product = tl.dot(wide, tl.trans(a)) if a.shape[0] < WHOLE else tl.dot(a, tl.trans(wide))
    return total + (tl.load(scale) * BITS) * product


@jit
def _loaded(at, live, RAISE: tl.constexpr):
    """Rows, raised here or by whoever made them: exact, and infinite above 2**64."""
    part = tl.load(at, mask=live[:, None], other=0.0)
    if RAISE and part.dtype == tl.bfloat16:
        part = (part * RAISED).to(tl.bfloat16)
    return part


@jit
def _gate_up_sums(
    x, weights, e, block, piece, token, read,
    SIZES: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Both products of an expert's rows and a block of columns; ``read``: rows that there are."""
    gate, gate_scale, up, up_scale = weights
    HIDDEN: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    PIECES: tl.constexpr = HOW[0]
    PARTED: tl.constexpr = HOW[1]
    STEPS: tl.constexpr = HIDDEN // DEPTH
    EACH: tl.constexpr = STEPS // PIECES
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    a = x + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    at = (e.to(tl.int64) * WIDTH + column[:, None]) * HIDDEN + k[None, :]
    s = (e * (WIDTH // DEPTH) + block * COLUMNS // DEPTH) * STEPS
    g, u = _nothing(ROWS, COLUMNS), _nothing(ROWS, COLUMNS)
    g_before, u_before = _nothing(ROWS, COLUMNS), _nothing(ROWS, COLUMNS)
    if PARTED:
        begin, end = piece * EACH, piece * EACH + EACH
    else:
        begin, end = 0, STEPS
    for i in range(begin, end):
        if PIECES > 1 and not PARTED:  # the sums of a piece are whole: they are what one adds
            new = i % EACH == 0
            g_before += tl.where(new, g, 0.0)
            u_before += tl.where(new, u, 0.0)
            g, u = tl.where(new, 0.0, g), tl.where(new, 0.0, u)
        part = _loaded(a + i * DEPTH, read, HOW[2])
        g = _step(part, tl.load(gate + at + i * DEPTH), gate_scale + s + i, g)
        u = _step(part, tl.load(up + at + i * DEPTH), up_scale + s + i, u)
    return g_before + g, u_before + u


@jit
def _gate_up_tile(
    x, weights, out, e, block, piece, pair, live,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    token = pair // SIZES[1]
    g, u = _gate_up_sums(x, weights, e, block, piece, token, live, SIZES, TILE, HOW)
    column = block * TILE[1] + tl.arange(0, TILE[1])
    row = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if HOW[1]:
        to = out + piece * (2 * SIZES[4] * WIDTH) + row
        tl.store(to, _by_rows(g, ROWS), mask=live[:, None])
        tl.store(to + SIZES[4] * WIDTH, _by_rows(u, ROWS), mask=live[:, None])
    else:
        h = _gated(g, u, LIMIT, out.dtype.element_ty)
        tl.store(out + row, _by_rows(h, ROWS), mask=live[:, None])


@jit
def _gate_up_together(
    x, weights, experts, pairs, out, e, block, piece,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The tile of expert ``e`` where every token has the row of its number."""
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    token = tl.arange(0, ROWS)
    read = token * SIZES[1] < pairs
    choices = _choices(experts, e, pairs, SIZES[1], ROWS)
    g, u = _gate_up_sums(x, weights, e, block, piece, token, read, SIZES, TILE, HOW)
    column = block * TILE[1] + tl.arange(0, TILE[1])
    if HOW[1]:
        to = out + piece * (2 * SIZES[4] * WIDTH)
        _put(_by_rows(g, ROWS), to, choices, column, WIDTH, SIZES[1])
        to += SIZES[4] * WIDTH
        _put(_by_rows(u, ROWS), to, choices, column, WIDTH, SIZES[1])
    else:
        h = _by_rows(_gated(g, u, LIMIT, out.dtype.element_ty), ROWS)
        _put(h, out, choices, column, WIDTH, SIZES[1])


@jit
def _gated(g, u, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """SwiGLU as rows of the next product, raised if they are of bfloat16."""
    h = _swiglu(g, u, LIMIT)
    if DTYPE == tl.bfloat16:
        h *= RAISED
    return h.to(DTYPE)


@jit
def gated(parts, count, out, PIECES: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Pieces of gate's and up's sums, ``[pieces, 2, count]``, added in order, and SwiGLU."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(parts + i, mask=inside, other=0.0)
    u = tl.load(parts + count + i, mask=inside, other=0.0)
    for p in range(1, PIECES):
        g += tl.load(parts + 2 * p * count + i, mask=inside, other=0.0)
        u += tl.load(parts + (2 * p + 1) * count + i, mask=inside, other=0.0)
    tl.store(out + i, _gated(g, u, LIMIT, out.dtype.element_ty), mask=inside)


@jit
def _down_sums(h, weight, scale, e, block, pair, live, SIZES: tl.constexpr, TILE: tl.constexpr):
    """The product of an expert's rows and a block of columns."""
    HIDDEN: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    STEPS: tl.constexpr = WIDTH // DEPTH
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row = pair.to(tl.int64)[:, None]
    a = h + row * WIDTH + k[None, :]
    at = weight + (e.to(tl.int64) * HIDDEN + column[:, None]) * WIDTH + k[None, :]
    s = scale + (e * (HIDDEN // DEPTH) + block * COLUMNS // DEPTH) * STEPS
    y = _nothing(ROWS, COLUMNS)
    for i in range(0, STEPS):
        part = _loaded(a + i * DEPTH, live, False)
        y = _step(part, tl.load(at + i * DEPTH), s + i, y)
    return y


@jit
def _down_tile(
    h, weight, scale, out, e, block, pair, live, SIZES: tl.constexpr, TILE: tl.constexpr
):
    y = _down_sums(h, weight, scale, e, block, pair, live, SIZES, TILE)
    column = block * TILE[1] + tl.arange(0, TILE[1])
    to = out + pair.to(tl.int64)[:, None] * SIZES[2] + column[None, :]
    tl.store(to, _by_rows(y.to(out.dtype.element_ty), TILE[0]), mask=live[:, None])


@jit
def gate_up(
    x, weights, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr,
    TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """``grouped_matmul.kernels_triton.gate_up``, the result raised; ``TILE``: rows, columns.

    ``weights`` are gate and up, each with its scales. The channels of ``x`` are cut into ``HOW[0]``
    pieces, whose sums are added in order; with ``HOW[1]`` each has a program of its own, and
    ``out`` is what ``gated`` takes. ``HOW[2]``: rows of ``x`` come as they are. Of ``SIZES`` the
    last is the number of pairs.
    """
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[3] // TILE[1]
    ROWS: tl.constexpr = TILE[0]
    if PAIRS > 0:
        SPLIT: tl.constexpr = HOW[0] if HOW[1] else 1
        block, first = pid % BLOCKS, pid // (BLOCKS * SPLIT)
        piece = pid // BLOCKS % SPLIT
        if TOGETHER:
            n, last = first, first
            while n <= last:
                e, last = _sole(experts, n, pairs, SIZES[0], PAIRS)
                if e >= 0:
                    _gate_up_together(
                        x, weights, experts, pairs, out, e, block, piece, SIZES, LIMIT, TILE, HOW
                    )
                n += SIZES[1]
            return
        turn = _chosen(experts, pairs, SIZES[0], PAIRS)
        for n in range(first + 1, tl.max(turn) + 1, SIZES[1]):
            e, pair, live = _lead(experts, turn, n, pairs, SIZES[0], PAIRS, ROWS)
            if e >= 0:
                _gate_up_tile(x, weights, out, e, block, piece, pair, live, SIZES, LIMIT, TILE, HOW)
        return
    e, block, first, end = _place(tiles, pid, BLOCKS)
    if e >= 0:
        pair, live = _rows(rows, first, end, ROWS)
        _gate_up_tile(x, weights, out, e, block, 0, pair, live, SIZES, LIMIT, TILE, HOW)


@jit
def down(
    h, weight, scale, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``grouped_matmul.kernels_triton.down``; ``TILE`` is rows and columns."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[2] // TILE[1]
    ROWS: tl.constexpr = TILE[0]
    if TOGETHER:
        n, last = pid // BLOCKS, pid // BLOCKS
        while n <= last:
            e, last = _sole(experts, n, pairs, SIZES[0], PAIRS)
            if e >= 0:
                choices = _choices(experts, e, pairs, SIZES[1], ROWS)
                pair, live = _own(choices, SIZES[1], ROWS)
                y = _down_sums(h, weight, scale, e, pid % BLOCKS, pair, live, SIZES, TILE)
                y = _by_rows(y.to(out.dtype.element_ty), ROWS)
                column = pid % BLOCKS * TILE[1] + tl.arange(0, TILE[1])
                _put(y, out, choices, column, SIZES[2], SIZES[1])
            n += SIZES[1]
        return
    if PAIRS > 0:
        turn = _chosen(experts, pairs, SIZES[0], PAIRS)
        for n in range(pid // BLOCKS + 1, tl.max(turn) + 1, SIZES[1]):
            e, pair, live = _lead(experts, turn, n, pairs, SIZES[0], PAIRS, ROWS)
            if e >= 0:
                _down_tile(h, weight, scale, out, e, pid % BLOCKS, pair, live, SIZES, TILE)
        return
    e, block, first, end = _place(tiles, pid, BLOCKS)
    if e >= 0:
        pair, live = _rows(rows, first, end, ROWS)
        _down_tile(h, weight, scale, out, e, block, pair, live, SIZES, TILE)


@jit
def matmul(
    x, weight, scale, tokens, out, SIZES: tl.constexpr, TILE: tl.constexpr, RAISE: tl.constexpr
):
    """``out[piece] = x W^T`` over one piece of the channels, for one tile of rows and columns.

    ``SIZES`` are channels in and out, and groups of outputs, each of which has channels of its own;
    ``TILE`` rows, columns, and the blocks of scales of a piece. ``RAISE``: rows come as they are.
    """
    INTO: tl.constexpr = SIZES[0]
    OUT: tl.constexpr = SIZES[1]
    GROUPS: tl.constexpr = SIZES[2]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    EACH: tl.constexpr = TILE[2]
    BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = INTO // DEPTH
    PIECES: tl.constexpr = (STEPS + EACH - 1) // EACH
    pid = tl.program_id(0)
    block, pid = pid % BLOCKS, pid // BLOCKS
    piece = pid % PIECES
    row = pid // PIECES * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    live, there = row < tokens, column < OUT
    group = block * COLUMNS // (OUT // GROUPS)
    a = x + (row.to(tl.int64)[:, None] * GROUPS + group) * INTO + k[None, :]
    at = weight + column.to(tl.int64)[:, None] * INTO + k[None, :]
    s = scale + block * COLUMNS // DEPTH * STEPS
    y = _nothing(ROWS, COLUMNS)
    for i in range(piece * EACH, tl.minimum(piece * EACH + EACH, STEPS)):
        part = _loaded(a + i * DEPTH, live, RAISE)
        y = _step(part, tl.load(at + i * DEPTH, mask=there[:, None], other=0.0), s + i, y)
    to = out + (piece * tokens + row).to(tl.int64)[:, None] * OUT + column[None, :]
    result = _by_rows(y.to(out.dtype.element_ty), ROWS)
    tl.store(to, result, mask=live[:, None] & there[None, :])
