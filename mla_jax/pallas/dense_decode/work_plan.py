"""Which multiprocessor attends to which keys: computed on the device from lengths alone.

The keys of a request are cut into blocks; a *piece* is a run of blocks of one request, a
*worker* is the thread blocks (one per tile of query rows) that share a list of pieces. A
request in one piece is finished by its worker; the pieces of the others go to *slots* of a
scratch buffer and are merged. ``plan_sm90`` computes the balanced plan in one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.pallas.axes import PerRequest, Starts
from mla_jax.types import Array, Int, round_up

__all__ = ["FIELDS", "PlanFacts", "WorkPlan", "balanced", "batch_invariant"]

FIELDS = REQUEST, FIRST, END, SLOT, LENGTH, TOKEN, QUERIES = tuple(range(7))
"""Columns of ``WorkPlan.pieces``; the eighth is zero."""

TASK_FIELDS = BEGIN, STOP, OF_REQUEST, FROM, TO, OF_TOKEN = tuple(range(6))
"""Columns of ``WorkPlan.tasks``; the others are zero, as are rows of workers without a piece."""

MERGE_FIELDS = BASE, COUNT, QUERY, TOKEN_OF = tuple(range(4))
"""Columns of ``WorkPlan.merges``; the others are zero."""

START_COST = 2
"""Blocks of work that starting a piece is worth: its queries, its first pages, its result."""

COST = 1024
"""Costs are integers, of so many to a block of one worker: they compare alike everywhere."""

MERGE_COST = 2 * COST
"""What merging anything at all costs."""

SHARES = 17
"""Shares that are priced, from the even one on, an even hundred-and-twenty-eighth apart."""

LOOKAHEAD = 2
"""Rows of zeros behind the last piece, at least, so that a worker may read ahead."""

ROWS = 128
"""Rows of the tables are a multiple of this; those that say nothing are zeros."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan was made for, besides lengths: calls with other facts refuse it."""

    tokens: int
    requests: int
    heads: int  # of a query token, padded
    max_query_len: int
    page: int
    width: int  # of the page table
    workers: int
    chunk: int  # blocks after which a request is cut by its own length; 0 = equal shares


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """Pieces, worker by worker, the workers' shares of them, and what to merge."""

    facts: PlanFacts | None = field(default=None, metadata={"static": True})  # of make_plan
    slots: int = field(metadata={"static": True})  # rows of the scratch buffer, at most
    workers: int = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})
    pieces: Int[Array, "pieces 8"]  # request, first and end block, slot or -1, keys, token, queries
    tasks: Int[Array, "tasks 8"]  # of each worker its first piece and the end of its pieces, and
    # request, first and end block, token of that piece, so that it starts after one read
    merges: Int[Array, "list 8"]  # [0, 0] rows that follow: first slot, pieces (0 = padding),
    # query of its request, token; of tokens that no single piece finishes


def balanced(
    seq_lens: PerRequest, query_starts: Starts, *, tokens: int, block: int, workers: int,
    split_cost: int,
) -> WorkPlan:  # fmt: skip
    """Equal shares: the line of all blocks is cut every ``share`` of them, or every request
    into equal pieces of ``share`` blocks at most, one piece for a worker.

    Of both the cheapest; ``share`` is the even one, or up to an eighth more if so many fewer
    requests are split that the merge saves the difference. A split costs ``split_cost / COST``
    blocks of one worker, and the first split ``MERGE_COST / COST`` more.
    """
    queries, blocks = _blocks(seq_lens, query_starts, block)
    lines = jnp.cumsum(blocks + jnp.where(queries > 0, START_COST, 0)) - blocks
    share, equal = _share(lines, blocks, workers, split_cost)
    first_cut = lines // share + 1
    parts = jnp.where(equal, (blocks + share - 1) // share, _cuts(lines, blocks, share) + 1)
    parts = jnp.where(queries > 0, parts, 0)
    bases = jnp.cumsum(parts) - parts
    size = (blocks + parts - 1) // jnp.maximum(parts, 1)  # of equal pieces

    def piece(r, k):
        first = jnp.where(k == 0, 0, (first_cut[r] + k - 1) * share - lines[r])
        end = (first_cut[r] + k) * share - lines[r]
        first = jnp.where(equal, k * size[r], first)
        return first, jnp.minimum(jnp.where(equal, first + size[r], end), blocks[r])

    def assign(i, r, k, sizes):
        del sizes
        worker = jnp.where(equal, bases[r] + k, first_cut[r] - 1 + k)
        worker = jnp.where(i < bases[-1] + parts[-1], worker, workers)
        return i, _find(worker, jnp.arange(workers + 1, dtype=jnp.int32), side="left")

    return _plan(
        seq_lens, query_starts, parts, piece, assign,
        tokens=tokens, workers=workers, slots=balanced_slots(workers),
        pieces=seq_lens.shape[0] + workers - 1,
    )  # fmt: skip


def batch_invariant(
    seq_lens: PerRequest, query_starts: Starts, *, tokens: int, block: int, workers: int,
    chunk: int, max_parts: int,
) -> WorkPlan:  # fmt: skip
    """A cut every ``chunk`` blocks of a request, whatever its neighbours are.

    The same request is computed by the same operations in the same order in every batch. Of a
    request longer than ``chunk * max_parts`` blocks the chunks are longer: ``max_parts`` of them.
    Who computes a piece changes no bit: pieces are dealt by size, the largest first, from the
    first worker to the last, then back, and so on.
    """
    queries, blocks = _blocks(seq_lens, query_starts, block)
    chunks = jnp.maximum(chunk, (blocks + max_parts - 1) // max_parts)
    parts = jnp.where(queries > 0, (blocks + chunks - 1) // chunks, 0)
    w = jnp.arange(workers + 1, dtype=jnp.int32)

    def piece(r, k):
        first = k * chunks[r]
        return first, jnp.minimum(first + chunks[r], blocks[r])

    def assign(i, r, k, sizes):
        del r, k
        before = (sizes > sizes[:, None]) | ((sizes == sizes[:, None]) & (i < i[:, None]))
        rank = jnp.sum(before, axis=1, dtype=jnp.int32)
        by_rank = jnp.zeros_like(i).at[rank].set(i, unique_indices=True)
        total = jnp.sum(parts, dtype=jnp.int32)
        rounds, rest = total // workers, total % workers
        last = jnp.where(rounds % 2 == 0, jnp.minimum(w, rest), jnp.maximum(w - workers + rest, 0))
        bounds = w * rounds + last
        worker = jnp.minimum(_find(bounds, i) - 1, workers - 1)
        turn = i - bounds[worker]
        dealt = turn * workers + jnp.where(turn % 2 == 0, worker, workers - 1 - worker)
        return by_rank[jnp.minimum(dealt, i.shape[0] - 1)], bounds

    count = seq_lens.shape[0] * max_parts
    return _plan(
        seq_lens, query_starts, parts, piece, assign,
        tokens=tokens, workers=workers, slots=count, pieces=count,
    )  # fmt: skip


def balanced_slots(workers: int) -> int:
    """Pieces of split requests, at most, that ``workers - 1`` cuts make."""
    return max(2 * (workers - 1), 1)


def shapes(requests: int, tokens: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Of pieces, tasks and merges of a balanced plan."""
    rows = (requests + workers - 1 + LOOKAHEAD, workers, 1 + tokens)
    pieces, tasks, merges = ((round_up(n, ROWS), 8) for n in rows)
    return pieces, tasks, merges


def share_at(even, k):
    """Share ``k`` of those that are priced; ``even`` is the first."""
    return even + k * jnp.maximum(1, lax.div(even, jnp.int32(128)))


def cost(share, splits, split_cost):
    """Of a share and the splits that it causes, in ``COST`` to a block of one worker."""
    return share * COST + splits * split_cost + jnp.where(splits > 0, MERGE_COST, 0)


def _blocks(seq_lens, query_starts, block):
    """Queries and blocks of every request; a request with queries has at least one block."""
    queries = jnp.diff(query_starts)
    blocks = jnp.maximum((seq_lens + block - 1) // block, 1)
    return queries, jnp.where(queries > 0, blocks, 0)


def _cuts(lines, blocks, share):
    """How often a line that is cut every ``share`` blocks is cut inside a request."""
    return jnp.maximum((lines + blocks - 1) // share - lines // share, 0)


def _share(lines, blocks, workers, split_cost):
    """The cheapest share, and whether it is that of equal pieces."""
    total = jnp.maximum(lines[-1] + blocks[-1], 1)
    even = (total + workers - 1) // workers
    shares = share_at(even, jnp.arange(SHARES, dtype=jnp.int32))
    of_line = jnp.sum(_cuts(lines, blocks, shares[:, None]), axis=1, dtype=jnp.int32)
    pieces = jnp.sum((blocks + shares[:, None] - 1) // shares[:, None], axis=1, dtype=jnp.int32)
    of_equal = pieces - jnp.sum(blocks > 0, dtype=jnp.int32)
    line, equal = (cost(shares, splits, split_cost) for splits in (of_line, of_equal))
    equal = jnp.where(pieces <= workers, equal, jnp.iinfo(jnp.int32).max)
    best = jnp.argmin(jnp.concatenate([line, equal]))
    return shares[best % SHARES], best >= SHARES


def _plan(
    seq_lens, query_starts, parts, piece: Callable, assign: Callable,
    *, tokens, workers, slots, pieces,
) -> WorkPlan:  # fmt: skip
    """Describe the pieces of all requests, and order them by worker."""
    i = jnp.arange(pieces, dtype=jnp.int32)
    ends = jnp.cumsum(parts)
    request = jnp.minimum(_find(ends, i), parts.shape[0] - 1)
    k = i - (ends - parts)[request]
    first, end = piece(request, k)
    split = jnp.where(parts > 1, parts, 0)
    slot_bases = jnp.cumsum(split) - split
    exists = i < ends[-1]
    slot = jnp.where(parts[request] > 1, slot_bases[request] + k, -1)
    of_request = (seq_lens, query_starts, jnp.diff(query_starts), jnp.zeros_like(parts))
    table = jnp.stack([request, first, end, slot, *(x[request] for x in of_request)], axis=1)
    table = jnp.where(exists[:, None], table, 0).astype(jnp.int32)
    order, bounds = assign(i, request, k, jnp.where(exists, end - first, 0))

    table = jnp.where(exists[:, None], table[order], 0)
    begin, stop = bounds[:-1], bounds[1:]
    of_first = table[jnp.minimum(begin, pieces - 1)][:, jnp.array([REQUEST, FIRST, END, TOKEN])]
    task = jnp.concatenate([begin[:, None], stop[:, None], of_first], axis=1)

    t = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.minimum(_find(query_starts[1:], t), parts.shape[0] - 1)
    of_token = (slot_bases[owner], parts[owner], t - query_starts[owner])
    rows = jnp.stack([*(jnp.where(t < query_starts[-1], x, 0) for x in of_token), t], axis=1)
    listed = jnp.cumsum(rows[:, COUNT] != 1, dtype=jnp.int32)
    rows = rows[jnp.minimum(_find(listed, t), tokens - 1)]
    rows = jnp.where((t < listed[-1])[:, None], rows, 0).astype(jnp.int32)
    return WorkPlan(
        slots=slots,
        workers=workers,
        tokens=tokens,
        pieces=_rows(table, pieces + LOOKAHEAD),
        tasks=_rows(jnp.where((begin < stop)[:, None], task, 0), workers),
        merges=_rows(rows, tokens, before=1).at[0, 0].set(listed[-1]),
    )


def _rows(x: Array, least: int, before: int = 0) -> Array:
    """The table, eight columns wide, among rows of zeros."""
    rows, columns = x.shape
    return jnp.pad(x, ((before, round_up(least + before, ROWS) - rows - before), (0, 8 - columns)))


def _find(ends: Array, x: Array, side: str = "right") -> Array:
    # One fused comparison: the default method is a loop of many small kernels on a GPU.
    return jnp.searchsorted(ends, x, side=side, method="compare_all").astype(jnp.int32)
