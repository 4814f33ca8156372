"""The invariants of what looks like vLLM: importing this teaches ``metadata.check`` about it."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.check import check, check_slots, check_starts, inert_behind, on_host, require
from mla_jax.metadata.common import CommonMetadata
from mla_jax.metadata.compat.chunked_context import ContextSpan, EqualChunks, PackedChunks
from mla_jax.metadata.compat.legacy import MLACommonMetadata
from mla_jax.metadata.compat.local_attention import LocalAttentionBatch
from mla_jax.metadata.mla import ContextMetadata
from mla_jax.types import Int

__all__ = ["check", "check_spans", "context_spans"]


def check_spans(
    chunks: Iterable[Sequence[ContextSpan]], context_lens: Int[np.ndarray, "prefills"], rows: int
) -> None:
    """Every cached row of every prefill in exactly one chunk, in order; no chunk above ``rows``."""
    done = np.zeros(len(context_lens), np.int64)
    for i, spans in enumerate(chunks):
        total = sum(s.length for s in spans)
        if total > rows:
            raise MetadataError(f"rows of chunk {i}", total, f"at most {rows}")
        for s in spans:
            if s.length < 1 or s.start != done[s.request]:
                raise MetadataError(
                    f"chunk {i}, request {s.request}", s, f"to start at {done[s.request]}"
                )
            done[s.request] += s.length
    require("context rows in chunks", done, done == context_lens, "the context length")


def context_spans(c: ContextMetadata) -> list[tuple[ContextSpan, ...]]:
    """What each chunk of the device form covers."""
    chunks = []
    for i in range(int(c.num_chunks())):
        first, keys = on_host(c.chunk(jnp.asarray(i, jnp.int32)))
        lens = np.diff(keys.key_starts).tolist()
        pairs = enumerate(zip(first.tolist(), lens, strict=True))
        chunks.append(tuple(ContextSpan(r, start, n) for r, (start, n) in pairs if n))
    return chunks


@check.register
def _local(given: LocalAttentionBatch, *, common: CommonMetadata, chunk: int, **_) -> None:
    b, c = on_host((given, common))
    check_starts("query_starts", b.query_starts)
    real = int(b.num_virtual)
    require("seq_lens", b.seq_lens, b.seq_lens <= chunk, f"at most a chunk of {chunk}")
    require("query_lens", b.query_lens, b.query_lens <= b.seq_lens, "at most the keys")
    for name in ("query_lens", "seq_lens"):
        require(name, getattr(b, name), inert_behind(real, getattr(b, name)), "0 on padding")
    per_request = np.zeros(len(c.seq_lens), np.int64)
    np.add.at(per_request, b.request[:real], b.query_lens[:real])
    queries = np.diff(c.query_starts)
    require("queries in virtual requests", per_request, per_request == queries, "query_lens")


@check.register
def _equal_chunks(plan: EqualChunks, *, context_lens: np.ndarray, rows: int, **_) -> None:
    check_spans(plan.spans(), context_lens, rows)


@check.register
def _packed_chunks(
    plan: PackedChunks, *, context_lens: np.ndarray, rows: int, ranks: int = 1, **_
) -> None:
    check_spans(plan.spans(), context_lens, rows)
    for i, chunk in enumerate(plan.chunks):
        if chunk.num_local_context_tokens > rows // ranks:
            given = chunk.num_local_context_tokens
            raise MetadataError(f"rows of chunk {i} on a rank", given, f"at most {rows // ranks}")


@check.register
def _legacy(meta: MLACommonMetadata, *, num_slots: int | None = None, **_) -> None:
    check_starts("query_start_loc", meta.query_start_loc)
    check_starts("seq_start_loc", meta.seq_start_loc)
    check_slots(meta.slot_mapping, num_slots)
    tokens = meta.num_prefill_tokens + meta.num_decode_tokens
    if len(meta.slot_mapping) != tokens:
        raise MetadataError("number of slots", len(meta.slot_mapping), tokens)
    if int(meta.query_start_loc[meta.num_prefills]) != meta.num_prefill_tokens:
        given = int(meta.query_start_loc[meta.num_prefills])
        raise MetadataError("end of the prefills", given, meta.num_prefill_tokens)
