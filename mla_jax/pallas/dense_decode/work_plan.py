"""Which multiprocessor attends to which keys: computed on the device from lengths alone.

The keys of a request are cut into blocks; a *piece* is a run of blocks of one request, a
*worker* is the thread blocks (one per tile of query rows) that share a list of pieces. A
request in one piece is finished by its worker; the pieces of the others go to *slots* of a
scratch buffer and are merged.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.types import Array, Int

__all__ = ["FIELDS", "WorkPlan", "balanced", "batch_invariant"]

FIELDS = REQUEST, FIRST, END, SLOT, LENGTH, TOKEN, QUERIES = tuple(range(7))
"""Columns of ``WorkPlan.pieces``; the eighth is zero."""

MERGE_FIELDS = BASE, COUNT, QUERY, TOKEN_OF = tuple(range(4))
"""Columns of ``WorkPlan.merges``."""

START_COST = 2
"""Blocks of work that starting a piece is worth: its queries, its first pages, its result."""

MERGE_COST = 2.0
"""Blocks of work that merging anything at all is worth."""

LOOKAHEAD = 2
"""Rows of zeros behind the last piece, so that a worker may read ahead."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """Pieces, worker by worker, the workers' shares of them, and what to merge."""

    slots: int = field(metadata={"static": True})  # rows of the scratch buffer, at most
    pieces: Int[Array, "pieces 8"]  # request, first and end block, slot or -1, keys, token, queries
    bounds: Int[Array, "bounds"]  # worker w owns pieces bounds[w] to bounds[w + 1]
    merges: Int[Array, "list 4"]  # [0, 0] rows that follow: first slot, pieces (0 = padding),
    # query of its request, token; of tokens that no single piece finishes


def balanced(
    seq_lens: Int[Array, "requests"],
    query_starts: Int[Array, "starts"],
    *,
    tokens: int,
    block: int,
    workers: int,
    split_cost: float,
) -> WorkPlan:
    """Equal shares: the line of all blocks is cut every ``share`` of them, or every request
    into equal pieces of ``share`` blocks at most, one piece for a worker.

    Of both the cheapest; ``share`` is the even one, or up to an eighth more if so many fewer
    requests are split that the merge saves the difference. A split costs ``split_cost`` blocks
    of one worker, and the first split ``MERGE_COST`` more.
    """
    queries, blocks = _blocks(seq_lens, query_starts, block)
    lead = jnp.where(queries > 0, START_COST, 0)
    ends = jnp.cumsum(blocks + lead)
    starts = ends - blocks - lead
    share, equal = _share(starts + lead, ends, blocks, workers, split_cost)
    first_cut = (starts + lead) // share + 1
    cuts = jnp.maximum((ends - 1) // share - first_cut + 1, 0)
    cuts = jnp.where(equal, (blocks + share - 1) // share - 1, cuts)
    parts = jnp.where(queries > 0, cuts + 1, 0)
    bases = jnp.cumsum(parts) - parts
    size = (blocks + parts - 1) // jnp.maximum(parts, 1)  # of equal pieces

    def piece(r, k):
        line = starts[r] + lead[r]
        first = jnp.where(k == 0, 0, (first_cut[r] + k - 1) * share - line)
        end = jnp.where(k == parts[r] - 1, blocks[r], (first_cut[r] + k) * share - line)
        first = jnp.where(equal, k * size[r], first)
        end = jnp.where(equal, jnp.minimum((k + 1) * size[r], blocks[r]), end)
        return first, end

    def assign(table, r, k):
        worker = jnp.where(equal, bases[r] + k, first_cut[r] - 1 + k)
        exists = table[:, END] > table[:, FIRST]
        worker = jnp.where(exists, jnp.minimum(worker, workers - 1), workers)
        return table, _find(worker, jnp.arange(workers + 1, dtype=jnp.int32), side="left")

    return _plan(
        seq_lens,
        query_starts,
        parts,
        piece,
        assign,
        tokens=tokens,
        pieces=seq_lens.shape[0] + workers - 1,
        slots=max(2 * (workers - 1), 1),
    )


def batch_invariant(
    seq_lens: Int[Array, "requests"],
    query_starts: Int[Array, "starts"],
    *,
    tokens: int,
    block: int,
    workers: int,
    chunk: int,
    max_parts: int,
) -> WorkPlan:
    """A cut every ``chunk`` blocks of a request, whatever its neighbours are.

    The same request is computed by the same operations in the same order in every batch. Of a
    request longer than ``chunk * max_parts`` blocks the chunks are longer: ``max_parts`` of them.
    Who computes a piece changes no bit: pieces are dealt by size, the largest first, from the
    first worker to the last, then back, and so on.
    """
    queries, blocks = _blocks(seq_lens, query_starts, block)
    chunks = jnp.maximum(chunk, (blocks + max_parts - 1) // max_parts)
    parts = jnp.where(queries > 0, (blocks + chunks - 1) // chunks, 0)
    count = seq_lens.shape[0] * max_parts

    def piece(r, k):
        first = k * chunks[r]
        return first, jnp.minimum(first + chunks[r], blocks[r])

    def assign(table, r, k):
        del r, k
        i, sizes = jnp.arange(count, dtype=jnp.int32), table[:, END] - table[:, FIRST]
        before = (sizes > sizes[:, None]) | ((sizes == sizes[:, None]) & (i < i[:, None]))
        rank = jnp.sum(before, axis=1, dtype=jnp.int32)
        by_rank = jnp.zeros_like(i).at[rank].set(i, unique_indices=True)
        w, total = jnp.arange(workers + 1, dtype=jnp.int32), jnp.sum(parts, dtype=jnp.int32)
        rounds, rest = total // workers, total % workers
        last = jnp.where(rounds % 2 == 0, jnp.minimum(w, rest), jnp.maximum(w - workers + rest, 0))
        bounds = w * rounds + last
        worker = jnp.minimum(_find(bounds, i) - 1, workers - 1)
        turn = i - bounds[worker]
        dealt = turn * workers + jnp.where(turn % 2 == 0, worker, workers - 1 - worker)
        table = table[by_rank[jnp.minimum(dealt, count - 1)]]
        return jnp.where((i < total)[:, None], table, 0), bounds

    return _plan(
        seq_lens,
        query_starts,
        parts,
        piece,
        assign,
        tokens=tokens,
        pieces=count,
        slots=count,
    )


def _blocks(seq_lens, query_starts, block):
    """Queries and blocks of every request; a request with queries has at least one block."""
    queries = jnp.diff(query_starts)
    blocks = jnp.maximum((seq_lens + block - 1) // block, 1)
    return queries, jnp.where(queries > 0, blocks, 0)


def _share(lines, ends, blocks, workers, split_cost):
    """The cheapest of 17 shares, and whether it is that of equal pieces.

    A share costs its own length and the splits that it causes.
    """
    total = jnp.maximum(ends[-1], 1)
    even = (total + workers - 1) // workers
    shares = even + jnp.arange(17, dtype=jnp.int32) * jnp.maximum(1, even // 128)
    cuts = shares[:, None] * jnp.arange(1, workers, dtype=jnp.int32)
    request = jnp.minimum(_find(ends, cuts), ends.shape[0] - 1)
    of_line = jnp.sum((cuts < total) & (cuts > lines[request]), axis=1, dtype=jnp.int32)
    pieces = jnp.sum((blocks + shares[:, None] - 1) // shares[:, None], axis=1, dtype=jnp.int32)
    of_equal = pieces - jnp.sum(blocks > 0, dtype=jnp.int32)
    splits = jnp.stack([of_line, of_equal]).astype(jnp.float32)
    cost = shares.astype(jnp.float32) + split_cost * splits
    cost = cost + jnp.where(splits > 0, MERGE_COST, 0.0)
    cost = cost.at[1].set(jnp.where(pieces <= workers, cost[1], jnp.inf))
    best = jnp.argmin(cost)
    return shares[best % shares.shape[0]], best >= shares.shape[0]


def _plan(seq_lens, query_starts, parts, piece, assign, *, tokens, pieces, slots):
    """Describe the pieces of all requests, in the order of their keys, and assign them.

    ``piece(request, k)`` are the first and the end block of the request's piece ``k``;
    ``assign(table, request, k)`` the table in the order of workers, and their bounds.
    """
    i = jnp.arange(pieces, dtype=jnp.int32)
    ends = jnp.cumsum(parts)
    bases = ends - parts
    request = jnp.minimum(_find(ends, i), parts.shape[0] - 1)
    k = i - bases[request]
    first, end = piece(request, k)
    split = jnp.where(parts > 1, parts, 0)
    slot_bases = jnp.cumsum(split) - split
    exists = i < ends[-1]
    queries = jnp.diff(query_starts)
    fields = (
        request,
        first,
        end,
        jnp.where(parts[request] > 1, slot_bases[request] + k, -1),
        seq_lens[request],
        query_starts[request],
        queries[request],
        jnp.zeros_like(i),
    )
    table = jnp.where(exists[:, None], jnp.stack(fields, axis=1), 0)
    table, bounds = assign(table, request, k)

    t = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.minimum(_find(query_starts[1:], t), parts.shape[0] - 1)
    count = jnp.where(t < query_starts[-1], parts[owner], 0)
    listed = jnp.cumsum(count != 1, dtype=jnp.int32)
    token = jnp.minimum(_find(listed, t), tokens - 1)  # of the list's row
    rows = jnp.stack([slot_bases[owner], count, t - query_starts[owner], t], axis=1)[token]
    head = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(listed[-1])
    return WorkPlan(
        slots=slots,
        pieces=jnp.pad(table, ((0, LOOKAHEAD), (0, 0))).astype(jnp.int32),
        bounds=bounds,
        merges=jnp.concatenate([head, rows.astype(jnp.int32)]),
    )


def _find(ends: Array, x: Array, side: str = "right") -> Array:
    # One fused comparison: the default method is a loop of many small kernels on a GPU.
    return jnp.searchsorted(ends, x, side=side, method="compare_all").astype(jnp.int32)
