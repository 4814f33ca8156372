"""Triton programs of products with block-scaled e4m3 weights; ``triton.py`` says how they are used.

A step of the loop over channels is one block of scales: e4m3 bytes are widened to the rows' dtype,
which is exact, multiplied, and the step's sum times its scale is added in float32.

Widening puts the bits of a byte at their places in 16 bits, with two instructions an element where
Triton's own conversion takes three slower ones. Exponents are then too small, by ``2**-120`` of
bfloat16 and ``2**-8`` of float16: ``BITS`` makes up for both this and what the rows are too large
(``triton.raised``), so that nothing on the way is below float32's normal numbers. A byte that is
NaN becomes 480.

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

from mla_jax.pallas.grouped_matmul.kernels_triton import _chosen, _lead, _place, _rows, _swiglu
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["down", "gate_up", "matmul"]

DEPTH = tl.constexpr(128)
"""Channels of a block of scales."""


def _widening(shift: int, mask: str) -> str:
    """Four bytes to four numbers: each on top of 16 bits, its exponent and digits moved down."""
    pair = """
    prmt.b32 t, $2, 0, {bytes};
    shr.u32 u, t, {shift};
    and.b32 u, u, {mask};
    lop3.b32 ${number}, t, 0x80008000, u, 0xEA;"""
    pairs = (
        pair.format(bytes=bytes, shift=shift, mask=mask, number=number)
        for number, bytes in enumerate(("0x1404", "0x3424"))
    )
    return "{\n    .reg .b32 t, u;" + "".join(pairs) + "\n}"


TO_BFLOAT16 = tl.constexpr(_widening(4, "0x07f007f0"))
TO_FLOAT16 = tl.constexpr(_widening(1, "0x3f803f80"))

RAISED = tl.constexpr(2.0**64)
"""How much larger rows of bfloat16 come."""


@jit
def _step(a, w, scale, total):
    """``total + scale * (a w^T)``: rows and one block of e4m3 weights."""
    BITS: tl.constexpr = 2.0**56 if a.dtype == tl.bfloat16 else 2.0**8
    WIDEN: tl.constexpr = TO_BFLOAT16 if a.dtype == tl.bfloat16 else TO_FLOAT16
    wide = tl.inline_asm_elementwise(WIDEN, "=r,=r,r", [w], dtype=a.dtype, is_pure=True, pack=4)
    return total + (tl.load(scale) * BITS) * tl.dot(a, tl.trans(wide))


@jit
def _gate_up_tile(
    x, gate, gate_scale, up, up_scale, out, e, block, pair, live,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    TOPK: tl.constexpr = SIZES[1]
    HIDDEN: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    STEPS: tl.constexpr = HIDDEN // DEPTH
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    a = x + (pair // TOPK).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    at = (e.to(tl.int64) * WIDTH + column[:, None]) * HIDDEN + k[None, :]
    s = (e * (WIDTH // DEPTH) + block * COLUMNS // DEPTH) * STEPS
    g = tl.zeros((ROWS, COLUMNS), tl.float32)
    u = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, STEPS):
        part = tl.load(a + i * DEPTH, mask=live[:, None], other=0.0)
        g = _step(part, tl.load(gate + at + i * DEPTH), gate_scale + s + i, g)
        u = _step(part, tl.load(up + at + i * DEPTH), up_scale + s + i, u)
    h = _swiglu(g, u, LIMIT)
    if out.dtype.element_ty == tl.bfloat16:
        h *= RAISED
    h = h.to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :], h, mask=live[:, None])


@jit
def _down_tile(
    h, weight, scale, out, e, block, pair, live, SIZES: tl.constexpr, TILE: tl.constexpr
):
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
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, STEPS):
        part = tl.load(a + i * DEPTH, mask=live[:, None], other=0.0)
        y = _step(part, tl.load(at + i * DEPTH), s + i, y)
    to = out + row * HIDDEN + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None])


@jit
def gate_up(
    x, gate, gate_scale, up, up_scale, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``grouped_matmul.kernels_triton.gate_up``, the result raised; ``TILE``: rows, columns."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[3] // TILE[1]
    ROWS: tl.constexpr = TILE[0]
    if PAIRS > 0:
        turn = _chosen(experts, pairs, SIZES[0], PAIRS)
        for n in range(pid // BLOCKS + 1, tl.max(turn) + 1, SIZES[1]):
            e, pair, live = _lead(experts, turn, n, pairs, SIZES[0], PAIRS, ROWS)
            if e >= 0:
                _gate_up_tile(
                    x, gate, gate_scale, up, up_scale, out, e, pid % BLOCKS, pair, live,
                    SIZES, LIMIT, TILE,
                )  # fmt: skip
        return
    e, block, first, end = _place(tiles, pid, BLOCKS)
    if e >= 0:
        pair, live = _rows(rows, first, end, ROWS)
        _gate_up_tile(
            x, gate, gate_scale, up, up_scale, out, e, block, pair, live, SIZES, LIMIT, TILE
        )


@jit
def down(
    h, weight, scale, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``grouped_matmul.kernels_triton.down``; ``TILE`` is rows and columns."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[2] // TILE[1]
    ROWS: tl.constexpr = TILE[0]
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
def matmul(x, weight, scale, tokens, out, SIZES: tl.constexpr, TILE: tl.constexpr):
    """``out[piece] = x W^T`` over one piece of the channels, for one tile of rows and columns.

    ``SIZES`` are channels in and out; ``TILE`` rows, columns, and the blocks of scales of a piece.
    """
    INTO: tl.constexpr = SIZES[0]
    OUT: tl.constexpr = SIZES[1]
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
    a = x + row.to(tl.int64)[:, None] * INTO + k[None, :]
    at = weight + column.to(tl.int64)[:, None] * INTO + k[None, :]
    s = scale + block * COLUMNS // DEPTH * STEPS
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(piece * EACH, tl.minimum(piece * EACH + EACH, STEPS)):
        part = tl.load(a + i * DEPTH, mask=live[:, None], other=0.0)
        y = _step(part, tl.load(at + i * DEPTH, mask=there[:, None], other=0.0), s + i, y)
    to = out + (piece * tokens + row).to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])
