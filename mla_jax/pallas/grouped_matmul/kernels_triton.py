"""Triton programs of the experts' products; ``triton.py`` says how they fit together.

A *pair* is one choice of one token, ``token * topk + k``. A *tile* is up to ``ROWS`` pairs of one
expert. Rows are gathered by pair and stored by pair, so nothing is permuted in memory, and a row
meets the same products in the same order wherever it lies in whichever tile.

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
# ruff: noqa: SIM102 (an outer test is static, an inner one is the device's)

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["FIELDS", "add_norm", "down", "gate_up", "plan"]

FIELDS = tl.constexpr(8)
"""Numbers of a tile: expert (-1 = none), first tile of its group, tiles of it, first row, end."""


@jit
def plan(
    experts,
    pairs,
    tile_count,
    tiles,
    rows,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program ``e``: pairs of expert ``e`` to ``rows``, in order, and its tiles to ``tiles``.

    The tiles of an expert are cut into groups of up to ``GROUP``, which share their weights.
    """
    e = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for c in range(0, pairs, CHUNK):
        chosen = tl.load(experts + c + i, mask=c + i < pairs, other=-1)
        counts += tl.histogram(chosen, BINS, mask=(chosen >= 0) & (chosen < EXPERTS))
    first_row = tl.sum(tl.where(bins < e, counts, 0), 0)
    end_row = first_row + tl.sum(tl.where(bins == e, counts, 0), 0)
    needed = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(bins < e, needed, 0), 0)
    own_tiles = (end_row - first_row + ROWS - 1) // ROWS
    if end_row > first_row:
        at = first_row
        for c in range(0, pairs, CHUNK):
            chosen = tl.load(experts + c + i, mask=c + i < pairs, other=-1)
            own = (chosen == e).to(tl.int32)
            tl.store(rows + at + tl.cumsum(own, 0) - 1, c + i, mask=own > 0)
            at += tl.sum(own, 0)
    j = tl.arange(0, 64)
    for c in range(0, own_tiles, 64):
        t = c + j
        group = t // GROUP * GROUP
        to = tiles + (first_tile + t) * FIELDS
        here = t < own_tiles
        tl.store(to, tl.zeros_like(t) + e, mask=here)
        tl.store(to + 1, first_tile + group, mask=here)
        tl.store(to + 2, tl.minimum(own_tiles - group, GROUP), mask=here)
        tl.store(to + 3, first_row + t * ROWS, mask=here)
        tl.store(to + 4, tl.zeros_like(t) + end_row, mask=here)
    if e == EXPERTS - 1:  # behind the last tile of the last expert
        for c in range(first_tile + own_tiles, tile_count, 64):
            none = c + j < tile_count
            tl.store(tiles + (c + j) * FIELDS, tl.full((64,), -1, tl.int32), mask=none)


@jit
def _lead(experts, turn, n, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """Without a plan: the tile that pair number ``n`` of ``turn`` leads, or expert -1.

    Of the pairs of one expert, every ``ROWS``-th leads itself and those up to the next leader.
    """
    i = tl.arange(0, PAIRS)
    p = tl.sum(tl.where(turn == n, i, 0), 0)
    e = tl.load(experts + p)
    same = tl.load(experts + i, mask=i < pairs, other=-1) == e
    rank = tl.cumsum(same.to(tl.int32), 0)  # from 1 on
    own = tl.sum(tl.where(i == p, rank, 0), 0)
    leads = (e >= 0) & (e < EXPERTS) & ((own - 1) % ROWS == 0)
    wanted = own + tl.arange(0, ROWS)
    found = same[None, :] & (rank[None, :] == wanted[:, None])
    pair = tl.sum(tl.where(found, i[None, :], 0), 1)
    live = tl.sum(found.to(tl.int32), 1) > 0
    return tl.where(leads, e, -1), pair, live


@jit
def _chosen(experts, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """For every pair: which one it is among those that chose an expert, from 1 on; else 0."""
    i = tl.arange(0, PAIRS)
    e = tl.load(experts + i, mask=i < pairs, other=-1)
    chosen = ((e >= 0) & (e < EXPERTS)).to(tl.int32)
    return tl.cumsum(chosen, 0) * chosen


@jit
def _sole(experts, n, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Where every token has a row of the tile: the expert of pair ``n``, if no pair before has it.

    Else -1. Also the last pair that has an expert; beside a -1 it may be a later pair.
    """
    i = tl.arange(0, PAIRS)
    e = tl.load(experts + n)
    each = tl.load(experts + i, mask=i < pairs, other=-1)
    there = (each >= 0) & (each < EXPERTS)
    last = tl.max(tl.where(there & (each == e) & (i < n), PAIRS, tl.where(there, i, -1)), 0)
    sole = (e >= 0) & (e < EXPERTS) & (last < PAIRS)
    return tl.where(sole, e, -1), tl.minimum(last, pairs - 1)


@jit
def _choices(experts, e, pairs, TOPK: tl.constexpr, ROWS: tl.constexpr):
    """For each choice: whether the token of a row's number chose expert ``e`` by it.

    They are read before the product, and its rows are stored behind it without a wait.
    """
    first = tl.arange(0, ROWS) * TOPK
    own = ()
    for k in tl.static_range(TOPK):
        own += (tl.load(experts + first + k, mask=first + k < pairs, other=-1) == e,)
    return own


@jit
def _own(choices, TOPK: tl.constexpr, ROWS: tl.constexpr):
    """Of each token, which has the row of its number: the pair by which it chose, and whether."""
    first = tl.arange(0, ROWS) * TOPK
    pair = first
    live = first < 0
    for k in tl.static_range(TOPK):
        pair = tl.where(choices[k], first + k, pair)
        live = live | choices[k]
    return pair, live


@jit
def _put(y, out, choices, column, WIDTH: tl.constexpr, TOPK: tl.constexpr):
    """Rows of tokens to all their pairs of the ``choices``."""
    first = tl.arange(0, y.shape[0]) * TOPK
    for k in tl.static_range(TOPK):
        to = out + (first + k).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(to, y, mask=choices[k][:, None])


@jit
def _rows(rows, first, end, ROWS: tl.constexpr):
    """Pairs of the rows from ``first`` on, and which of them exist."""
    r = first + tl.arange(0, ROWS)
    live = r < end
    return tl.load(rows + r, mask=live, other=0), live


@jit
def _place(tiles, pid, BLOCKS: tl.constexpr):
    """``(expert, tile, block, first row, end row)`` of a program.

    Programs of a group follow each other, tile by tile under one block of columns: the weights of
    a block are read from memory once, and found in L2 by the group's other tiles.
    """
    own = tiles + pid // BLOCKS * FIELDS  # of the same group as the tile sought
    e = tl.load(own)
    first = tl.load(own + 1, mask=e >= 0, other=0)
    size = tl.load(own + 2, mask=e >= 0, other=1)
    local = pid - first * BLOCKS
    tile = first + local % size
    start = tl.load(tiles + tile * FIELDS + 3, mask=e >= 0, other=0)
    return e, local // size, start, tl.load(own + 4, mask=e >= 0, other=0)


@jit
def _swiglu(g, u, LIMIT: tl.constexpr):
    """``ref.swiglu``; NaN stays NaN."""
    if LIMIT is not None:
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return g * tl.sigmoid(g) * u


@jit
def _gate_up_sums(
    x, gate, up, e, block, token, read,
    SIZES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Both products of an expert's rows and a block of columns; ``read``: rows that there are."""
    HIDDEN: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    COLUMNS: tl.constexpr = TILE[2]
    DEPTH: tl.constexpr = TILE[3]
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    a = x + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    at = e.to(tl.int64) * HIDDEN * WIDTH + k[:, None] * WIDTH + column[None, :]
    b, c = gate + at, up + at
    g = tl.zeros((ROWS, COLUMNS), tl.float32)
    u = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, HIDDEN, DEPTH):
        part = tl.load(a, mask=read[:, None], other=0.0)
        g = tl.dot(part, tl.load(b), g)
        u = tl.dot(part, tl.load(c), u)
        a += DEPTH
        b += DEPTH * WIDTH
        c += DEPTH * WIDTH
    return g, u


@jit
def _gate_up_tile(
    x, gate, up, out, e, block, pair, live,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    g, u = _gate_up_sums(x, gate, up, e, block, pair // SIZES[1], live, SIZES, ROWS, TILE)
    h = _swiglu(g, u, LIMIT).to(out.dtype.element_ty)
    column = block * TILE[2] + tl.arange(0, TILE[2])
    tl.store(out + pair.to(tl.int64)[:, None] * SIZES[3] + column[None, :], h, mask=live[:, None])


@jit
def _down_sums(
    h, weight, e, block, pair, live,
    SIZES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The product of an expert's rows and a block of columns."""
    HIDDEN: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    COLUMNS: tl.constexpr = TILE[2]
    DEPTH: tl.constexpr = TILE[3]
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row = pair.to(tl.int64)[:, None]
    a = h + row * WIDTH + k[None, :]
    b = weight + e.to(tl.int64) * WIDTH * HIDDEN + k[:, None] * HIDDEN + column[None, :]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, WIDTH, DEPTH):
        part = tl.load(b)  # first: which rows are read may still have to be known
        y = tl.dot(tl.load(a, mask=live[:, None], other=0.0), part, y)
        a += DEPTH
        b += DEPTH * HIDDEN
    return y


@jit
def _down_tile(
    h, weight, out, e, block, pair, live,
    SIZES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    y = _down_sums(h, weight, e, block, pair, live, SIZES, ROWS, TILE).to(out.dtype.element_ty)
    column = block * TILE[2] + tl.arange(0, TILE[2])
    tl.store(out + pair.to(tl.int64)[:, None] * SIZES[2] + column[None, :], y, mask=live[:, None])


@jit
def gate_up(
    x, gate, up, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``out[pair] = silu(x gate) * (x up)`` over one tile's rows and one block of columns.

    ``SIZES`` are experts, choices, hidden and width; ``TILE`` rows, tail, columns and depth: a
    tile of no more rows than the tail's is computed as one of so many. ``PAIRS`` > 0, a power of
    two from ``pairs`` on: no plan, pairs lead themselves; ``rows`` and ``tiles`` are not read, and
    of ``choices`` times as many programs as blocks each takes every so many'th pair that has an
    expert. Pairs without an expert are skipped. ``TOGETHER``: there are no more tokens than
    rows of a tile, so each has the row of its number.
    """
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[3] // TILE[2]
    ROWS: tl.constexpr = TILE[0]
    TAIL: tl.constexpr = TILE[1]
    if TOGETHER:
        n, last, block = pid // BLOCKS, pid // BLOCKS, pid % BLOCKS
        token = tl.arange(0, ROWS)
        while n <= last:
            e, last = _sole(experts, n, pairs, SIZES[0], PAIRS)
            if e >= 0:
                read = token * SIZES[1] < pairs
                choices = _choices(experts, e, pairs, SIZES[1], ROWS)
                g, u = _gate_up_sums(x, gate, up, e, block, token, read, SIZES, ROWS, TILE)
                h = _swiglu(g, u, LIMIT).to(out.dtype.element_ty)
                column = block * TILE[2] + tl.arange(0, TILE[2])
                _put(h, out, choices, column, SIZES[3], SIZES[1])
            n += SIZES[1]
        return
    if PAIRS > 0:
        turn = _chosen(experts, pairs, SIZES[0], PAIRS)
        for n in range(pid // BLOCKS + 1, tl.max(turn) + 1, SIZES[1]):
            e, pair, live = _lead(experts, turn, n, pairs, SIZES[0], PAIRS, ROWS)
            if e >= 0:
                block = pid % BLOCKS
                _gate_up_tile(x, gate, up, out, e, block, pair, live, SIZES, LIMIT, ROWS, TILE)
        return
    e, block, first, end = _place(tiles, pid, BLOCKS)
    if e < 0:
        return
    if TAIL < ROWS:
        if end - first <= TAIL:
            pair, live = _rows(rows, first, end, TAIL)
            _gate_up_tile(x, gate, up, out, e, block, pair, live, SIZES, LIMIT, TAIL, TILE)
            return
    pair, live = _rows(rows, first, end, ROWS)
    _gate_up_tile(x, gate, up, out, e, block, pair, live, SIZES, LIMIT, ROWS, TILE)


@jit
def down(
    h, weight, experts, rows, tiles, pairs, out,
    SIZES: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``out[pair] = h[pair] down`` over one tile's rows and one block of columns."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = SIZES[2] // TILE[2]
    ROWS: tl.constexpr = TILE[0]
    TAIL: tl.constexpr = TILE[1]
    if TOGETHER:
        n, last = pid // BLOCKS, pid // BLOCKS
        while n <= last:
            e, last = _sole(experts, n, pairs, SIZES[0], PAIRS)
            if e >= 0:
                choices = _choices(experts, e, pairs, SIZES[1], ROWS)
                pair, live = _own(choices, SIZES[1], ROWS)
                y = _down_sums(h, weight, e, pid % BLOCKS, pair, live, SIZES, ROWS, TILE)
                column = pid % BLOCKS * TILE[2] + tl.arange(0, TILE[2])
                _put(y.to(out.dtype.element_ty), out, choices, column, SIZES[2], SIZES[1])
            n += SIZES[1]
        return
    if PAIRS > 0:
        turn = _chosen(experts, pairs, SIZES[0], PAIRS)
        for n in range(pid // BLOCKS + 1, tl.max(turn) + 1, SIZES[1]):
            e, pair, live = _lead(experts, turn, n, pairs, SIZES[0], PAIRS, ROWS)
            if e >= 0:
                _down_tile(h, weight, out, e, pid % BLOCKS, pair, live, SIZES, ROWS, TILE)
        return
    e, block, first, end = _place(tiles, pid, BLOCKS)
    if e < 0:
        return
    if TAIL < ROWS:
        if end - first <= TAIL:
            pair, live = _rows(rows, first, end, TAIL)
            _down_tile(h, weight, out, e, block, pair, live, SIZES, TAIL, TILE)
            return
    pair, live = _rows(rows, first, end, ROWS)
    _down_tile(h, weight, out, e, block, pair, live, SIZES, ROWS, TILE)


@jit
def add_norm(
    y, weights, experts, residual, gain, out, normed,
    SIZES: tl.constexpr, PLACED: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A token's choices, weighted and added up, to its residual: ``out``; and the norm of that.

    ``SIZES`` are the experts, choices and channels; ``PLACED``: rows of ``y`` instead of experts.
    A program has a token. The sum of the choices is rounded before it is added, as it is where
    nothing follows, and the other sum before it is normalised.
    """
    token = tl.program_id(0).to(tl.int64)
    TOPK: tl.constexpr = SIZES[1]
    HIDDEN: tl.constexpr = SIZES[2]
    column = tl.arange(0, COLUMNS)
    there = column < HIDDEN
    at = token * HIDDEN + column
    h = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOPK):
        e = tl.load(experts + token * TOPK + k)
        chosen = (e >= 0) & (e < SIZES[0])
        weight = tl.where(chosen, tl.load(weights + token * TOPK + k), 0.0)
        line = e.to(tl.int64) if PLACED else token * TOPK + k
        row = y + line * HIDDEN + column
        read = column < tl.where(chosen, HIDDEN, 0)  # rows of padding come from memory, late
        total += weight * tl.load(row, mask=read, other=0.0).to(tl.float32)
    like = out.dtype.element_ty
    h = (h + total.to(like).to(tl.float32)).to(like)
    tl.store(out + at, h, mask=there)
    wide = h.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + EPS)
    tl.store(normed + at, (factor * wide).to(like), mask=there)
