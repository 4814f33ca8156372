"""Triton programs of index scores, as integers of the same order; ``topk/triton.py`` launches them.

Imported only where Triton is there: by ``topk/triton.py``.
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

from mla_jax.pallas.triton_lib import jit, swap_order, tl

__all__ = ["gathered_ranks", "paged_ranks"]


@jit
def _ranks(scores):
    """int32 in the order of float32: 0 and -0 are equal, NaN is the lowest but one."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    ordered = swap_order(scores.to(tl.int32, bitcast=True))
    return tl.where(scores != scores, -0x7FFFFFFF, ordered)


@jit
def _heads(query, weight, first, HEADS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr):
    """Some heads of a query, and their weights."""
    h = first + tl.arange(0, FEW)
    c = tl.arange(0, DIM)
    q = tl.load(query + h[:, None] * DIM + c[None, :], mask=(h < HEADS)[:, None], other=0.0)
    return q, tl.load(weight + h, mask=h < HEADS, other=0.0)


@jit
def _summed(keys, q, w):
    """``sum_h w[h] relu(q[h] . k)`` of a block of keys."""
    dots = tl.dot(keys, q.to(keys.dtype).T)
    if keys.dtype == tl.float8e4nv:  # finite products: no maximum, which takes twice as long
        total = tl.sum((dots + tl.abs(dots)) * (0.5 * w)[None, :], 1)
    else:
        total = tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1)
    return total


@jit
def _scores(keys, query, weight, HEADS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr):
    """``_summed`` of all heads, in blocks of ``FEW``."""
    total = tl.zeros((keys.shape[0],), tl.float32)
    for first in tl.static_range(0, HEADS, FEW):
        q, w = _heads(query, weight, first, HEADS, FEW, DIM)
        total += _summed(keys, q, w)
    return total


@jit
def paged_ranks(
    q, weights, pages, table, lens, number, base, ranks,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Ranks of some blocks of keys of one row's pages for each of its queries.

    ``SIZES`` are rows, queries of each, heads, dim, width of the table and the selection; ``CACHE``
    layers, pages of each, tokens of a page and elements (or bytes) of a page; ``TILE`` keys and
    heads of a block, blocks of a program, and columns of the workspace, which begin at position
    ``base``. A query that takes everything, or that sees none of these keys, gets nothing.
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
    BLOCKS: tl.constexpr = TILE[2]
    COLUMNS: tl.constexpr = TILE[3]
    SPANS: tl.constexpr = tl.cdiv(COLUMNS, STEP * BLOCKS)
    pid = tl.program_id(0)
    row = pid // SPANS
    begin = (pid % SPANS) * (STEP * BLOCKS)
    first = tl.load(base)
    longest = 0
    for j in tl.static_range(0, QUERIES):
        n = tl.load(lens + row * QUERIES + j)
        longest = tl.maximum(longest, tl.where(n > K, n, 0))
    longest = tl.minimum(longest, WIDTH * PAGE)
    last = tl.minimum(tl.minimum(begin + STEP * BLOCKS, COLUMNS), longest - first)
    layer = tl.load(number)
    real = (layer >= 0) & (layer < LAYERS)
    c = tl.arange(0, DIM)
    ALONE: tl.constexpr = QUERIES == 1 and HEADS <= FEW
    if ALONE:  # its one query stays where it is
        held, factors = _heads(
            q + row.to(tl.int64) * HEADS * DIM, weights + row * HEADS, 0, HEADS, FEW, DIM
        )
    for block in tl.range(begin, last, STEP):
        column = block + tl.arange(0, STEP)
        p = first + column
        entry = table + row.to(tl.int64) * WIDTH + p // PAGE
        place = tl.where(real, tl.load(entry, mask=p < longest, other=-1), -1)
        inside = (place >= 0) & (place < PAGES)
        at = (layer.to(tl.int64) * PAGES + tl.where(inside, place, 0)) * STRIDE
        keys = pages + (at + (p % PAGE) * DIM)[:, None] + c[None, :]
        if RECORDS:
            keys = keys.to(tl.pointer_type(tl.float8e4nv))
            scales = (pages + at + PAGE * DIM + (p % PAGE) * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales, mask=inside, other=0.0)
        else:
            scale = 1.0
        k = tl.load(keys, mask=inside[:, None], other=0.0)
        for j in tl.static_range(0, QUERIES):
            line = (row * QUERIES + j).to(tl.int64)
            n = tl.load(lens + line)
            if ALONE:
                s = _summed(k, held, factors)
            else:
                s = _scores(k, q + line * HEADS * DIM, weights + line * HEADS, HEADS, FEW, DIM)
            inner = (p < n) & (column < COLUMNS)
            tl.store(ranks + line * COLUMNS + column, _ranks(s * scale), mask=inner)


@jit
def gathered_ranks(
    q, weights, keys, scales, starts, ends, base, ranks,
    SIZES: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
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
    first = (pid // tl.cdiv(COLUMNS, STEP)) * SOME
    column = (pid % tl.cdiv(COLUMNS, STEP)) * STEP + tl.arange(0, STEP)
    at = tl.load(base) + column
    mine = first + tl.arange(0, SOME)
    a = tl.load(starts + mine, mask=mine < QUERIES, other=0)
    b = tl.load(ends + mine, mask=mine < QUERIES, other=0)
    low = tl.min(tl.where(b - a > K, a, KEYS), 0)
    high = tl.max(tl.where(b - a > K, b, 0), 0)
    if (tl.min(at) < high) & (tl.max(at) >= low):
        c = tl.arange(0, DIM)
        inside = (at < high) & (at < KEYS)
        k = tl.load(
            keys + at.to(tl.int64)[:, None] * DIM + c[None, :], mask=inside[:, None], other=0.0
        )
        scale = tl.load(scales + at, mask=inside, other=0.0) if SCALED else 1.0
        for m in tl.range(0, tl.minimum(SOME, QUERIES - first)):
            line = (first + m).to(tl.int64)
            n = tl.load(ends + line)
            s = _scores(k, q + line * HEADS * DIM, weights + line * HEADS, HEADS, FEW, DIM)
            inner = inside & (at < n) & (column < COLUMNS)
            tl.store(ranks + line * COLUMNS + column, _ranks(s * scale), mask=inner)
