"""The Triton program that takes the best of a row; ``triton.py`` says how it is launched.

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

__all__ = ["best_of"]

NONE = tl.constexpr(-0x7FFFFFFF - 1)
"""Rank of what is no candidate; that of NaN is one more."""

LINEAR = tl.constexpr(16)
"""Turns that halve an interval of scores; later ones halve one of ranks, of which 32 suffice."""


@jit
def _swap(x):
    """Between a rank and the bits of its score, both ways."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@jit
def _between(low, high, turn):
    """A rank above ``low`` and not above ``high``: of the score in the middle, or the middle."""
    a = _swap(low).to(tl.float32, bitcast=True)
    b = _swap(high).to(tl.float32, bitcast=True)
    mean = _swap((0.5 * a + 0.5 * b).to(tl.int32, bitcast=True))
    middle = (low | high) - ((low ^ high) >> 1)
    return tl.minimum(tl.maximum(tl.where(turn < LINEAR, mean, middle), low + 1), high)


@jit
def _bound(ranks, wanted):
    """The largest rank that ``wanted`` candidates reach, or any that just so many do."""
    low = tl.min(tl.where(ranks == NONE, 0x7FFFFFFF, ranks), 0)
    high = tl.max(ranks, 0)
    found = wanted + 1
    turn = wanted - wanted
    while (low < high) & (found != wanted):
        middle = _between(low, high, turn)
        count = tl.sum((ranks >= middle).to(tl.int32), 0)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        found = tl.where(enough, count, found)
        turn += 1
    return low


@jit
def _candidates(
    j, old_ranks, old_line, chunk, line, first, part, start, end,
    OLD: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Ranks of candidates ``j``, entries of lists before columns; ``NONE`` where there is none."""
    r = tl.full(j.shape, NONE, tl.int32)
    if NEW[0]:
        column = part * NEW[0] + j - OLD[0]
        seen = (j >= OLD[0]) & (j < OLD[0] + NEW[0]) & (column < NEW[1])
        seen = seen & (first + j >= start) & (first + j < end)
        r = tl.load(chunk + line * NEW[1] + column, mask=seen, other=NONE)
    if OLD[0]:
        listed = (j < OLD[0]) & (part * OLD[0] + j < OLD[1])
        old = tl.load(old_ranks + old_line + j, mask=listed, other=NONE)
        r = tl.where(listed, old, r)
    return r


@jit
def best_of(
    old_ranks, old_places, chunk, starts, ends, base, ranks, places,
    K: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The best ``K`` of a program's candidates, in order of place, ranks beside them.

    Candidates are a part of the row's lists, then a part of its columns. ``OLD`` are entries of
    such a part and of the row, ``NEW`` columns of such a part and of the row; a part of one of them
    is 0. Column 0 is key ``base``. ``SIZE`` is a power of two that holds a program's candidates,
    ``STEP`` one of those that are stored at once. Behind less than ``K`` stand ranks of ``NONE``
    and places of -1. A row that sees at most ``K`` keys in all takes them; nothing was scored for
    it. The result may take the memory of lists that are one for each row.
    """
    PARTS: tl.constexpr = tl.cdiv(NEW[1], NEW[0]) if NEW[0] else tl.cdiv(OLD[1], OLD[0])
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    line = row.to(tl.int64)
    start = tl.load(starts + line)
    end = tl.load(ends + line)
    to = (line * PARTS + part) * K
    old_line = line * OLD[1] + part * OLD[0]
    j = tl.arange(0, SIZE)
    first = tl.load(base) + part * NEW[0] - OLD[0]  # the key that candidate 0 would be
    if end - start <= K:
        if part == 0:
            for i in tl.static_range(0, K, STEP):
                p = i + tl.arange(0, STEP)
                tl.store(places + to + p, tl.where(p < end - start, p, -1), mask=p < K)
    elif (OLD[0] == 0) | (NEW[0] == 0) | (first + OLD[0] < end):
        r = _candidates(j, old_ranks, old_line, chunk, line, first, part, start, end, OLD, NEW)
        total = tl.sum((r != NONE).to(tl.int32), 0)
        wanted = tl.minimum(total, K)
        bound = NONE
        if total > K:
            bound = _bound(r, wanted)
        equals = wanted - tl.sum((r > bound).to(tl.int32), 0)
        written = part - part  # of what is above the bound, then of what equals it
        tied = part - part
        for i in range(0, OLD[0] + NEW[0], STEP):
            n = i + tl.arange(0, STEP)
            c = _candidates(n, old_ranks, old_line, chunk, line, first, part, start, end, OLD, NEW)
            above = (c > bound).to(tl.int32)
            same = ((c == bound) & (c != NONE)).to(tl.int32)
            both = above + (same << 16)
            before = tl.cumsum(both, 0) - both
            ties = tied + (before >> 16)
            kept = (above != 0) | ((same != 0) & (ties < equals))
            at = written + (before & 0xFFFF) + tl.minimum(ties, equals)
            place = first - start + n
            if OLD[0]:
                listed = n < OLD[0]
                was = tl.load(old_places + old_line + n, mask=kept & listed, other=-1)
                place = tl.where(listed, was, place)
                tl.debug_barrier()  # all have read what some overwrite
            tl.store(ranks + to + at, c, mask=kept)
            tl.store(places + to + at, place, mask=kept)
            here = tl.sum(both, 0)
            written += here & 0xFFFF
            tied += here >> 16
        for i in tl.static_range(0, K, STEP):
            p = i + tl.arange(0, STEP)
            behind = (p >= wanted) & (p < K)
            tl.store(ranks + to + p, NONE, mask=behind)
            tl.store(places + to + p, -1, mask=behind)
