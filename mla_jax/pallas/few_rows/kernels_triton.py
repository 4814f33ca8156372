"""The Triton program of products of few rows; ``triton.py`` says what for.

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
# pyright: reportAssignmentType=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["project"]


@jit
def _sums(
    x, gain, first, second, row, column, live,
    INTO: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """``norm(x) first`` and, if ``TWO``, ``norm(x) second``: one tile, in float32.

    A step of the loop has ``DEPTH`` channels for each of ``GROUPS`` groups. A group is a batch of
    its own, which gives it warps of its own; groups are added last.
    """
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    GROUPS: tl.constexpr = TILE[2]
    DEPTH: tl.constexpr = TILE[3]
    k = tl.arange(0, GROUPS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    a = x + row.to(tl.int64)[None, :, None] * INTO + k[:, None, :]
    at = k[:, :, None] * OUT + column[None, None, :]
    scale = gain + k
    b = first + at
    c = second + at
    u = tl.zeros((GROUPS, ROWS, COLUMNS), tl.float32)
    v = tl.zeros((GROUPS, ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((GROUPS, ROWS, DEPTH), tl.float32)
    for _ in range(0, INTO, GROUPS * DEPTH):
        part = tl.load(a, mask=live[None, :, None], other=0.0)
        if EPS is not None:
            wide = part.to(tl.float32)
            squares += wide * wide
            part = (wide * tl.load(scale).to(tl.float32)[:, None, :]).to(x.dtype.element_ty)
        u = tl.dot(part, tl.load(b), u)
        if TWO:
            v = tl.dot(part, tl.load(c), v)
        a += GROUPS * DEPTH
        scale += GROUPS * DEPTH
        b += GROUPS * DEPTH * OUT
        c += GROUPS * DEPTH * OUT
    u = tl.sum(u, 0)
    v = tl.sum(v, 0)
    if EPS is not None:
        norm = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / INTO + EPS)[:, None]
        u *= norm
        v *= norm
    return u, v


@jit
def _tile(
    x, gain, onto, weights, tokens, out, row, block,
    INTO: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr,
    GATED: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    first, second = weights
    column = block * TILE[1] + tl.arange(0, TILE[1])
    live = row < tokens
    u, v = _sums(x, gain, first, second, row, column, live, INTO, OUT, TILE, EPS, GATED)
    if GATED:
        u = u * tl.sigmoid(u) * v
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    if ONTO:
        u += tl.load(onto + at, mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(out + at, u.to(out.dtype.element_ty), mask=live[:, None])


@jit
def project(
    x, gain, onto, first, second, tokens, out, more,
    SIZES: tl.constexpr, TILE: tl.constexpr, EPS: tl.constexpr, GATED: tl.constexpr,
    ONTO: tl.constexpr,
):  # fmt: skip
    """One tile of ``norm(x) first``, of ``norm(x) second``, or of the two gated.

    ``SIZES`` are channels in, and out of both weights (0: there is no second); ``TILE`` rows,
    columns, groups of channels and their depth in a step. ``EPS`` None: no norm, and ``gain`` is
    not read; nor is ``onto`` unless ``ONTO``.
    """
    BLOCKS: tl.constexpr = SIZES[1] // TILE[1]
    MORE: tl.constexpr = 0 if GATED else SIZES[2] // TILE[1]
    pid = tl.program_id(0)
    block = pid % (BLOCKS + MORE)
    row = pid // (BLOCKS + MORE) * TILE[0] + tl.arange(0, TILE[0])
    if block < BLOCKS:
        _tile(
            x, gain, onto, (first, second), tokens, out, row, block,
            SIZES[0], SIZES[1], TILE, EPS, GATED, ONTO,
        )  # fmt: skip
    elif MORE > 0:
        _tile(
            x, gain, onto, (second, second), tokens, more, row, block - BLOCKS,
            SIZES[0], SIZES[2], TILE, EPS, GATED, ONTO,
        )  # fmt: skip
