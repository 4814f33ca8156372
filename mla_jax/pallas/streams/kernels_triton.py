"""The Triton programs of hyper-connections; ``triton.py`` says what for.

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
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["collapse", "mix"]


@jit
def _sinkhorn(m, ROUNDS: tl.constexpr, EPS: tl.constexpr):
    """``ref.sinkhorn`` of one matrix ``[streams, streams]``."""
    m = m / (tl.sum(m, 0) + EPS)[None, :]
    for _ in range(ROUNDS - 1):
        m = m / (tl.sum(m, 1) + EPS)[:, None]
        m = m / (tl.sum(m, 0) + EPS)[None, :]
    return m


@jit
def collapse(
    streams, pieces, scale, bias, gain, tokens, x, norm,
    SIZES: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One token's weighted sum of the streams, and the factor that normalises ``pieces``.

    ``SIZES`` are streams, hidden and columns of ``pieces``, ``PIECES`` how many there are and a
    power of two from that on, as ``COLUMNS`` is from hidden on; ``EPS`` those of the mixing and of
    the norms. ``NORMED``: ``x`` is normalised after it was rounded. All loads come first.
    """
    COUNT: tl.constexpr = SIZES[0]
    HIDDEN: tl.constexpr = SIZES[1]
    OUT: tl.constexpr = SIZES[2]
    token = tl.program_id(0)
    i, c = tl.arange(0, COUNT), tl.arange(0, COLUMNS)
    there = c < HIDDEN
    line = streams + token.to(tl.int64) * (COUNT * HIDDEN)
    s = tl.load(line + i[:, None] * HIDDEN + c[None, :], mask=there[None, :], other=0.0)
    p = tl.arange(0, PIECES[1])
    z = pieces + (p * tokens + token).to(tl.int64)[:, None] * OUT + i[None, :]
    parts = tl.load(z, mask=(p < PIECES[0])[:, None] & (i < COUNT)[None, :], other=0.0)
    slope, offset = tl.load(scale), tl.load(bias + i)
    if NORMED:
        gains = tl.load(gain + c, mask=there, other=0.0).to(tl.float32)
    s = s.to(tl.float32)
    total = tl.sum(tl.sum(s * s, 0), 0)
    factor = tl.rsqrt(total / (COUNT * HIDDEN) + EPS[1])
    pre = tl.sigmoid(slope * (tl.sum(parts, 0) * factor) + offset) + EPS[0]
    y = tl.sum(pre[:, None] * s, 0).to(x.dtype.element_ty)
    if NORMED:
        wide = y.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + EPS[1])
        y = (gains * wide).to(y.dtype)
    tl.store(x + token.to(tl.int64) * HIDDEN + c, y, mask=there)
    tl.store(norm + token, factor)


@jit
def mix(
    pieces, norm, scale, bias, tokens, post, matrix,
    SIZES: tl.constexpr, PIECES: tl.constexpr, ROUNDS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """How one token's result goes back; ``SIZES`` and ``PIECES`` as ``collapse`` has them."""
    COUNT: tl.constexpr = SIZES[0]
    OUT: tl.constexpr = SIZES[2]
    token = tl.program_id(0)
    i = tl.arange(0, COUNT)
    o = 2 * COUNT + i[:, None] * COUNT + i[None, :]
    p = tl.arange(0, PIECES[1])
    z = pieces + (p * tokens + token).to(tl.int64) * OUT
    real = p < PIECES[0]
    cube = tl.load(z[:, None, None] + o[None], mask=real[:, None, None] & (o >= 0)[None], other=0.0)
    lines = z[:, None] + COUNT + i[None, :]
    parts = tl.load(lines, mask=real[:, None] & (i < COUNT)[None, :], other=0.0)
    factor = tl.load(norm + token)
    slopes = tl.load(scale + 1), tl.load(scale + 2)
    offsets = tl.load(bias + COUNT + i), tl.load(bias + o)
    rows = slopes[1] * (tl.sum(cube, 0) * factor) + offsets[1]
    powers = tl.exp(rows - tl.max(rows, 1)[:, None])
    mixed = _sinkhorn(powers / tl.sum(powers, 1)[:, None] + EPS[0], ROUNDS, EPS[0])
    behind = slopes[0] * (tl.sum(parts, 0) * factor) + offsets[0]
    tl.store(post + token.to(tl.int64) * COUNT + i, 2.0 * tl.sigmoid(behind))
    tl.store(matrix + token.to(tl.int64) * (COUNT * COUNT) + o - 2 * COUNT, mixed)
