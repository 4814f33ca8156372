"""The Triton program of ``values.py``: a head's pieces merged, and its values.

Imported only where Triton is there: by ``values.py``.
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

__all__ = ["values"]

FIELDS = tl.constexpr(8)
"""Columns of the list of what to merge; ``work_plan.MERGE_FIELDS`` come first."""

ROWS = tl.constexpr(64)
"""Query rows of a tile of a slot."""


@jit
def _merged(
    part, part_lse, base, n, x,
    RANK: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """``(latents, lse)`` of query row ``x`` of a request in ``n`` pieces, from slot ``base`` on.

    What is in a piece without a key does not count.
    """
    PIECES: tl.constexpr = MERGE[1]
    TOGETHER: tl.constexpr = MERGE[2]
    STAGES: tl.constexpr = MERGE[3]
    TILES: tl.constexpr = MERGE[4]
    row = part_lse + x
    p = tl.arange(0, PIECES)
    lse = tl.load(row + (base + p) * (TILES * ROWS), mask=p < n, other=-float("inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    c = tl.arange(0, RANK)
    acc = tl.zeros((TOGETHER, RANK), tl.float32)
    for first in tl.range(0, n, TOGETHER, num_stages=STAGES):
        q = first + tl.arange(0, TOGETHER)
        slot = (base + q) * (TILES * ROWS)
        line = part + (slot + x).to(tl.int64)[:, None] * RANK + c[None, :]
        found = tl.load(line, mask=(q < n)[:, None], other=0.0).to(tl.float32)
        weight = tl.exp2(tl.load(row + slot, mask=q < n, other=-float("inf")) - top)[:, None]
        acc += tl.where(weight > 0.0, weight * found, 0.0)
    latents = tl.sum(acc, 0) * tl.where(total > 0.0, 1.0 / total, 0.0)
    return latents, tl.where(
        total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, -float("inf")
    )


@jit
def values(
    latents, before, part, part_lse, merges, up, out, lse,
    SIZES: tl.constexpr, MERGE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out = latents up`` of a head, a block of columns and every ``GROUPS``-th token.

    The latents of tokens in pieces are merged; padding is (0, -inf). ``SIZES`` are tokens, heads,
    those of the rows of latents, rank and columns in all; ``MERGE`` powers of two from the tokens
    and from the most pieces on, pieces that are loaded together, how many such loads are in flight,
    and tiles of a slot. ``before`` and ``lse`` are one array: rows of listed tokens are written.
    """
    HEADS: tl.constexpr = SIZES[1]
    PADDED: tl.constexpr = SIZES[2]
    RANK: tl.constexpr = SIZES[3]
    WIDTH: tl.constexpr = SIZES[4]
    LIST: tl.constexpr = MERGE[0]
    pid = tl.program_id(0)
    block, head = pid % (WIDTH // COLUMNS), pid // (WIDTH // COLUMNS) % HEADS
    group = pid // (WIDTH // COLUMNS * HEADS)
    c = tl.arange(0, RANK)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, LIST)
    listed = merges + (1 + i) * FIELDS
    base, pieces, query = tl.load(listed), tl.load(listed + 1), tl.load(listed + 2)
    of = tl.where(i < tl.load(merges), tl.load(listed + 3), -1)  # all of it asked for at once
    nobody = (of >= 0) & (pieces == 0) & (of % GROUPS == group)
    to = out + (of * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(to, tl.zeros((LIST, COLUMNS), out.dtype.element_ty), mask=nobody[:, None])
    if block == 0:
        tl.store(lse + of * PADDED + head, i.to(tl.float32) - float("inf"), mask=nobody)
    for token in range(group, SIZES[0], GROUPS):
        mine = of == token
        n = tl.sum(tl.where(mine, pieces, 0), 0)
        merged = tl.max(mine.to(tl.int32), 0) > 0
        if (n > 0) | (not merged):
            factors = tl.load(up + (head * RANK + c)[:, None] * WIDTH + column[None, :])
            row = token * PADDED + head
            if merged:
                x = tl.sum(tl.where(mine, query, 0), 0) * PADDED + head
                first = tl.sum(tl.where(mine, base, 0), 0)
                found, found_lse = _merged(part, part_lse, first, n, x, RANK, MERGE)
                if block == 0:
                    tl.store(lse + row, found_lse)
            else:
                found = tl.load(latents + row * RANK + c).to(tl.float32)
            found = found.to(out.dtype.element_ty).to(tl.float32)
            result = tl.sum(found[:, None] * factors.to(tl.float32), 0)
            to_row = out + (token * HEADS + head) * WIDTH + column
            tl.store(to_row, result.to(out.dtype.element_ty))
