"""FlashMLA-style work plans: the key blocks of a decode batch, shared out to SM parts.

Request ``i`` costs its key blocks plus a fixed overhead. All costs are laid end to end on one
line; part ``k`` owns ``[cuts[k], cuts[k + 1])`` of it. A part takes an equal share, and a request
that would leave no more than the overhead behind is finished rather than cut, so::

    cuts[k + 1] = end[j]            if cuts[k] + share < end[j] <= cuts[k] + share + overhead
                  cuts[k] + share   otherwise

Between two such snaps the cuts are an arithmetic progression, hence the only sequential part is
"which snap follows which", a chain over requests that pointer doubling resolves in log steps.
Equal to the original's walk over requests and parts, bit for bit.

Source: FlashMLA (January 2026), scheduling metadata of dense and sparse decode.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import check_sizes, exclusive_sum
from mla_jax.types import Array, Int, cdiv

__all__ = [
    "FlashMLAPlan",
    "balanced_plan",
    "dense_sm_parts",
    "invariant_plan",
    "sparse_row_lens",
    "sparse_sm_parts",
]

BLOCK = 64
"""Keys of one block."""
OVERHEAD = 5
"""What starting a request costs, in blocks, for every kernel but one (SM100, 128 heads: 3)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FlashMLAPlan:
    """Which blocks of which rows each part processes, and where their pieces lie.

    A row of ``tile_scheduler_metadata`` is ``(begin_req, end_req inclusive, begin_block,
    end_block exclusive, begin_split, first_is_split, last_is_split, 0)``; an idle part has
    ``begin_req = batch``. Pieces of row ``i`` are ``num_splits[i] .. num_splits[i + 1]``.
    """

    tile_scheduler_metadata: Int[Array, "parts 8"]
    num_splits: Int[Array, "starts"]  # exclusive sum of pieces per batch row


def dense_sm_parts(num_sms: int, *, queries: int, heads: int, kv_heads: int = 1) -> int:
    """Parts of the dense decode kernel: one per group of SMs that covers all query rows."""
    check_sizes(num_sms=num_sms, queries=queries, heads=heads, kv_heads=kv_heads)
    return max(num_sms // kv_heads // cdiv(queries * heads // kv_heads, BLOCK), 1)


def sparse_sm_parts(num_sms: int, *, queries: int, heads: int) -> int:
    """Parts of the sparse fp8 decode kernel on SM90 (heads are padded to 64 or 128)."""
    check_sizes(num_sms=num_sms, queries=queries, heads=heads)
    return max(num_sms // queries // cdiv(heads, BLOCK), 1)


def sparse_row_lens(
    lens: Int[Array, "batch"], extra_lens: Int[Array, "batch"] | None = None
) -> Int[Array, "batch"]:
    """Keys of a row of two index lists: at least one; the first list filled up to its block.

    ``y = max(len, 1)``; with a second list ``round_up(y, 64) + extra_len``.
    """
    y = jnp.maximum(lens, 1)
    return y if extra_lens is None else (y + BLOCK - 1) // BLOCK * BLOCK + extra_lens


def balanced_plan(
    lens: Int[Array, "batch"],
    *,
    parts: int,
    overhead: int = OVERHEAD,
    block: int = BLOCK,
    num_rows: Int[Array, ""] | None = None,
) -> FlashMLAPlan:
    """Equal shares of blocks per part; a row may be cut anywhere.

    ``lens`` counts the keys of each row; an empty row still costs one block. With ``num_rows``
    the rows from there on cost nothing and belong to no part (their outputs are not written);
    without it padding rows are planned as empty rows.
    """
    check_sizes(parts=parts, block=block)
    if overhead < 0:
        raise MetadataError("overhead", overhead, "0 or more blocks")
    batch = lens.shape[0]
    if batch == 0:
        return _idle_plan(parts)
    blocks = jnp.maximum(lens - 1, 0) // block + 1
    cost = blocks + overhead
    rows = jnp.int32(batch)
    if num_rows is not None:
        rows = num_rows
        cost = jnp.where(jnp.arange(batch) < rows, cost, 0)
    line = exclusive_sum(cost)
    cuts = _cuts(line, parts, overhead)
    req = jnp.sum(line[1:] <= cuts[:, None], axis=1, dtype=jnp.int32)
    begin = jnp.max(jnp.where(line[1:] > cuts[:, None], 0, line[1:]), axis=1)  # line[req]
    inside = cuts - begin  # blocks of request ``req`` before the cut
    is_cut = inside > 0

    # Pieces of the cut request before this cut: cuts since its start.
    until = jnp.sum(cuts <= line[:, None], axis=1, dtype=jnp.int32)  # cuts up to each start
    split = jnp.where(is_cut, jnp.arange(parts + 1, dtype=jnp.int32) + 1 - until[req], 0)

    end_req = jnp.minimum(req[1:] - jnp.where(is_cut[1:], 0, 1), rows - 1)
    last = jnp.maximum(end_req, 0)
    whole = jnp.where(lens[last] == 0, 0, blocks[last])
    end_block = jnp.where(is_cut[1:], inside[1:], whole)
    first_split = is_cut[:-1]
    last_split = end_block != whole
    either = first_split | last_split
    one = req[:-1] == end_req
    table = [
        jnp.where(req[:-1] >= rows, batch, req[:-1]),
        end_req,
        inside[:-1],
        end_block,
        split[:-1],
        jnp.where(one, either, first_split).astype(jnp.int32),
        jnp.where(one, either, last_split).astype(jnp.int32),
        jnp.zeros_like(end_req),
    ]
    whole_before = jnp.minimum(jnp.arange(batch + 1, dtype=jnp.int32), rows)
    cuts_before = jnp.sum(is_cut & (cuts < line[:, None]), axis=1, dtype=jnp.int32)
    return FlashMLAPlan(
        tile_scheduler_metadata=jnp.stack(table, axis=1),
        num_splits=whole_before + cuts_before,
    )


def invariant_plan(
    lens: Int[Array, "batch"], *, blocks_per_piece: int, max_len: int, block: int = BLOCK
) -> FlashMLAPlan:
    """Every row cut each ``blocks_per_piece`` blocks, one piece per part, in row order.

    A row's split points depend on its own length alone, so its result does not depend on the
    batch around it. ``max_len`` bounds ``lens``; there are ``batch * cdiv(max_len, …)`` parts.
    """
    check_sizes(blocks_per_piece=blocks_per_piece, max_len=max_len, block=block)
    batch = lens.shape[0]
    parts = batch * max(cdiv(cdiv(max_len, block), blocks_per_piece), 1)
    if batch == 0:
        return _idle_plan(1)
    blocks = jnp.maximum(lens - 1, 0) // block + 1
    num_splits = exclusive_sum((blocks + blocks_per_piece - 1) // blocks_per_piece)
    k = jnp.arange(parts, dtype=jnp.int32)
    req = jnp.searchsorted(num_splits[1:], k, side="right", method="scan_unrolled")
    req = req.astype(jnp.int32)
    busy = req < batch
    row = jnp.minimum(req, batch - 1)
    split = jnp.where(busy, k - num_splits[row], 0)
    begin = split * blocks_per_piece
    whole = jnp.where(lens[row] == 0, 0, blocks[row])
    end = jnp.where(busy, jnp.minimum(begin + blocks_per_piece, whole), whole)
    is_split = (busy & (blocks[row] > blocks_per_piece)).astype(jnp.int32)
    table = [req, row, begin, end, split, is_split, is_split, jnp.zeros_like(row)]
    return FlashMLAPlan(tile_scheduler_metadata=jnp.stack(table, axis=1), num_splits=num_splits)


def _idle_plan(parts: int) -> FlashMLAPlan:
    idle = jnp.zeros((parts, 8), jnp.int32).at[:, 1].set(-1)
    return FlashMLAPlan(tile_scheduler_metadata=idle, num_splits=jnp.zeros((1,), jnp.int32))


def _cuts(line: Int[Array, "starts"], parts: int, overhead: int) -> Int[Array, "cuts"]:
    """``parts + 1`` cut positions: see the module's recurrence; the last is the line's end."""
    end = line[-1]
    share = jnp.maximum((end + parts - 1) // parts, 1)

    def steps(distance):
        """Shares until ``distance`` is within reach of the overhead, at least one."""
        return jnp.maximum((distance - overhead + share - 1) // share, 1)

    # The first later start that the progression from each start runs into.
    distance = line - line[:, None]  # [from, to]
    snaps = (distance > 0) & (steps(distance) * share <= distance)
    nodes = line.shape[0]
    to = jnp.arange(nodes, dtype=jnp.int32)
    after = jnp.min(jnp.where(snaps, to, nodes - 1), axis=1)

    visited = jnp.zeros((1,), jnp.int32)
    for _ in range(min(nodes - 1, parts).bit_length()):
        visited = jnp.concatenate([visited, after[visited]])
        after = after[after]
    at = line[visited]
    part = exclusive_sum(steps(jnp.diff(at)))

    k = jnp.arange(parts + 1, dtype=jnp.int32)[:, None]
    ahead = at + (k - part) * share
    return jnp.minimum(jnp.max(jnp.where(part <= k, ahead, 0), axis=1), end)
