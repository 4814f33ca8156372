"""Three regions of an ordered batch, and groups of whole prefills. Host only."""

from itertools import batched
from typing import NamedTuple

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.indexer_chunks import NO_CHUNK, indexer_chunks
from mla_jax.metadata.split import split_decodes_and_prefills
from mla_jax.types import Int

__all__ = [
    "DecodeExtendPrefillSplit",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
]


class DecodeExtendPrefillSplit(NamedTuple):
    """Decodes, then long queries with cached context, then long queries without."""

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int


def split_decodes_prefills_and_extends(
    host: HostBatch,
    seq_lens: Int[np.ndarray, "requests"],
    decode_threshold: int = 1,
) -> DecodeExtendPrefillSplit:
    """Three regions: decodes, then extends, then prefills (``seq_len == query_len``)."""
    decodes, rest, decode_tokens, rest_tokens = split_decodes_and_prefills(host, decode_threshold)
    starts = host.query_starts
    lens = np.diff(starts[: host.num_requests + 1])[decodes:]
    pure = (seq_lens[decodes : host.num_requests] == lens) & (lens > decode_threshold)
    extends = int(np.argmax(pure)) if pure.any() else rest
    extend_tokens = int(starts[decodes + extends]) - decode_tokens
    if extends == rest:
        extend_tokens = rest_tokens
    return DecodeExtendPrefillSplit(
        decodes,
        extends,
        rest - extends,
        decode_tokens,
        extend_tokens,
        rest_tokens - extend_tokens,
    )


def split_prefill_chunks(
    seq_lens: Int[np.ndarray, "requests"], workspace: int, offset: int = 0
) -> list[tuple[int, int]]:
    """Greedy groups ``[start, stop)`` of whole requests with ``sum(seq_lens) <= workspace``.

    ``offset`` is added to every bound: the first prefill's place in the batch.
    """
    lens = seq_lens.tolist()
    for i, length in enumerate(lens):
        if length > workspace:
            raise MetadataError(
                f"seq_lens[{i}]", length, f"at most {workspace}, the rows of the workspace"
            )
    ones, any_number = [1] * len(lens), (workspace + 1) * len(lens)
    chunks = indexer_chunks(lens, ones, workspace=workspace, max_logits=any_number, offset=offset)
    return [(start, stop) for start, stop, *_ in batched(chunks, len(NO_CHUNK))]
