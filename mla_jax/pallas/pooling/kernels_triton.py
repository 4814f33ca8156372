"""The Triton programs of V4's compressed states; ``triton.py`` says how they are launched.

``POOL`` are halves, dim, ratio and pairs of a pool, and the first of its columns in the ring;
``RING`` layers, slots of each, columns and span (rows of a request).

Imported only where Triton is there: by other ``kernels_triton.py`` and by ``triton.py``.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from mla_jax.pallas.append.kernels_triton import normalise, rotate
from mla_jax.pallas.cache_io.row_triton import place, store_row
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["pool", "rotate_tail", "store"]


@jit
def rotate_tail(x, cos, sin, line, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """``[rows, columns]`` float32, the last pairs of ``DIM`` columns turned by angles ``line``."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    p = tl.arange(0, HALF) - (DIM - 2 * PAIRS) // 2
    turned = (p >= 0) & (p < PAIRS)
    u = tl.load(cos + line.to(tl.int64) * PAIRS + p, mask=turned, other=1.0)[None, :]
    v = tl.load(sin + line.to(tl.int64) * PAIRS + p, mask=turned, other=0.0)[None, :]
    left, right = rotate(a, b, u, v)
    left = tl.where(turned[None, :], left, a)
    right = tl.where(turned[None, :], right, b)
    return tl.reshape(tl.join(left, right), (ROWS, 2 * HALF))


@jit
def pool(
    given, ring, ends, tokens, kept, number, pooled,
    POOL: tl.constexpr, RING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some channels of one group: values summed by the softmax of their gates, float32.

    ``given`` are values, gates and their bias.
    ``TILE`` are a power of two from the span on and channels of a program. Indices are loaded while
    it is not known yet whether there is a group; values and gates are loaded only for a group.
    Places of this step read nothing of the ring.
    """
    values, gates, bias = given
    HALVES: tl.constexpr = POOL[0]
    DIM: tl.constexpr = POOL[1]
    SPAN: tl.constexpr = RING[3]
    BLOCKS: tl.constexpr = (DIM + TILE[1] - 1) // TILE[1]
    group = tl.program_id(0) // BLOCKS
    j = tl.arange(0, TILE[0])
    end, layer = tl.load(ends + group), tl.load(number)
    token = tl.load(tokens + group * SPAN + j, mask=j < SPAN, other=-1)
    row = tl.load(kept + group * SPAN + j, mask=j < SPAN, other=-1)
    if end >= 0:
        c = (tl.program_id(0) % BLOCKS) * TILE[1] + tl.arange(0, TILE[1])[None, :]
        here = token >= 0
        row = tl.where(here, -1, row)
        there = here | (row >= 0)
        rows = tl.where((layer >= 0) & (layer < RING[0]), RING[1], 0)
        waits = ((row >= 0) & (row < rows))[:, None] & (c < DIM)
        fresh = here[:, None] & (c < DIM)
        half = (j * HALVES // SPAN * DIM)[:, None]
        at = tl.where(here, token, 0).to(tl.int64)[:, None] * (HALVES * DIM) + half + c
        old = tl.where(row >= 0, row, 0).to(tl.int64) + layer.to(tl.int64) * RING[1]
        old = old[:, None] * RING[2] + POOL[4] + half + c
        offset = (j % POOL[2] * (HALVES * DIM))[:, None] + half + c
        g = tl.load(gates + at, mask=fresh, other=0.0)
        g += tl.load(bias + offset, mask=fresh, other=0.0)
        g += tl.load(ring + old + HALVES * DIM, mask=waits, other=0.0)
        v = tl.load(values + at, mask=fresh, other=0.0)
        v += tl.load(ring + old, mask=waits, other=0.0)
        g = tl.where(there[:, None], g, float("-inf"))
        p = tl.where(there[:, None], tl.exp(g - tl.max(g, 0)[None, :]), 0.0)
        total = tl.sum(p, 0)
        state = tl.sum(p * v, 0) / tl.where(total > 0.0, total, 1.0)
        to = pooled + group.to(tl.int64) * DIM + c
        tl.store(to, state[None, :], mask=c < DIM)


@jit
def _state(
    state, angles, groups, number, pages, group,
    POOL: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store one group's state, if it has a slot."""
    gain, pooled = state
    cos, sin = angles
    ends, slots = groups
    DIM: tl.constexpr = POOL[1]
    c = tl.arange(0, COLUMNS)[None, :]
    end = tl.load(ends + group)
    x = tl.load(pooled + group.to(tl.int64) * DIM + c, mask=c < DIM, other=0.0)
    y = tl.load(gain + c, mask=c < DIM, other=0.0).to(tl.float32)
    if end >= 0:  # state and gain are loaded while this is not known yet
        here, layer, slot = place(slots, number, end, ROW.layers, ROW.slots)
        if here:
            z = rotate_tail(y * normalise(x, DIM, EPS), cos, sin, group, DIM, POOL[3])
            store_row(z.to(gain.dtype.element_ty), pages, layer, slot, ROW)


@jit
def _kept(
    given, kept, number, ring, token,
    POOL: tl.constexpr, RING: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What later groups need of a token, into its ring."""
    values, gates, bias = given
    keep, positions = kept
    WIDTH: tl.constexpr = POOL[0] * POOL[1]
    here, layer, slot = place(keep, number, token, RING[0], RING[1])
    if here:
        c = tl.arange(0, COLUMNS)
        real = c < WIDTH
        at = token.to(tl.int64) * WIDTH + c
        to = ring + (layer.to(tl.int64) * RING[1] + slot) * RING[2] + POOL[4] + c
        tl.store(to, tl.load(values + at, mask=real, other=0.0), mask=real)
        offset = tl.load(positions + token) % POOL[2] * WIDTH + c
        g = tl.load(gates + at, mask=real, other=0.0)
        g += tl.load(bias + offset, mask=real, other=0.0)
        tl.store(to + WIDTH, g, mask=real)


@jit
def store(
    given, state, angles, groups, kept, number, before, after,
    GROUPS: tl.constexpr, POOL: tl.constexpr, RING: tl.constexpr, ROW: tl.constexpr,
    TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One of ``GROUPS`` states into its slot, or what is kept of one token into its ring.

    ``given`` are values, gates and their bias, ``state`` the gain and what ``pool`` made,
    ``angles`` cos and sin, ``groups`` ends and slots, ``kept`` slots in the ring and positions of
    tokens. ``before`` and ``after`` are the same ring and pages; ``pool`` has read the ring before.
    ``TILE`` are powers of two from dim and from all halves on.
    """
    ring, pages = after
    pid = tl.program_id(0)
    if pid < GROUPS:
        _state(state, angles, groups, number, pages, pid, POOL, ROW, TILE[0], EPS)
    else:
        _kept(given, kept, number, ring, pid - GROUPS, POOL, RING, TILE[1])
