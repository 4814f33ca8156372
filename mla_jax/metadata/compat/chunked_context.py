"""Cached context of the prefills, cut to a bounded workspace. Host plans (numpy).

Two planners and one device form (``mla.ContextMetadata``) cover every cached row exactly once:
``plan_equal_chunks`` gives every prefill the same share (first generation), ``pack_chunks`` lays
contexts end to end and cuts at pages. The device form cuts the same line every ``rows`` rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import check_chunks, check_sizes
from mla_jax.metadata.context_parallel import WHOLE, ContextShard, dcp_local_seq_lens
from mla_jax.types import Int, cdiv

__all__ = [
    "ContextSpan",
    "EqualChunks",
    "PackedChunk",
    "PackedChunks",
    "pack_chunks",
    "plan_equal_chunks",
]


class ContextSpan(NamedTuple):
    """Cached rows ``[start, start + length)`` of one prefill."""

    request: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class EqualChunks:
    """Rectangular chunks: chunk ``i`` holds ``[i, i + 1) * share`` of every prefill's context."""

    share: int  # rows of one prefill in one chunk, a multiple of the page
    starts: Int[np.ndarray, "chunks prefills"]
    cu_seq_lens: Int[np.ndarray, "chunks starts"]  # exclusive sums of the chunk's lengths
    seq_tot: tuple[int, ...]  # rows of each chunk; trailing ones may be 0
    max_seq_lens: tuple[int, ...]

    def spans(self) -> Iterator[tuple[ContextSpan, ...]]:
        """The rows of each chunk, empty spans left out."""
        for starts, ends in zip(self.starts.tolist(), self.cu_seq_lens, strict=True):
            lens = np.diff(ends).tolist()
            pairs = enumerate(zip(starts, lens, strict=True))
            yield tuple(ContextSpan(r, start, n) for r, (start, n) in pairs if n)


def plan_equal_chunks(
    context_lens: Int[np.ndarray, "requests"], num_prefills: int, workspace_rows: int, page: int
) -> EqualChunks | None:
    """The first generation's plan, or None when no prefill has context.

    ``share = workspace // (prefills with context)``, rounded down to a page. The number of
    chunks follows the longest context of the whole batch, decodes included, so that trailing
    chunks may be empty. Prefills come first in ``context_lens``.

    Raises:
        MetadataError: the workspace does not hold one page of every prefill with context.
    """
    check_sizes(page=page)
    context = context_lens[:num_prefills].astype(np.int32)
    sharing = int((context > 0).sum())
    if sharing == 0:
        return None
    share = workspace_rows // sharing // page * page
    if share == 0:
        raise MetadataError(
            "context workspace rows",
            workspace_rows,
            f"at least {sharing * page}: a page of {page} for each of {sharing} prefills",
        )
    chunks = check_chunks(cdiv(int(context_lens.max()), share), workspace_rows)
    starts = np.repeat(np.arange(chunks, dtype=np.int32)[:, None] * share, num_prefills, axis=1)
    lens = np.clip(context - starts, 0, share)
    return EqualChunks(
        share=share,
        starts=starts,
        cu_seq_lens=np.pad(np.cumsum(lens, axis=1, dtype=np.int32), ((0, 0), (1, 0))),
        seq_tot=tuple(lens.sum(axis=1).tolist()),
        max_seq_lens=tuple(lens.max(axis=1).tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class PackedChunk:
    """Consecutive prefills whose spans fill one workspace.

    Only the first span may continue an earlier chunk, only the last may be unfinished. Local
    fields count rows of one context-parallel rank, padded to whole runs; without context
    parallelism they equal the others.
    """

    spans: tuple[ContextSpan, ...]  # no span is empty
    token_slice: tuple[int, int]  # query tokens of these prefills, [start, stop)
    continuation_token_end: int  # end of the first prefill's query tokens
    query_start_loc: Int[np.ndarray, "starts"]  # from 0
    seq_lens: Int[np.ndarray, "prefills"]  # context rows
    cu_seq_lens: Int[np.ndarray, "starts"]
    local_starts: Int[np.ndarray, "prefills"]  # first row in this rank's cache
    padded_local_seq_lens: Int[np.ndarray, "prefills"]
    local_context_lens: Int[np.ndarray, "prefills ranks"]  # whole contexts, not chunks

    @property
    def request_slice(self) -> tuple[int, int]:
        """The prefills of the chunk, [start, stop)."""
        return self.spans[0].request, self.spans[-1].request + 1

    @property
    def is_continuation(self) -> bool:
        """Whether the first prefill's tokens already have a state to merge with."""
        return self.spans[0].start > 0

    @property
    def num_context_tokens(self) -> int:
        """Rows over all ranks."""
        return int(self.cu_seq_lens[-1])

    @property
    def padded_local_cu_seq_lens(self) -> Int[np.ndarray, "starts"]:
        """Exclusive sums of the rows of one rank."""
        return _starts(self.padded_local_seq_lens)

    @property
    def num_local_context_tokens(self) -> int:
        """Workspace rows that one rank gathers."""
        return int(self.padded_local_seq_lens.sum())

    @property
    def all_rows_active(self) -> bool:
        """Whether every prefill of the chunk has queries and keys."""
        return bool((np.diff(self.query_start_loc) > 0).all() and (self.seq_lens > 0).all())


@dataclass(frozen=True, kw_only=True)
class PackedChunks:
    """Chunks in order, and the query tokens that no chunk concerns."""

    chunks: tuple[PackedChunk, ...]
    empty_token_slices: tuple[tuple[int, int], ...]  # of prefills without context

    def spans(self) -> Iterator[tuple[ContextSpan, ...]]:
        """The rows of each chunk."""
        return (chunk.spans for chunk in self.chunks)


def _starts(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def pack_chunks(
    context_lens: Int[np.ndarray, "prefills"],
    query_start_loc: Int[np.ndarray, "starts"],
    workspace_rows: int,
    page: int,
    shard: ContextShard = WHOLE,
) -> PackedChunks | None:
    """Contexts end to end, cut at pages, or None when no prefill has context.

    A prefill without context ends the chunk being filled. ``shard`` says how many ranks share
    the cache (its rank does not matter: every rank follows the same plan).

    Raises:
        MetadataError: the workspace is smaller than one page of every rank.
    """
    check_sizes(page=page)
    if not (context_lens > 0).any():
        return None
    spans = _pack(context_lens.tolist(), workspace_rows, page, shard)
    tokens = query_start_loc.tolist()
    empty = [(tokens[r], tokens[r + 1]) for r, n in enumerate(context_lens.tolist()) if n == 0]
    return PackedChunks(
        chunks=tuple(_packed_chunk(c, context_lens, query_start_loc, shard) for c in spans),
        empty_token_slices=tuple(empty),
    )


def _local(rows, shard: ContextShard):
    """Rows one rank needs for the first ``rows`` of a context: whole runs, rounded up."""
    return (
        -(-rows // (shard.ranks * shard.interleave)) * shard.interleave if shard.ranks > 1 else rows
    )


def _pack(
    context_lens: list[int], workspace_rows: int, page: int, shard: ContextShard
) -> list[tuple[ContextSpan, ...]]:
    """Greedy spans; a request that does not fit is cut at a multiple of ``align``."""
    align = page if shard.ranks == 1 else lcm(page, shard.ranks * shard.interleave)
    budget = workspace_rows // shard.ranks
    if workspace_rows < align:
        raise MetadataError("context workspace rows", workspace_rows, f"at least {align}")
    least = max(budget * shard.ranks // align * align, align)
    check_chunks(sum(context_lens) // least, workspace_rows)
    chunks: list[tuple[ContextSpan, ...]] = []
    filling: list[ContextSpan] = []
    used = 0

    def close():
        nonlocal filling, used
        if filling:
            chunks.append(tuple(filling))
        filling, used = [], 0

    for request, length in enumerate(context_lens):
        start = 0
        if length == 0:
            close()
        while start < length:
            need = _local(length, shard) - _local(start, shard)
            take = length - start
            if used + need > budget:
                # aligned and too little for the rest, so at least one row remains
                take = (budget - used) * shard.ranks // align * align
            if take:
                filling.append(ContextSpan(request, start, take))
            used += _local(start + take, shard) - _local(start, shard)
            start += take
            if start < length:
                close()
    close()
    return chunks


def _packed_chunk(
    spans: tuple[ContextSpan, ...],
    context_lens: np.ndarray,
    query_start_loc: np.ndarray,
    shard: ContextShard,
) -> PackedChunk:
    first, last = spans[0].request, spans[-1].request + 1
    starts = np.array([s.start for s in spans], np.int32)
    lens = np.array([s.length for s in spans], np.int32)
    every = [
        ContextShard(ranks=shard.ranks, rank=k, interleave=shard.interleave)
        for k in range(shard.ranks)
    ]
    queries = query_start_loc[first : last + 1].astype(np.int32)
    local_starts = _local(starts, shard)
    context = context_lens[first:last].astype(np.int32)
    return PackedChunk(
        spans=spans,
        token_slice=(int(queries[0]), int(queries[-1])),
        continuation_token_end=int(queries[1]),
        query_start_loc=queries - queries[0],
        seq_lens=lens,
        cu_seq_lens=_starts(lens),
        local_starts=local_starts,
        padded_local_seq_lens=_local(starts + lens, shard) - local_starts,
        local_context_lens=np.stack([dcp_local_seq_lens(context, s) for s in every], axis=1),
    )
