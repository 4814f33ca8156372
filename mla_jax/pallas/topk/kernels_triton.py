"""The Triton program that keeps the best of a row; ``triton.py`` says how it is launched.

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

__all__ = ["keep_best"]

DIGITS = tl.constexpr(256)
"""Values of one of the four digits of a rank."""


@jit
def _digits(ranks, shift):
    """The digits above and at ``shift``, of ranks as unsigned numbers of the same order."""
    unsigned = ranks.to(tl.uint32, bitcast=True) ^ 0x80000000
    return (unsigned >> shift).to(tl.int32)


@jit
def _count(found, from_, first, end, shift, prefix, STEP: tl.constexpr):
    """Add to ``found`` the digits at ``shift`` of ranks whose digits above are ``prefix``."""
    j = tl.arange(0, STEP)
    for i in range(first, end, STEP):
        r = tl.load(from_ + i + j, mask=i + j < end, other=0)
        digits = _digits(r, shift)
        above = (digits >> 8) & ((1 << (24 - shift)) - 1)
        matches = (i + j < end) & (above == prefix)
        found += tl.histogram(digits & 255, DIGITS, mask=matches)
    return found


@jit
def _take(
    ranks, places, written, equals, bound, wanted, from_, where, first, end, shifted,
    STEP: tl.constexpr, K: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Store what is above the bound, and the first ``wanted`` that equal it, in order."""
    j = tl.arange(0, STEP)
    for i in range(first, end, STEP):
        here = i + j < end
        r = tl.load(from_ + i + j, mask=here, other=0)
        same = here & (r == bound)
        before = equals + tl.cumsum(same.to(tl.int32), 0) - same.to(tl.int32)
        kept = here & ((r > bound) | (same & (before < wanted)))
        to = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        place = tl.load(where + i + j, mask=kept, other=0) if MOVED else shifted + i + j
        kept = kept & (to < K)
        tl.store(ranks + to, r, mask=kept)
        tl.store(places + to, place, mask=kept)
        equals += tl.sum(same.to(tl.int32), 0)
        written = written + tl.sum(kept.to(tl.int32), 0)
    return written, equals


@jit
def keep_best(
    old_ranks, old_places, chunk, starts, ends, base, ranks, places,
    K: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The best ``K`` of a row's best so far and of its part of a chunk, both in order of place.

    A radix selection: four passes find the rank of the last one kept, a fifth stores. A row that
    sees at most ``K`` columns in all is left out: nothing was scored for it.
    """
    row = tl.program_id(0)
    line = row.to(tl.int64)
    start = tl.load(starts + line)
    end = tl.load(ends + line)
    first = tl.load(base)
    if end - start > K:
        old = tl.minimum(tl.maximum(first - start, 0), K)
        a = tl.minimum(tl.maximum(start - first, 0), COLUMNS)
        b = tl.minimum(tl.maximum(end - first, 0), COLUMNS)
        mine = chunk + line * COLUMNS
        total = old + tl.maximum(b - a, 0)
        wanted = tl.minimum(total, K)
        bound = -0x7FFFFFFF - 1
        if total > K:
            prefix = 0
            bins = tl.arange(0, DIGITS)
            for turn in range(0, 4):
                shift = 24 - 8 * turn
                found = tl.zeros((DIGITS,), tl.int32)
                found = _count(found, old_ranks + line * K, 0, old, shift, prefix, STEP)
                found = _count(found, mine, a, b, shift, prefix, STEP)
                above = tl.cumsum(found, 0, reverse=True)
                digit = tl.max(tl.where(above >= wanted, bins, 0), 0)
                wanted -= tl.sum(tl.where(bins > digit, found, 0), 0)
                prefix = (prefix << 8) | digit
            bound = prefix ^ (-0x7FFFFFFF - 1)
        none = start - start  # a number of the device's
        to_ranks = ranks + line * K
        to_places = places + line * K
        written, equals = _take(
            to_ranks, to_places, none, none, bound, wanted, old_ranks + line * K,
            old_places + line * K, 0, old, 0, STEP, K, True,
        )  # fmt: skip
        _take(
            to_ranks, to_places, written, equals, bound, wanted, mine, old_places, a, b,
            first - start, STEP, K, False,
        )  # fmt: skip
