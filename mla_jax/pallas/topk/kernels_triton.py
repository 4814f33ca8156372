"""The Triton programs that take the best of a row; ``triton.py`` says how it is launched.

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
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["best_of", "stream"]

NONE = tl.constexpr(-0x7FFFFFFF - 1)
"""Rank of what is no candidate; that of NaN is one more."""


@jit
def _swap(x):
    """Between a rank and the bits of its score, both ways."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@jit
def _bound(ranks, wanted, total):
    """The largest rank that ``wanted`` of ``total`` candidates reach, or one that just so many do.

    Between a rank that enough reach and one that too few do, the next one tried is where a line
    between both counts would be right, every third time the middle.
    """
    low = tl.min(tl.where(ranks == NONE, 0x7FFFFFFF, ranks), 0)
    high = tl.max(ranks, 0)
    reach = total
    few = wanted - wanted
    turn = wanted - wanted
    while (low < high) & (reach != wanted):
        a = _swap(low).to(tl.float32, bitcast=True)
        b = _swap(high).to(tl.float32, bitcast=True)
        part = (reach - wanted).to(tl.float32) / (reach - few).to(tl.float32)
        line = _swap((a + (b - a) * part).to(tl.int32, bitcast=True))
        middle = (low | high) - ((low ^ high) >> 1)
        tried = tl.minimum(tl.maximum(tl.where(turn == 2, middle, line), low + 1), high)
        count = tl.sum((ranks >= tried).to(tl.int32), 0)
        enough = count >= wanted
        low = tl.where(enough, tried, low)
        high = tl.where(enough, high, tried - 1)
        reach = tl.where(enough, count, reach)
        few = tl.where(enough, few, count)
        turn = tl.where(turn == 2, 0, turn + 1)
    return low


@jit
def _keep(r, where, total, ranks, places, K: tl.constexpr):
    """Store the best ``K`` of all candidates of a program in order; returns the bound.

    ``where`` are their places. They may lie where the best are stored.
    """
    wanted = tl.minimum(total, K)
    bound = NONE
    if total > K:
        bound = _bound(r, wanted, total)
    there = r != NONE
    above = there & (r > bound)
    same = there & (r == bound)
    equals = wanted - tl.sum(above.to(tl.int32), 0)
    both = above.to(tl.int32) + (same.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    kept = above | (same & ((before >> 16) < equals))
    at = (before & 0xFFFF) + tl.minimum(before >> 16, equals)
    tl.debug_barrier()  # all have read what some overwrite
    tl.store(ranks + at, r, mask=kept)
    tl.store(places + at, where, mask=kept)
    return bound


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
        j = tl.arange(0, SIZE)
        if NEW[0]:
            column = part * NEW[0] + j
            key = tl.load(base) + column
            seen = (j < NEW[0]) & (column < NEW[1]) & (key >= start) & (key < end)
            r = tl.load(chunk + line * NEW[1] + column, mask=seen, other=NONE)
            where = key - start
        else:
            entry = part * OLD[0] + j
            listed = (j < OLD[0]) & (entry < OLD[1])
            r = tl.load(old_ranks + line * OLD[1] + entry, mask=listed, other=NONE)
            where = tl.load(old_places + line * OLD[1] + entry, mask=listed, other=-1)
        total = tl.sum((r != NONE).to(tl.int32), 0)
        _keep(r, where, total, ranks + to, places + to, K)
        if total < K:
            behind = (j >= total) & (j < K)
            tl.store(ranks + to + j, NONE, mask=behind)
            tl.store(places + to + j, -1, mask=behind)


@jit
def stream(
    old_ranks, old_places, old_state, chunk, starts, ends, base, ranks, places, state, chosen,
    K: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A row's candidates so far with those of a chunk; behind the last one, the best ``K``.

    Up to ``SIZE`` candidates lie in the row's list, in order of place. ``state`` [rows, 2] is how
    many they are, and a rank that ``K`` of them reach: what comes later must be above it. ``STEP``
    columns are looked at together; where they do not fit, the list is cut down to its best ``K``.
    """
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
        j = tl.arange(0, STEP)
        whole = tl.arange(0, SIZE)
        for i in range(a, b, STEP):
            key = first + i + j
            seen = (i + j < b) & (key >= start)
            r = tl.load(chunk + line * COLUMNS + i + j, mask=seen, other=NONE)
            more = tl.sum((r > bound).to(tl.int32), 0)
            if count + more > SIZE:
                tl.debug_barrier()  # what other threads stored is there
                old = tl.load(mine + whole, mask=whole < count, other=NONE)
                at = tl.load(where + whole, mask=whole < count, other=-1)
                bound = _keep(old, at, count, mine, where, K)
                count = count - count + K
                tl.debug_barrier()
            kept = r > bound
            n = kept.to(tl.int32)
            to = count + tl.cumsum(n, 0) - n
            tl.store(mine + to, r, mask=kept)
            tl.store(where + to, key - start, mask=kept)
            count += tl.sum(n, 0)
        if LAST:
            tl.debug_barrier()
            old = tl.load(mine + whole, mask=whole < count, other=NONE)
            at = tl.load(where + whole, mask=whole < count, other=-1)
            _keep(old, at, count, mine, chosen + line * K, K)
        else:
            tl.store(state + 2 * line, count)
            tl.store(state + 2 * line + 1, bound)
