"""The Triton programs that take the best of a row; ``triton.py`` says how it is launched.

Imported only where Triton is there: by ``triton.py``.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import jit, scatter, swap_order, tl

__all__ = ["best_of", "stream"]

NONE = tl.constexpr(-0x7FFFFFFF - 1)
"""Rank of what is no candidate; that of NaN is one more."""


@jit
def _grid(SIZE: tl.constexpr):
    """Numbers of candidates, as rows of which a warp has several: [SIZE / LINE, LINE]."""
    LINE: tl.constexpr = 128 if SIZE > 128 else SIZE
    return tl.arange(0, SIZE // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]


@jit
def _flat(x):
    """All elements in any order: each thread's are joined before threads exchange anything."""
    return tl.reshape(x, (x.shape[0] * x.shape[1],), can_reorder=True)


@jit
def _count(x):
    return tl.sum(_flat(x.to(tl.int32)), 0)


@jit
def _bound(ranks, wanted, total):
    """The largest rank that ``wanted`` of ``total`` candidates reach, or one that just so many do;
    and how many of those that equal it are among them.

    Between a rank that enough reach and one that too few do, the next one tried is where a line
    between both counts would be right, every third time the middle.
    """
    low = tl.min(_flat(tl.where(ranks == NONE, 0x7FFFFFFF, ranks)), 0)
    high = tl.max(_flat(ranks), 0)
    reach = total
    few = wanted - wanted
    turn = wanted - wanted
    while (low < high) & (reach != wanted):
        a = swap_order(low).to(tl.float32, bitcast=True)
        b = swap_order(high).to(tl.float32, bitcast=True)
        part = (reach - wanted).to(tl.float32) / (reach - few).to(tl.float32)
        line = swap_order((a + (b - a) * part).to(tl.int32, bitcast=True))
        middle = (low | high) - ((low ^ high) >> 1)
        tried = tl.minimum(tl.maximum(tl.where(turn == 2, middle, line), low + 1), high)
        count = _count(ranks >= tried)
        enough = count >= wanted
        low = tl.where(enough, tried, low)
        high = tl.where(enough, high, tried - 1)
        reach = tl.where(enough, count, reach)
        few = tl.where(enough, few, count)
        turn = tl.where(turn == 2, 0, turn + 1)
    return low, tl.where(reach == wanted, total, wanted - few)


@jit
def _places(r, total, wanted):
    """Where each candidate goes if the best ``wanted`` are stored in order, or -1; the bound."""
    bound = NONE
    equals = total
    if total > wanted:
        bound, equals = _bound(r, wanted, total)
    above = (r > bound).to(tl.int32)
    same = ((r == bound) & (r != NONE)).to(tl.int32)
    both = above + (same << 16)
    here = tl.cumsum(both, 1)
    lines = tl.sum(both, 1)
    before = (tl.cumsum(lines, 0) - lines)[:, None] + here - both
    kept = (above != 0) | ((same != 0) & ((before >> 16) < equals))
    return tl.where(kept, (before & 0xFFFF) + tl.minimum(before >> 16, equals), -1), bound


@jit
def _move(at, r, p, ranks, places):
    """Store entries of a list ``at`` their new places, which may lie in the same list."""
    tl.debug_barrier()  # all have read what some overwrite
    scatter(ranks + at, r, at >= 0)
    scatter(places + at, p, at >= 0)


@jit
def _everything(places, count, K: tl.constexpr, STEP: tl.constexpr):
    """The places of a row that sees at most ``K`` keys."""
    for i in tl.static_range(0, K, STEP):
        p = i + tl.arange(0, STEP)
        tl.store(places + p, tl.where(p < count, p, -1), mask=p < K)


@jit
def best_of(
    old_ranks, old_places, chunk, starts, ends, base, ranks, places,
    K: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The best ``K`` of a part of a row's columns, or of its lists, in order of place.

    ``OLD`` are entries of such a part and of the row, ``NEW`` columns of such a part and of the
    row; one of both is 0. Column 0 is key ``base``. ``SIZE`` is a power of two that holds a part.
    Behind less than ``K`` stand ranks of ``NONE`` and places of -1. A row that sees at most ``K``
    keys in all takes them; nothing was scored for it.
    """
    PARTS: tl.constexpr = tl.cdiv(NEW[1], NEW[0]) if NEW[0] else tl.cdiv(OLD[1], OLD[0])
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    line = row.to(tl.int64)
    start = tl.load(starts + line)
    end = tl.load(ends + line)
    to = (line * PARTS + part) * K
    if end - start <= K:
        if part == 0:
            _everything(places + to, end - start, K, SIZE)
    else:
        j = _grid(SIZE)
        if NEW[0]:
            column = part * NEW[0] + j
            key = tl.load(base) + column
            seen = (j < NEW[0]) & (column < NEW[1]) & (key >= start) & (key < end)
            r = tl.load(chunk + line * NEW[1] + column, mask=seen, other=NONE)
        else:
            listed = (j < OLD[0]) & (part * OLD[0] + j < OLD[1])
            entry = line * OLD[1] + part * OLD[0] + j
            r = tl.load(old_ranks + entry, mask=listed, other=NONE)
        total = _count(r != NONE)
        at, _ = _places(r, total, K)
        where = key - start if NEW[0] else tl.load(old_places + entry, mask=at >= 0, other=-1)
        _move(at, r, where, ranks + to, places + to)
        if total < K:
            behind = (j >= total) & (j < K)
            tl.store(ranks + to + j, NONE, mask=behind)
            tl.store(places + to + j, -1, mask=behind)


@jit
def stream(
    old_ranks, old_places, old_state, chunk, starts, ends, base, ranks, places, state, chosen,
    K: tl.constexpr, SIZES: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """A row's candidates so far with those of a chunk; behind the last one, the best ``K``.

    Up to ``SIZE = 2 K`` candidates lie in the row's list, in order of place. ``state`` [rows, 2] is
    how many they are, and a rank that ``K`` of them reach: what comes later must be above it.
    ``STEP`` columns are looked at together. Where they do not fit, the list is cut down to its best
    ``K``; where they still do not, they are. ``SIZES`` are columns of a chunk, ``STEP`` and
    ``SIZE``; ``TURN`` is whether it is the first chunk, and whether it is the last.
    """
    COLUMNS: tl.constexpr = SIZES[0]
    STEP: tl.constexpr = SIZES[1]
    SIZE: tl.constexpr = SIZES[2]
    FIRST: tl.constexpr = TURN[0]
    LAST: tl.constexpr = TURN[1]
    line = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + line)
    end = tl.load(ends + line)
    first = tl.load(base)
    mine = ranks + line * SIZE
    where = places + line * SIZE
    if end - start <= K:
        if LAST:
            _everything(chosen + line * K, end - start, K, STEP)
    else:
        count = start - start
        bound = count + NONE
        if not FIRST:
            count = tl.load(old_state + 2 * line)
            bound = tl.load(old_state + 2 * line + 1)
        a = tl.maximum(start - first, 0) // STEP * STEP
        b = tl.minimum(end - first, COLUMNS)
        j = _grid(STEP)
        whole = _grid(SIZE)
        for i in range(a, b, STEP):
            key = first + i + j
            seen = (i + j < b) & (key >= start)
            r = tl.load(chunk + line * COLUMNS + i + j, mask=seen, other=NONE)
            more = _count(r > bound)
            wanted = more
            if count + more > SIZE:
                if count > K:
                    tl.debug_barrier()  # what other threads stored is there
                    old = tl.load(mine + whole, mask=whole < count, other=NONE)
                    at, cut = _places(old, count, K)
                    p = tl.load(where + whole, mask=at >= 0, other=-1)
                    _move(at, old, p, mine, where)
                    bound = tl.maximum(bound, cut)
                    count = count - count + K
                    tl.debug_barrier()
                    more = _count(r > bound)
                wanted = tl.minimum(more, K)
            to, cut = _places(tl.where(r > bound, r, NONE), more, wanted)
            scatter(mine + count + to, r, to >= 0)
            scatter(where + count + to, key - start, to >= 0)
            count += wanted
            bound = tl.maximum(bound, cut)
        if LAST:
            tl.debug_barrier()
            old = tl.load(mine + whole, mask=whole < count, other=NONE)
            at, _ = _places(old, count, K)
            p = tl.load(where + whole, mask=at >= 0, other=-1)
            _move(at, old, p, mine, chosen + line * K)
        else:
            tl.store(state + 2 * line, count)
            tl.store(state + 2 * line + 1, bound)
