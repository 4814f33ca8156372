"""Building first-generation metadata from sequence groups, prompts before decodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.compat.chunked_context import plan_equal_chunks
from mla_jax.metadata.compat.legacy import MLACommonMetadata
from mla_jax.types import PAD_SLOT, Int, cdiv

__all__ = [
    "CapturedShape",
    "LegacyBuilder",
    "SequenceGroup",
    "SequenceStep",
    "sequence_slots",
]


@dataclass(frozen=True, kw_only=True)
class SequenceStep:
    """One sequence of a group in this step."""

    seq_id: int
    num_tokens: int  # tokens fed to the model
    orig_seq_len: int  # length when the step was scheduled
    seq_len: int  # length now; larger after steps taken on the device
    query_len: int
    context_len: int  # cached tokens
    curr_sliding_window_block: int  # last pages of the table to keep; 0 = all


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """Sequences that share a prompt. ``block_tables`` None: a profile run without cache."""

    is_prompt: bool
    prefix_cache_hit: bool
    block_tables: Mapping[int, Sequence[int]] | None
    seqs: Sequence[SequenceStep]


@dataclass(frozen=True, kw_only=True)
class CapturedShape:
    """The padded batch of a captured graph."""

    tokens: int  # of the whole batch, padding included
    pad: int  # padded sequences behind the real ones
    pages: int  # width of the persistent page table


def sequence_slots(
    *,
    is_prompt: bool,
    seq_len: int,
    query_len: int,
    context_len: int,
    sliding_window: int | None,
    block_size: int,
    block_table: Sequence[int] | None,
) -> Int[np.ndarray, "tokens"]:
    """Slots of positions ``[context_len, seq_len)``.

    With a sliding window, positions of a prompt below ``query_len - sliding_window`` have none.
    Without a table (profile run) no position from 0 on has one.
    """
    if block_table is None:
        return np.full(seq_len, PAD_SLOT, np.int32)
    p = np.arange(context_len, seq_len, dtype=np.int32)
    if cdiv(seq_len, block_size) > len(block_table):
        raise MetadataError(
            "pages of a sequence", len(block_table), f"at least {cdiv(seq_len, block_size)}"
        )
    table = np.asarray(block_table, np.int32)
    slots = table[p // block_size] * block_size + p % block_size
    first = 0
    if is_prompt and sliding_window is not None:
        first = max(0, query_len - sliding_window)
    return np.where(p < first, PAD_SLOT, slots)


@dataclass(frozen=True, kw_only=True)
class LegacyBuilder:
    """Builds ``MLACommonMetadata``; a frozen set of engine facts."""

    block_size: int
    workspace_rows: int
    chunked_prefill: bool
    prefix_caching: bool
    sliding_window: int | None

    def build(
        self,
        groups: Sequence[SequenceGroup],
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        *,
        captured: CapturedShape | None,
    ) -> MLACommonMetadata:
        """``seq_lens`` includes 1 for every padded sequence, ``query_lens`` does not.

        Raises:
            MetadataError: no query, or a workspace below a page of every prefill with context.
        """
        if max(query_lens, default=0) <= 0:
            raise MetadataError("query_lens", list(query_lens), "at least one token")
        prompts = [s for g in groups if g.is_prompt for s in g.seqs]
        decodes = [s for g in groups if not g.is_prompt for s in g.seqs]
        prefill_tokens = sum(s.num_tokens for s in prompts)
        decode_tokens = sum(s.query_len for s in decodes)
        if captured is not None:
            decode_tokens = captured.tokens - prefill_tokens
        pad = captured.pad if captured else 0
        contexts = np.array([s.context_len for s in (*prompts, *decodes)], np.int32)
        chunked = (self.chunked_prefill or self.prefix_caching) and len(prompts) > 0
        lens = np.array(seq_lens, np.int32)
        slots = [self._slots(g, s) for g in groups for s in g.seqs]
        return MLACommonMetadata(
            num_prefills=len(prompts),
            num_prefill_tokens=prefill_tokens,
            num_decode_tokens=decode_tokens,
            use_cuda_graph=captured is not None,
            slot_mapping=np.concatenate([*slots, np.full(pad, PAD_SLOT, np.int32)]),
            seq_lens=tuple(seq_lens),
            seq_lens_tensor=lens,
            context_lens_tensor=contexts,
            block_tables=self._table(groups, len(seq_lens), captured),
            query_start_loc=_starts(query_lens),
            seq_start_loc=_starts(seq_lens),
            max_query_len=max(query_lens),
            max_decode_query_len=max((s.query_len for s in decodes), default=1),
            max_prefill_seq_len=max((s.orig_seq_len for s in prompts), default=0),
            max_decode_seq_len=max((s.seq_len for s in decodes), default=0),
            context_chunks=plan_equal_chunks(
                contexts, len(prompts), self.workspace_rows, self.block_size
            )
            if chunked
            else None,
        )

    def _slots(self, group: SequenceGroup, seq: SequenceStep) -> Int[np.ndarray, "tokens"]:
        return sequence_slots(
            is_prompt=group.is_prompt,
            seq_len=seq.orig_seq_len,
            query_len=seq.query_len,
            context_len=seq.context_len,
            sliding_window=self.sliding_window,
            block_size=self.block_size,
            block_table=_pages_of(group, seq),
        )

    def _row(self, group: SequenceGroup, seq: SequenceStep, any_hit: bool) -> Sequence[int]:
        """The pages attention may read: none for a prompt that only sees its own tokens."""
        pages = _pages_of(group, seq)
        if pages is None:
            return ()
        if any_hit:
            return pages
        if not (self.chunked_prefill or not group.is_prompt):
            return ()
        return pages[-seq.curr_sliding_window_block :]

    def _table(
        self, groups: Sequence[SequenceGroup], requests: int, captured: CapturedShape | None
    ) -> Int[np.ndarray, "requests pages"]:
        """Rows right-padded with page 0; a captured width truncates."""
        any_hit = any(g.prefix_cache_hit for g in groups)
        rows = [self._row(g, s, any_hit) for g in groups for s in g.seqs]
        width = captured.pages if captured else max(map(len, rows), default=0)
        table = np.zeros((requests, width), np.int32)
        for out, row in zip(table, rows, strict=False):
            out[: len(row)] = row[:width]
        return table


def _pages_of(group: SequenceGroup, seq: SequenceStep) -> Sequence[int] | None:
    """The block table of a sequence. None in a profile run, where none of its group has one."""
    tables = group.block_tables
    if tables is None or all(table is None for table in tables.values()):
        return None
    return tables[seq.seq_id]


def _starts(lens: Sequence[int]) -> Int[np.ndarray, "starts"]:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
