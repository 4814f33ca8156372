"""The Triton program of a step's new rows; ``triton.py`` says what for.

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

from mla_jax.pallas.cache_io.row_triton import clamp, place
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["append", "normalise", "rotate"]


@jit
def normalise(x, DIM: tl.constexpr, EPS: tl.constexpr):
    """``x / sqrt(mean(x^2) + EPS)`` of rows ``[rows, columns]``, of which ``DIM`` columns count."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]


@jit
def rotate(a, b, cos, sin):
    """Pairs ``(a, b)`` turned by their angles."""
    return a * cos - b * sin, a * sin + b * cos


@jit
def _encode(x, factor, like, LARGEST: tl.constexpr):
    """What the cache stores of ``x``."""
    if LARGEST is not None:
        x = clamp(tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + factor), LARGEST)
    return x.to(like.dtype.element_ty)


@jit
def _row(
    kv, gain, angles, where, pages, token,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store a token's row; a slot that does not exist stores nothing.

    All that it reads is asked for before the first of it is waited for.
    """
    ROPE: tl.constexpr = SIZES[2]
    RANK: tl.constexpr = SIZES[3]
    PAIRS: tl.constexpr = TILE[2]
    COLUMNS: tl.constexpr = TILE[3]
    cos, sin = angles
    slots, number, scale = where
    here, layer, slot = place(slots, number, token, CACHE[0], CACHE[1])
    to = pages + (layer.to(tl.int64) * CACHE[1] + slot) * (RANK + ROPE)
    factor = tl.load(scale + layer)
    row = kv + token.to(tl.int64) * (RANK + ROPE)
    c, p = tl.arange(0, COLUMNS), tl.arange(0, PAIRS)
    exists = p < ROPE // 2
    first, second = (2 * p, 2 * p + 1) if INTERLEAVED else (p, p + ROPE // 2)
    x = tl.load(row + c, mask=c < RANK, other=0.0).to(tl.float32)
    own = tl.load(gain + c, mask=c < RANK, other=0.0).to(tl.float32)
    a = tl.load(row + RANK + first, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(row + RANK + second, mask=exists, other=0.0).to(tl.float32)
    at = token * (ROPE // 2) + p
    u = tl.load(cos + at, mask=exists, other=0.0)
    v = tl.load(sin + at, mask=exists, other=0.0)
    y = (own * tl.reshape(normalise(x[None, :], RANK, EPS), (COLUMNS,))).to(kv.dtype.element_ty)
    stored = tl.where(here, c, RANK) < RANK
    tl.store(to + c, _encode(y, factor, pages, LARGEST), mask=stored)
    left, right = rotate(a, b, u, v)
    left, right = left.to(kv.dtype.element_ty), right.to(kv.dtype.element_ty)
    stored = tl.where(here, p, ROPE) < ROPE // 2
    tl.store(to + RANK + first, _encode(left, factor, pages, LARGEST), mask=stored)
    tl.store(to + RANK + second, _encode(right, factor, pages, LARGEST), mask=stored)


@jit
def _absorb(
    q, up_k, q_latent, number,
    SIZES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``q_nope up_k`` of all tokens of one head and of one block of columns."""
    HEADS: tl.constexpr = SIZES[0]
    NOPE: tl.constexpr = SIZES[1]
    ROPE: tl.constexpr = SIZES[2]
    RANK: tl.constexpr = SIZES[3]
    TOKENS: tl.constexpr = SIZES[4]
    ROWS: tl.constexpr = TILE[4]
    COLUMNS: tl.constexpr = TILE[5]
    BLOCKS: tl.constexpr = (RANK + COLUMNS - 1) // COLUMNS
    head = number // BLOCKS
    t = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, TILE[1])
    r = (number % BLOCKS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at = up_k + (head.to(tl.int64) * NOPE + c[:, None]) * RANK + r
    weights = tl.load(at, mask=(c < NOPE)[:, None] & (r < RANK), other=0.0)
    line = t * HEADS + head
    real = (t < TOKENS) & (c < NOPE)[None, :]
    rows = tl.load(q + line * (NOPE + ROPE) + c[None, :], mask=real, other=0.0)
    found = tl.dot(rows, weights, input_precision="ieee")
    to = q_latent + line * RANK + r
    tl.store(to, found.to(q.dtype.element_ty), mask=(t < TOKENS) & (r < RANK))


@jit
def _queries(
    q, angles, queries, token, block,
    SIZES: tl.constexpr, TILE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Split and rotate the queries of ``token`` and of one block of heads.

    Where ``_absorb`` takes the part that is not rotated nobody else wants it.
    """
    cos, sin = angles
    q_nope, q_rope = queries
    HEADS: tl.constexpr = SIZES[0]
    NOPE: tl.constexpr = SIZES[1]
    ROPE: tl.constexpr = SIZES[2]
    FEW: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    PAIRS: tl.constexpr = TILE[2]
    head = block * FEW + tl.arange(0, FEW)
    line = (token.to(tl.int64) * HEADS + head)[:, None]
    real = (head < HEADS)[:, None]
    if SIZES[4] == 0:
        c = tl.arange(0, COLUMNS)[None, :]
        x = tl.load(q + line * (NOPE + ROPE) + c, mask=real & (c < NOPE), other=0.0)
        tl.store(q_nope + line * NOPE + c, x, mask=real & (c < NOPE))
    p = tl.arange(0, PAIRS)
    exists = real & (p < ROPE // 2)[None, :]
    first, second = (2 * p, 2 * p + 1) if INTERLEAVED else (p, p + ROPE // 2)
    row = q + line * (NOPE + ROPE) + NOPE
    a = tl.load(row + first[None, :], mask=exists, other=0.0).to(tl.float32)
    b = tl.load(row + second[None, :], mask=exists, other=0.0).to(tl.float32)
    at = token * (ROPE // 2) + p
    u = tl.load(cos + at, mask=p < ROPE // 2, other=0.0)[None, :]
    v = tl.load(sin + at, mask=p < ROPE // 2, other=0.0)[None, :]
    to = q_rope + line * ROPE
    left, right = rotate(a, b, u, v)
    tl.store(to + first[None, :], left.to(q.dtype.element_ty), mask=exists)
    tl.store(to + second[None, :], right.to(q.dtype.element_ty), mask=exists)


@jit
def append(
    q, kv, weights, angles, where, before, queries, pages,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's row, or its queries of one block of heads, or a block of ``q_nope up_k``.

    ``weights`` are gain and perhaps ``up_k``, ``angles`` cos and sin, ``where`` slots, layer and
    scale of the cache, ``queries`` the results: nope, or with ``up_k`` the product, and rope.
    ``before`` and ``pages`` are one array. ``SIZES`` are heads, nope, rope, rank and the tokens of
    the product, 0 without ``up_k``; ``CACHE`` layers and slots of each; ``TILE`` heads of a block,
    powers of two from nope, pairs and rank on, rows and columns of a block of the product.

    With ``up_k`` the products come first, head after head, because they take longest; then the
    rows; then the queries.
    """
    BLOCKS: tl.constexpr = (SIZES[0] + TILE[0] - 1) // TILE[0]
    TOKENS: tl.constexpr = SIZES[4]
    PRODUCTS: tl.constexpr = SIZES[0] * ((SIZES[3] + TILE[5] - 1) // TILE[5])
    pid = tl.program_id(0)
    if TOKENS > 0:
        other = pid - PRODUCTS
        token = other % TOKENS
        part = tl.where(other < 0, -1, other // TOKENS)
    else:
        token = pid // (1 + BLOCKS)
        part = pid % (1 + BLOCKS)
    if part == 0:
        _row(
            kv, weights[0], angles, where, pages, token,
            SIZES, CACHE, TILE, EPS, INTERLEAVED, LARGEST,
        )  # fmt: skip
    elif TOKENS == 0 or part > 0:
        _queries(q, angles, queries, token, part - 1, SIZES, TILE, INTERLEAVED)
    else:
        _absorb(q, weights[1], queries[0], pid, SIZES, TILE)
