"""Rows in order of their experts, and back: Triton programs around the products of many rows.

``tiles.lay_out`` defines the plan. With tens of thousands of pairs (choices of tokens) each program
counts and places a chunk of them, where ``kernels_triton.plan`` has every expert look at all.

Imported only where Triton is there: by ``mosaic.py``.
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

__all__ = ["count", "gather_sum", "permute", "place"]

FIELDS = tl.constexpr(8)
PART = tl.constexpr(32)
"""Pairs that are compared with a chunk at a time."""
TILES = tl.constexpr(8)
"""Of the table, that a program makes at a time."""


@jit
def count(experts, pairs, counts, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """``counts[chunk, e]``: how many pairs of this program's chunk chose expert ``e``."""
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + i, mask=i < pairs, other=-1)
    found = tl.histogram(chosen, BINS, mask=(chosen >= 0) & (chosen < EXPERTS))
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@jit
def place(
    experts, counts, pairs, chunks, tile_count, places, table, used, starts,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, LINES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The rows of a chunk's pairs to ``places``, and a share of the tiles to ``table``.

    ``used`` [1] is the number of tiles, ``starts`` [chunks, BINS] memory to work in; the counts
    of ``LINES`` chunks are read at a time. ``TILE`` is a step of rows, the most rows, the most
    tiles of a group, and tiles of a cluster.
    """
    STEP: tl.constexpr = TILE[0]
    MOST: tl.constexpr = TILE[1]
    GROUP: tl.constexpr = TILE[2]
    CLUSTER: tl.constexpr = TILE[3]
    LARGE: tl.constexpr = CLUSTER * MOST // STEP
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for c in range(0, chunks, LINES):
        line = c + tl.arange(0, LINES)
        here = (line < chunks)[:, None]
        found = tl.load(counts + line[:, None] * BINS + bins[None, :], mask=here, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((line < chunk)[:, None], found, 0), 0)
    units = (total + STEP - 1) // STEP
    base = (tl.cumsum(units, 0) - units) * STEP
    own = starts + chunk * BINS
    tl.store(own + bins, base + before)
    tl.debug_barrier()

    i = tl.arange(0, CHUNK)
    at = chunk * CHUNK
    chosen = tl.load(experts + at + i, mask=at + i < pairs, other=-1)
    real = (chosen >= 0) & (chosen < EXPERTS)
    rank = tl.zeros((CHUNK,), tl.int32)
    for c in tl.static_range(0, CHUNK, PART):
        j = c + tl.arange(0, PART)
        others = tl.load(experts + at + j, mask=at + j < pairs, other=-1)
        same = (others[None, :] == chosen[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    first = tl.load(own + chosen, mask=real, other=0)
    tl.store(places + at + i, tl.where(real, first + rank, -1), mask=at + i < pairs)

    needed = (units + LARGE - 1) // LARGE * CLUSTER
    ends = tl.cumsum(needed, 0)
    if chunk == 0:
        tl.store(used, tl.sum(needed, 0))
    for c in range(chunk * TILES, tile_count, chunks * TILES):
        t = c + tl.arange(0, TILES)
        e = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
        mine = bins[None, :] == e[:, None]
        tiles = tl.sum(tl.where(mine, needed[None, :], 0), 1)
        beyond = tl.sum(tl.where(mine, ends[None, :], 0), 1)
        size = tl.sum(tl.where(mine, units[None, :], 0), 1)
        row = tl.sum(tl.where(mine, base[None, :], 0), 1)
        some = e < EXPERTS
        tiles = tl.where(some, tiles, 1)
        local = t - (beyond - tiles)
        each, more = size // tiles, size % tiles
        group = local // GROUP * GROUP
        to = table + t * FIELDS
        inside = t < tile_count
        tl.store(to, tl.where(some, e, -1), mask=inside)
        tl.store(to + 1, beyond - tiles + group, mask=inside)
        tl.store(to + 2, tl.minimum(tiles - group, GROUP), mask=inside)
        unit = tl.minimum(local * each + tl.minimum(local, more), tl.maximum(size - 1, 0))
        row += STEP * unit
        tl.store(to + 3, row // 8, mask=inside)
        tl.store(to + 4, each + (local < more).to(tl.int32) - 1, mask=inside)


@jit
def permute(x, places, out, TOPK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """``out[places[t, k]] = x[t]`` for every choice of a program's token ``t`` that has a row."""
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for c in range(0, HIDDEN, BLOCK):
        row = tl.load(x + t.to(tl.int64) * HIDDEN + c + i)
        for k in range(TOPK):
            p = tl.load(places + t * TOPK + k)
            if p >= 0:
                tl.store(out + p.to(tl.int64) * HIDDEN + c + i, row)


@jit
def gather_sum(
    y, places, weights, out, TOPK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """``out[t] = sum_k weights[t, k] y[places[t, k]]`` in float32, first choice first."""
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for c in range(0, HIDDEN, BLOCK):
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(TOPK):
            p = tl.load(places + t * TOPK + k)
            if p >= 0:
                row = tl.load(y + p.to(tl.int64) * HIDDEN + c + i).to(tl.float32)
                total += tl.load(weights + t * TOPK + k) * row
        to = out + t.to(tl.int64) * HIDDEN + c + i
        tl.store(to, total.to(out.dtype.element_ty))
