"""Triton programs of the router; ``triton.py`` says how they fit together.

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
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import ask_for, jit, swap_order, tl

__all__ = ["choose", "logits", "logits_first", "logits_normed"]


@jit
def _add_parts(rows, high, middle, low, total):
    """``total`` plus the product with three numbers that make up a weight, the smallest first."""
    total = tl.dot(rows, low, total)
    total = tl.dot(rows, middle, total)
    return tl.dot(rows, high, total)


@jit
def _add_exact(rows, weights, total):
    """``total + rows @ weights`` as exact as float32's; ``weights`` are float32."""
    if rows.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        weights -= high.to(tl.float32)
        middle = weights.to(tl.bfloat16)
        low = (weights - middle.to(tl.float32)).to(tl.bfloat16)
        return _add_parts(rows, high, middle, low, total)
    else:
        return tl.dot(rows.to(tl.float32), weights, total, input_precision="ieee")


@jit
def logits(
    x, kernel, tokens, out,
    SIZES: tl.constexpr, PIECE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    PARTED: tl.constexpr,
):  # fmt: skip
    """``out[part] = x @ kernel`` over ``COUNT`` pieces of channels; a tile of tokens and experts.

    ``SIZES`` are hidden and experts, ``TILE`` the tokens and experts of a program and the channels
    of one turn. Each piece is summed by itself, and then added. Products are as exact as float32's:
    of bfloat16 rows they are those of three bfloat16 numbers that make up a weight; ``PARTED``:
    ``kernel`` has these already, the largest first.
    """
    HIDDEN: tl.constexpr = SIZES[0]
    EXPERTS: tl.constexpr = SIZES[1]
    PROGRAMS: tl.constexpr = (HIDDEN + COUNT * PIECE - 1) // (COUNT * PIECE)
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    TILES: tl.constexpr = (EXPERTS + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    first = pid // TILES % PROGRAMS
    t = pid // (TILES * PROGRAMS) * ROWS + tl.arange(0, ROWS)
    e = pid % TILES * COLUMNS + tl.arange(0, COLUMNS)
    k = first * COUNT * PIECE + tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(COUNT):
        piece = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(0, PIECE, DEPTH):
            here = k < HIDDEN
            rows = tl.load(
                x + t.to(tl.int64)[:, None] * HIDDEN + k[None, :],
                mask=(t < tokens)[:, None] & here[None, :],
                other=0.0,
            )
            at = kernel + k[:, None] * EXPERTS + e[None, :]
            mask = here[:, None] & (e < EXPERTS)[None, :]
            weights = tl.load(at, mask=mask, other=0.0)
            if PARTED:
                middle = tl.load(at + HIDDEN * EXPERTS, mask=mask, other=0.0)
                low = tl.load(at + 2 * HIDDEN * EXPERTS, mask=mask, other=0.0)
                piece = _add_parts(rows, weights, middle, low, piece)
            else:
                piece = _add_exact(rows, weights, piece)
            k += DEPTH
        total += piece
    to = out + (first * tokens + t)[:, None].to(tl.int64) * EXPERTS + e[None, :]
    tl.store(to, total, mask=(t < tokens)[:, None] & (e < EXPERTS)[None, :])


@jit
def logits_first(
    x, kernel, tokens, out, same,
    SIZES: tl.constexpr, PIECE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    PARTED: tl.constexpr,
):  # fmt: skip
    """``logits``; ``same`` has the memory of ``x``, so that its readers wait for this launch."""
    logits(x, kernel, tokens, out, SIZES, PIECE, COUNT, TILE, PARTED)


@jit
def logits_normed(
    x, gain, kernel, tokens, out, normed,
    SIZES: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """``logits`` of rows that are normalised first, and these rows, ``normed``.

    ``TILE`` are rows, experts of a program, and the channels that are read at a time for the norm.
    Each program has one piece of channels and normalises all rows for itself. It brings its weights
    to the L2 cache first and loads them behind the rows: threads exchange loaded weights, and would
    wait for them before they load anything else.
    """
    HIDDEN: tl.constexpr = SIZES[0]
    EXPERTS: tl.constexpr = SIZES[1]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    PART: tl.constexpr = TILE[2]
    TILES: tl.constexpr = (EXPERTS + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    t = tl.arange(0, ROWS)
    e = pid % TILES * COLUMNS + tl.arange(0, COLUMNS)
    k = pid // TILES * PIECE + tl.arange(0, PIECE)
    there, here = (t < tokens)[:, None], k < HIDDEN
    line = pid % TILES * COLUMNS + tl.arange(0, max(COLUMNS // 32, 1)) * 32  # of 128 bytes
    inside = here[:, None] & (line < EXPERTS)[None, :]
    ask_for(kernel + k[:, None] * EXPERTS + line[None, :], inside)
    squares = tl.zeros((ROWS, PART), tl.float32)
    for c in tl.static_range(0, HIDDEN, PART):
        p = (c + tl.arange(0, PART))[None, :]
        part = tl.load(x + t[:, None] * HIDDEN + p, mask=there & (p < HIDDEN), other=0.0)
        squares += part.to(tl.float32) * part.to(tl.float32)
    at = t[:, None] * HIDDEN + k[None, :]
    own = tl.load(x + at, mask=there & here[None, :], other=0.0).to(tl.float32)
    factor = tl.load(gain + k, mask=here, other=0.0).to(tl.float32)
    mask = here[:, None] & (e < EXPERTS)[None, :]
    weights = tl.load(kernel + k[:, None] * EXPERTS + e[None, :], mask=mask, other=0.0)
    own *= tl.rsqrt(tl.sum(squares, 1) / HIDDEN + EPS)[:, None]
    rows = (factor[None, :] * own).to(x.dtype.element_ty)
    if pid % TILES == 0:
        tl.store(normed + at, rows, mask=there & here[None, :])
    total = _add_exact(rows, weights, tl.zeros((ROWS, COLUMNS), tl.float32))
    to = out + (pid // TILES * tokens + t)[:, None].to(tl.int64) * EXPERTS + e[None, :]
    tl.store(to, total, mask=there & (e < EXPERTS)[None, :])


@jit
def _best(values, index, NONE: tl.constexpr):
    """The lowest index of the largest value; NaN is larger than all.

    Values are compared as integers of the same order, of which a warp finds the largest at once.
    """
    values = tl.where(values != values, float("inf"), values) + 0.0  # 0 and -0 are equal
    rank = swap_order(values.to(tl.int32, bitcast=True))
    return tl.min(tl.where(rank == tl.max(rank), index, NONE))


@jit
def choose(
    logits, bias, real, tokens, weights, chosen,
    SIZES: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, METHOD: tl.constexpr,
    BIASED: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Weights and experts of one token, from the sum of its logits' pieces.

    ``SIZES`` are groups, experts of each, choices and kept groups; ``TILE`` the first two as powers
    of two. Experts are a matrix, a group in a row.
    """
    GROUPS: tl.constexpr = SIZES[0]
    EACH: tl.constexpr = SIZES[1]
    TOPK: tl.constexpr = SIZES[2]
    KEPT: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    NONE: tl.constexpr = 1 << 30
    INFINITY: tl.constexpr = float("inf")
    BY_BIAS: tl.constexpr = METHOD == "noaux_tc" or METHOD == "sqrtsoftplus"
    token = tl.program_id(0)
    group, inner = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = (group < GROUPS)[:, None] & (inner < EACH)[None, :]
    number = group[:, None] * EACH + inner[None, :]
    is_real = tl.load(real + token)  # early, like the bias: at their end these would be waited for
    offset = tl.load(bias + number, mask=exists, other=0.0) if BIASED else 0.0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for piece in range(PIECES):
        row = logits + (piece * tokens + token).to(tl.int64) * (GROUPS * EACH)
        total += tl.load(row + number, mask=exists, other=0.0)
    number = tl.where(exists, number, NONE)
    if BY_BIAS:
        if METHOD == "noaux_tc":
            scores = tl.sigmoid(total)
        else:  # sqrtsoftplus
            scores = tl.sqrt(tl.maximum(total, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(total))))
        choice = scores + offset
    else:
        powers = tl.exp(total - tl.max(tl.where(exists, total, -INFINITY)))
        scores = tl.where(exists, powers, 0.0)
        scores = scores / tl.sum(scores)
        choice = scores
    choice = tl.where(exists, choice, -INFINITY)
    if METHOD != "greedy":
        worth = tl.max(choice, axis=1)
        if BY_BIAS:
            first = tl.min(tl.where(choice == worth[:, None], number, NONE), axis=1)
            worth += tl.max(tl.where(number == first[:, None], -INFINITY, choice), axis=1)
        worth = tl.where(group < GROUPS, worth, -INFINITY)
        left = tl.where(group < GROUPS, group, NONE)
        kept = tl.zeros((ROWS,), tl.int32)
        for _ in tl.static_range(KEPT):
            g = _best(tl.where(left < NONE, worth, -INFINITY), left, NONE)
            kept = tl.where(group == g, 1, kept)
            left = tl.where(group == g, NONE, left)
        fill: tl.constexpr = -INFINITY if BY_BIAS else 0.0
        if not BY_BIAS:
            scores = tl.where(kept[:, None] > 0, scores, 0.0)
        choice = tl.where(exists & (kept[:, None] == 0), fill, choice)
    bits = scores.to(tl.int32, bitcast=True)  # of which a warp has a sum at once
    lane = tl.arange(0, 64)
    found = tl.full((64,), -1, tl.int32)
    share = tl.zeros((64,), tl.float32)
    left = number
    for j in tl.static_range(TOPK):
        e = _best(tl.where(left < NONE, choice, -INFINITY), left, NONE)
        found = tl.where(lane == j, e, found)
        own = tl.sum(tl.where(number == e, bits, 0)).to(tl.float32, bitcast=True)
        share = tl.where(lane == j, own, share)
        left = tl.where(left == e, NONE, left)
    if NORMALISE:
        share = share / (tl.sum(share) + 1e-20)
    found = tl.where(is_real, found, -1)
    at = token.to(tl.int64) * TOPK + lane
    tl.store(weights + at, share * SCALE, mask=lane < TOPK)
    tl.store(chosen + at, found, mask=lane < TOPK)
