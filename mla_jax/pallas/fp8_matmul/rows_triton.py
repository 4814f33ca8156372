"""Rows in e4m3 with a scale for every 128 channels of each: Triton programs.

``values * scale`` is the row: a scale is the largest magnitude of its channels over 448, the
largest e4m3, or 1 where they are all 0; it is never below the least normal float32. Scales are
stored channels first, as products read them.

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

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["permute", "quantise"]

SPAN = tl.constexpr(128)
"""Channels of a scale."""
ROWS = tl.constexpr(16)
"""Rows of a program."""
LARGEST = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-126)  # the least normal float32


@jit
def _scaled(x):
    """``(values, scales)`` of the rows of a tile of one span."""
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.where(top == 0.0, 1.0, top / LARGEST), TINY)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@jit
def quantise(x, rows, room, values, scales, CHANNELS: tl.constexpr):
    """``rows`` of ``x``; ``values`` and ``scales`` have ``room`` for so many."""
    SPANS: tl.constexpr = CHANNELS // SPAN
    pid = tl.program_id(0)
    span = pid % SPANS
    r = pid // SPANS * ROWS + tl.arange(0, ROWS)
    live = r < rows
    at = r.to(tl.int64)[:, None] * CHANNELS + (span * SPAN + tl.arange(0, SPAN))[None, :]
    value, scale = _scaled(tl.load(x + at, mask=live[:, None], other=0.0))
    tl.store(values + at, value, mask=live[:, None])
    tl.store(scales + span * room + r, scale, mask=live)


@jit
def permute(
    x, places, room, values, scales,
    TOPK: tl.constexpr, HIDDEN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """The row of a program's token to each of its places, ``SPANS`` scales at a time."""
    t = tl.program_id(0)
    span = tl.arange(0, SPANS)
    i = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    for c in range(0, HIDDEN, SPANS * SPAN):
        value, scale = _scaled(tl.load(x + t.to(tl.int64) * HIDDEN + c + i))
        for k in range(TOPK):
            p = tl.load(places + t * TOPK + k)
            if p >= 0:
                tl.store(values + p.to(tl.int64) * HIDDEN + c + i, value)
                tl.store(scales + (c // SPAN + span) * room + p, scale)
