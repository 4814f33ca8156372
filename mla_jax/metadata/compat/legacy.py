"""First-generation MLA metadata: prefills first, one host object per step, memoised views.

Kept so that vectors and callers of that generation have a counterpart; ``decodes_first``
(``batch_order``) leads from here to the metadata that everything else uses.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.compat.batch_order import BatchOrder, decodes_first
from mla_jax.metadata.compat.chunked_context import EqualChunks
from mla_jax.types import PAD_SLOT, Int

__all__ = ["MLACommonMetadata", "capture_metadata", "to_decodes_first"]

SUPPORTED_HEAD_DIM = 576


@dataclass(frozen=True, kw_only=True)
class MLACommonMetadata:
    """One step of the first generation. Padded decodes (graph slots) stand at the end."""

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int  # graph padding included
    use_cuda_graph: bool  # a padded batch of a captured size
    slot_mapping: Int[np.ndarray, "tokens"]  # -1 = do not write
    seq_lens: tuple[int, ...] | None  # host copy; None in the decode view
    seq_lens_tensor: Int[np.ndarray, "requests"]  # 1 for a padded sequence
    context_lens_tensor: Int[np.ndarray, "real"] | None  # real sequences only
    block_tables: Int[np.ndarray, "requests pages"]
    query_start_loc: Int[np.ndarray, "realstarts"]  # real sequences only
    seq_start_loc: Int[np.ndarray, "starts"]
    max_query_len: int
    max_decode_query_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    context_chunks: EqualChunks | None  # None = no prefill has context
    head_dim: int | None = None

    def __post_init__(self):
        if self.head_dim is not None and self.head_dim != SUPPORTED_HEAD_DIM:
            raise MetadataError("head_dim", self.head_dim, f"{SUPPORTED_HEAD_DIM} or None")

    @cached_property
    def prefill_metadata(self) -> "MLACommonMetadata | None":
        """The prefills alone; None if there are none."""
        n = self.num_prefills
        if n == 0:
            return None
        context = self.context_lens_tensor
        return replace(
            self,
            num_decode_tokens=0,
            use_cuda_graph=False,
            slot_mapping=self.slot_mapping[: self.num_prefill_tokens],
            seq_lens=None if self.seq_lens is None else self.seq_lens[:n],
            seq_lens_tensor=self.seq_lens_tensor[:n],
            context_lens_tensor=None if context is None else context[:n],
            block_tables=self.block_tables[:n],
            query_start_loc=self.query_start_loc[: n + 1],
            seq_start_loc=self.seq_start_loc[: n + 1],
            max_decode_query_len=0,
            max_decode_seq_len=0,
        )

    @cached_property
    def decode_metadata(self) -> "MLACommonMetadata | None":
        """The decodes alone; query starts begin at 0, sequence starts do not. None if none."""
        n = self.num_prefills
        if self.num_decode_tokens == 0:
            return None
        return replace(
            self,
            num_prefills=0,
            num_prefill_tokens=0,
            slot_mapping=self.slot_mapping[self.num_prefill_tokens :],
            seq_lens=None,
            seq_lens_tensor=self.seq_lens_tensor[n:],
            context_lens_tensor=None,
            block_tables=self.block_tables[n:],
            query_start_loc=self.query_start_loc[n:] - self.query_start_loc[n],
            seq_start_loc=self.seq_start_loc[n:],
            max_prefill_seq_len=0,
            context_chunks=None,
        )

    def advance(
        self, *, num_seqs: int, num_queries: int, turn_prefills_into_decodes: bool = False
    ) -> "MLACommonMetadata":
        """The host half of ``advance.advance_step``: counters and lengths of the next step.

        The device half gives the slots. Views are those of the new object; context lengths and
        query starts are brought up to date.

        Raises:
            MetadataError: fewer sequences than queries, prefills left, or stale maxima.
        """
        if num_seqs < num_queries:
            raise MetadataError("num_seqs", num_seqs, f"at least num_queries = {num_queries}")
        step = self._decodes_only(num_seqs) if turn_prefills_into_decodes else self
        step._check_decodes(num_seqs, num_queries, stale=not turn_prefills_into_decodes)
        assert step.seq_lens is not None, "checked above"
        grown = tuple(n + (i < num_queries) for i, n in enumerate(step.seq_lens))
        lens = np.array(grown, np.int32)
        return replace(
            step,
            seq_lens=grown,
            seq_lens_tensor=lens,
            context_lens_tensor=lens[:num_queries] - 1,
            query_start_loc=np.arange(num_queries + 1, dtype=np.int32),
            seq_start_loc=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
            max_decode_seq_len=max(grown),
        )

    def _decodes_only(self, num_seqs: int) -> "MLACommonMetadata":
        return replace(
            self,
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=self.num_decode_tokens + self.num_prefills,
            max_prefill_seq_len=0,
            max_query_len=1,
            slot_mapping=self.slot_mapping[:num_seqs],
            context_chunks=None,
        )

    def _check_decodes(self, num_seqs: int, num_queries: int, *, stale: bool) -> None:
        """Refuse what cannot be advanced, naming the first field that stands in the way."""
        lens, contexts = self.seq_lens or (), self.context_lens_tensor
        wanted = {
            "num_prefills": (self.num_prefills, 0),
            "num_prefill_tokens": (self.num_prefill_tokens, 0),
            "max_prefill_seq_len": (self.max_prefill_seq_len, 0),
            "max_query_len": (self.max_query_len, 1),
            "num_decode_tokens": (self.num_decode_tokens, num_seqs),
            "number of seq_lens": (len(lens), num_seqs),
            "number of slots": (len(self.slot_mapping), num_seqs),
            "number of block_tables": (len(self.block_tables), num_seqs),
            "number of seq_lens_tensor": (len(self.seq_lens_tensor), num_seqs),
            "number of seq_start_loc": (len(self.seq_start_loc), num_seqs + 1),
            "number of query_start_loc": (len(self.query_start_loc), num_queries + 1),
            "number of context_lens": (None if contexts is None else len(contexts), num_queries),
        }
        if stale:
            wanted["max_decode_seq_len"] = (self.max_decode_seq_len, max(lens, default=0))
        for name, (given, allowed) in wanted.items():
            if given != allowed:
                raise MetadataError(name, given, f"{allowed} before a decode step")


def capture_metadata(
    batch: int, block_tables: Int[np.ndarray, "requests pages"], *, max_seq_len: int
) -> MLACommonMetadata:
    """What the first generation captured a decode graph of ``batch`` requests with.

    Every sequence is padding: length 1, slot -1, so that a run writes no cache.
    """
    ones = np.ones(batch, np.int32)
    starts = np.arange(batch + 1, dtype=np.int32)
    return MLACommonMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=batch,
        use_cuda_graph=True,
        slot_mapping=np.full(batch, PAD_SLOT, np.int32),
        seq_lens=(1,) * batch,
        seq_lens_tensor=ones,
        context_lens_tensor=ones - 1,
        block_tables=block_tables[:batch],
        query_start_loc=starts,
        seq_start_loc=starts,
        max_query_len=1,
        max_decode_query_len=1,
        max_prefill_seq_len=0,
        max_decode_seq_len=max_seq_len,
        context_chunks=None,
    )


def to_decodes_first(
    meta: MLACommonMetadata,
) -> tuple[HostBatch, Int[np.ndarray, "requests pages"], BatchOrder]:
    """``(host facts, page table, order)`` of the same step with decodes first, graph slots gone.

    ``order.inverse()`` brings results of the step back to the order of ``meta``. The table is that
    of ``meta``: rows of prompts that see only themselves are empty, and with blocks of a sliding
    window a row has the last pages only. Slots do not follow from such a row; they are
    ``order.per_token`` of ``meta.slot_mapping``.
    """
    order = decodes_first(meta.query_start_loc, meta.num_prefills)
    real = len(order.requests)
    host = HostBatch.of(
        np.diff(order.query_start_loc), order.per_request(meta.seq_lens_tensor[:real])
    )
    return host, order.per_request(meta.block_tables[:real]), order
