"""The Triton program of V4's new rows and queries; ``triton.py`` says what for.

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

from mla_jax.pallas.append.kernels_triton import normalise
from mla_jax.pallas.cache_io.row_triton import place, store_row
from mla_jax.pallas.pooling.kernels_triton import rotate_tail
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["append"]


@jit
def _row(
    kv, gain, cos, sin, slots, number, pages, token,
    SIZES: tl.constexpr, ROW: tl.constexpr,
    COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store a token's row, if it has a slot."""
    DIM: tl.constexpr = SIZES[1]
    here, layer, slot = place(slots, number, token, ROW.layers, ROW.slots)
    if here:
        c = tl.arange(0, COLUMNS)[None, :]
        x = tl.load(kv + token.to(tl.int64) * DIM + c, mask=c < DIM, other=0.0).to(tl.float32)
        y = tl.load(gain + c, mask=c < DIM, other=0.0).to(tl.float32) * normalise(x, DIM, EPS)
        y = y.to(kv.dtype.element_ty).to(tl.float32)
        y = rotate_tail(y, cos, sin, token, DIM, SIZES[2]).to(kv.dtype.element_ty)
        store_row(y, pages, layer, slot, ROW)


@jit
def _queries(
    q, cos, sin, out, token, block,
    SIZES: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the queries of ``token`` and of one block of heads."""
    HEADS: tl.constexpr = SIZES[0]
    DIM: tl.constexpr = SIZES[1]
    head = block * FEW + tl.arange(0, FEW)
    c = tl.arange(0, COLUMNS)[None, :]
    at = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + c
    real = (head < HEADS)[:, None] & (c < DIM)
    x = tl.load(q + at, mask=real, other=0.0).to(tl.float32)
    y = normalise(x, DIM, EPS).to(q.dtype.element_ty).to(tl.float32)
    y = rotate_tail(y, cos, sin, token, DIM, SIZES[2])
    tl.store(out + at, y.to(q.dtype.element_ty), mask=real)


@jit
def append(
    q, kv, gain, cos, sin, slots, number, before, out, pages,
    SIZES: tl.constexpr, ROW: tl.constexpr,
    TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One token's row, or its queries of one block of heads.

    ``SIZES`` are heads, dim and pairs, ``TILE`` heads of a block and a power of two from dim on;
    ``ROW`` is a ``RowLayout``. ``before`` and ``pages`` are one array.
    """
    BLOCKS: tl.constexpr = (SIZES[0] + TILE[0] - 1) // TILE[0]
    pid = tl.program_id(0)
    token = pid // (1 + BLOCKS)
    part = pid % (1 + BLOCKS)
    if part == 0:
        _row(
            kv, gain, cos, sin, slots, number, pages, token,
            SIZES, ROW, TILE[1], EPS,
        )  # fmt: skip
    else:
        _queries(q, cos, sin, out, token, part - 1, SIZES, TILE[0], TILE[1], EPS)
