"""Triton programs of index scores, as integers of the same order; ``topk/triton.py`` launches them.

Imported only where Triton is there: by ``topk/triton.py``, when it runs.
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

__all__ = ["gathered_ranks", "paged_ranks"]


@jit
def _ranks(scores):
    """int32 in the order of float32: 0 and -0 are equal, NaN is the lowest but one."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, -0x7FFFFFFF, ordered)


@jit
def _scores(keys, query, weight, HEADS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr):
    """``sum_h w[h] relu(q[h] . k)`` of a block of keys, heads in blocks of ``FEW``."""
    c = tl.arange(0, DIM)
    h = tl.arange(0, FEW)
    total = tl.zeros((keys.shape[0],), tl.float32)
    for first in tl.static_range(0, HEADS, FEW):
        real = first + h < HEADS
        q = tl.load(query + (first + h)[:, None] * DIM + c[None, :], mask=real[:, None], other=0.0)
        w = tl.load(weight + first + h, mask=real, other=0.0)
        dots = tl.dot(keys, q.to(keys.dtype).T)
        total += tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1)
    return total


@jit
def paged_ranks(
    q, weights, pages, table, lens, number, base, ranks,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Ranks of a block of keys of one row's pages for each of its queries.

    ``SIZES`` are rows, queries of each, heads, dim, width of the table and the selection; ``CACHE``
    layers, pages of each, tokens of a page and elements (or bytes) of a page; ``TILE`` keys and
    heads of a block, and columns of the workspace, which begin at position ``base``. A query
    that takes everything, or that sees none of these keys, gets nothing.
    """
    QUERIES: tl.constexpr = SIZES[1]
    HEADS: tl.constexpr = SIZES[2]
    DIM: tl.constexpr = SIZES[3]
    WIDTH: tl.constexpr = SIZES[4]
    K: tl.constexpr = SIZES[5]
    LAYERS: tl.constexpr = CACHE[0]
    PAGES: tl.constexpr = CACHE[1]
    PAGE: tl.constexpr = CACHE[2]
    STRIDE: tl.constexpr = CACHE[3]
    STEP: tl.constexpr = TILE[0]
    FEW: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    pid = tl.program_id(0)
    row = pid // (COLUMNS // STEP)
    column = (pid % (COLUMNS // STEP)) * STEP + tl.arange(0, STEP)
    p = tl.load(base) + column
    longest = 0
    for j in tl.static_range(0, QUERIES):
        n = tl.load(lens + row * QUERIES + j)
        longest = tl.maximum(longest, tl.where(n > K, n, 0))
    longest = tl.minimum(longest, WIDTH * PAGE)
    if tl.min(p) < longest:
        seen = p < longest
        place = tl.load(table + row.to(tl.int64) * WIDTH + p // PAGE, mask=seen, other=-1)
        layer = tl.load(number)
        place = tl.where((layer >= 0) & (layer < LAYERS), place, -1)
        inside = (place >= 0) & (place < PAGES)
        at = (layer.to(tl.int64) * PAGES + tl.where(inside, place, 0)) * STRIDE
        c = tl.arange(0, DIM)
        keys = pages + (at + (p % PAGE) * DIM)[:, None] + c[None, :]
        if RECORDS:
            k = tl.load(keys, mask=inside[:, None], other=0).to(tl.float8e4nv, bitcast=True)
            scales = (pages + at + PAGE * DIM + (p % PAGE) * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales, mask=inside, other=0.0)
        else:
            k = tl.load(keys, mask=inside[:, None], other=0.0)
            scale = 1.0
        for j in tl.static_range(0, QUERIES):
            line = (row * QUERIES + j).to(tl.int64)
            n = tl.load(lens + line)
            s = _scores(k, q + line * HEADS * DIM, weights + line * HEADS, HEADS, FEW, DIM)
            tl.store(ranks + line * COLUMNS + column, _ranks(s * scale), mask=p < n)


@jit
def gathered_ranks(
    q, weights, keys, starts, ends, base, ranks,
    SIZES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ranks of a block of gathered keys for a block of queries.

    ``SIZES`` are queries, heads, dim, keys and the selection; ``TILE`` keys, heads and queries of a
    block, and columns of the workspace, which begin at key ``base``.
    """
    QUERIES: tl.constexpr = SIZES[0]
    HEADS: tl.constexpr = SIZES[1]
    DIM: tl.constexpr = SIZES[2]
    KEYS: tl.constexpr = SIZES[3]
    K: tl.constexpr = SIZES[4]
    STEP: tl.constexpr = TILE[0]
    FEW: tl.constexpr = TILE[1]
    SOME: tl.constexpr = TILE[2]
    COLUMNS: tl.constexpr = TILE[3]
    pid = tl.program_id(0)
    first = (pid // (COLUMNS // STEP)) * SOME
    column = (pid % (COLUMNS // STEP)) * STEP + tl.arange(0, STEP)
    at = tl.load(base) + column
    low = KEYS
    high = 0
    for j in tl.static_range(0, SOME):
        i = tl.minimum(first + j, QUERIES - 1)
        a = tl.load(starts + i)
        b = tl.load(ends + i)
        scored = (b - a > K) & (first + j < QUERIES)
        low = tl.minimum(low, tl.where(scored, a, KEYS))
        high = tl.maximum(high, tl.where(scored, b, 0))
    if (tl.min(at) < high) & (tl.max(at) >= low):
        c = tl.arange(0, DIM)
        inside = (at < high) & (at < KEYS)
        k = tl.load(
            keys + at.to(tl.int64)[:, None] * DIM + c[None, :], mask=inside[:, None], other=0.0
        )
        for m in range(0, SOME):
            if first + m < QUERIES:
                line = (first + m).to(tl.int64)
                n = tl.load(ends + line)
                s = _scores(k, q + line * HEADS * DIM, weights + line * HEADS, HEADS, FEW, DIM)
                tl.store(ranks + line * COLUMNS + column, _ranks(s), mask=inside & (at < n))
