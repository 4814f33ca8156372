"""The Triton program of hyper-connections; ``triton.py`` says what for.

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

__all__ = ["mix"]


@jit
def _sinkhorn(m, ROUNDS: tl.constexpr, EPS: tl.constexpr):
    """``ref.sinkhorn`` of one matrix ``[streams, streams]``."""
    m = m / (tl.sum(m, 0) + EPS)[None, :]
    for _ in range(ROUNDS - 1):
        m = m / (tl.sum(m, 1) + EPS)[:, None]
        m = m / (tl.sum(m, 0) + EPS)[None, :]
    return m


@jit
def _squares(streams, COUNT: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Each channel's squares of all streams of a token, added up."""
    c = tl.arange(0, COLUMNS)
    found = tl.zeros((COLUMNS,), tl.float32)
    for n in tl.static_range(COUNT):
        s = tl.load(streams + n * HIDDEN + c, mask=c < HIDDEN, other=0.0).to(tl.float32)
        found += s * s
    return found


@jit
def mix(
    streams, pieces, scale, bias, tokens, x, post, matrix,
    SIZES: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """What one token's sub-block reads, and how its result goes back.

    ``SIZES`` are streams, hidden and columns of ``pieces``, ``PIECES`` how many there are and a
    power of two from that on, as ``COLUMNS`` is from hidden on; ``EPS`` those of the mixing and of
    the norm.
    """
    COUNT: tl.constexpr = SIZES[0]
    HIDDEN: tl.constexpr = SIZES[1]
    OUT: tl.constexpr = SIZES[2]
    token = tl.program_id(0)
    line = streams + token.to(tl.int64) * (COUNT * HIDDEN)
    total = tl.sum(_squares(line, COUNT, HIDDEN, COLUMNS), 0)
    norm = tl.rsqrt(total / (COUNT * HIDDEN) + EPS[1])
    i = tl.arange(0, COUNT)
    o = 2 * COUNT + i[:, None] * COUNT + i[None, :]
    p = tl.arange(0, PIECES[1])
    z = pieces + (p * tokens + token).to(tl.int64) * OUT
    wide = z[:, None] + i[None, :]
    real = (p < PIECES[0])[:, None] & (i < COUNT)[None, :]
    before = tl.sum(tl.load(wide, mask=real, other=0.0), 0) * norm
    behind = tl.sum(tl.load(wide + COUNT, mask=real, other=0.0), 0) * norm
    cube = z[:, None, None] + o[None, :, :]
    rows = tl.sum(tl.load(cube, mask=(p < PIECES[0])[:, None, None] & (o >= 0)[None], other=0.0), 0)
    before = tl.load(scale) * before + tl.load(bias + i)
    behind = tl.load(scale + 1) * behind + tl.load(bias + COUNT + i)
    rows = tl.load(scale + 2) * (rows * norm) + tl.load(bias + o)
    powers = tl.exp(rows - tl.max(rows, 1)[:, None])
    mixed = _sinkhorn(powers / tl.sum(powers, 1)[:, None] + EPS[0], ROUNDS, EPS[0])
    tl.store(post + token.to(tl.int64) * COUNT + i, 2.0 * tl.sigmoid(behind))
    tl.store(matrix + token.to(tl.int64) * (COUNT * COUNT) + o - 2 * COUNT, mixed)
    before = tl.sigmoid(before) + EPS[0]
    c = tl.arange(0, COLUMNS)
    y = tl.zeros((COLUMNS,), tl.float32)
    for n in tl.static_range(COUNT):
        s = tl.load(line + n * HIDDEN + c, mask=c < HIDDEN, other=0.0).to(tl.float32)
        y += tl.sum(tl.where(i == n, before, 0.0), 0) * s
    to = x + token.to(tl.int64) * HIDDEN + c
    tl.store(to, y.to(x.dtype.element_ty), mask=c < HIDDEN)
