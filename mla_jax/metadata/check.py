"""The invariants of all metadata, checked on the host: for tests, for debugging, and for input.

``check(obj, …)`` passes silently or raises a ``MetadataError`` that names field, index, value and
bound. ``check_host`` is the one to run on every step, before anything is launched.
"""

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.chunked_context import ContextSpan, EqualChunks, PackedChunks
from mla_jax.metadata.common import CommonAttentionHost, CommonAttentionMetadata
from mla_jax.metadata.legacy import MLACommonMetadata
from mla_jax.metadata.local_attention import LocalAttentionBatch
from mla_jax.metadata.mla import ContextMetadata, DecodeMetadata, MLAMetadata, PrefillMetadata
from mla_jax.types import PAD_SLOT, Int, cdiv

__all__ = [
    "check",
    "check_host",
    "check_page_table",
    "check_slots",
    "check_spans",
    "check_starts",
    "context_spans",
]


def _host(tree: object) -> Any:
    """The same tree with numpy leaves."""
    return jax.device_get(tree)


def _require(name: str, values: np.ndarray, holds: np.ndarray, bound: object) -> None:
    """Raise for the first entry of ``values`` where ``holds`` is false."""
    if holds.all():
        return
    at = tuple(int(i) for i in np.argwhere(~holds)[0])
    raise MetadataError(f"{name}[{', '.join(map(str, at))}]", int(values[at]), bound)


def _require_int32(name: str, values: np.ndarray) -> None:
    if values.dtype != np.int32:
        raise MetadataError(f"dtype of {name}", values.dtype, "int32")


def check_starts(name: str, starts: np.ndarray) -> None:
    """An exclusive sum: int32, 0 first, never decreasing."""
    _require_int32(name, starts)
    _require(name, starts[:1], starts[:1] == 0, 0)
    falls = np.concatenate([[True], starts[1:] >= starts[:-1]])
    _require(name, starts, falls, "not below the entry before it")


def check_slots(slots: Int[np.ndarray, "tokens"], num_slots: int | None = None) -> None:
    """At least ``PAD_SLOT``, inside the cache, and no two writers of one row."""
    _require("slots", slots, slots >= PAD_SLOT, f"at least {PAD_SLOT}")
    if num_slots is not None:
        _require("slots", slots, slots < num_slots, f"below {num_slots} rows of the cache")
    order = np.argsort(slots, kind="stable")
    twice = np.zeros(len(slots), bool)
    twice[order[1:]] = (slots[order[1:]] == slots[order[:-1]]) & (slots[order[1:]] >= 0)
    _require("slots", slots, ~twice, "written by one token only")


def check_page_table(
    table: Int[np.ndarray, "requests pages"],
    seq_lens: Int[np.ndarray, "requests"],
    *,
    page: int,
    num_pages: int | None = None,
) -> None:
    """Wide enough for every length, every entry a page of the cache."""
    width = table.shape[1]
    _require("seq_lens", seq_lens, seq_lens <= width * page, f"at most {width} pages of {page}")
    top = np.iinfo(np.int32).max if num_pages is None else num_pages
    _require("page_table", table, (table >= 0) & (table < top), f"0 to {top - 1}")


def check_host(
    host: CommonAttentionHost,
    *,
    bucket: CommonBucket,
    page: int,
    page_table: np.ndarray | None = None,
    num_pages: int | None = None,
) -> None:
    """Refuse a step that no program of this bucket can run; host arrays only, nothing launched."""
    bucket.check_holds(
        requests=host.num_reqs, tokens=host.num_actual_tokens, pages=cdiv(host.max_seq_len, page)
    )
    starts, lens = host.query_start_loc_cpu, host.seq_lens_cpu_upper_bound
    if len(starts) != len(lens) + 1:
        raise MetadataError("query_start_loc_cpu", f"{len(starts)} entries", len(lens) + 1)
    check_starts("query_start_loc_cpu", starts)
    _require_int32("seq_lens_cpu_upper_bound", lens)
    queries = np.diff(starts)
    _require("seq_lens_cpu_upper_bound", lens, lens >= queries, "at least the query length")
    _require("seq_lens_cpu_upper_bound", lens, lens <= host.max_seq_len, host.max_seq_len)
    _require("query_lens", queries, queries <= host.max_query_len, host.max_query_len)
    _require("seq_lens_cpu_upper_bound", lens, _inert_behind(host.num_reqs, lens), "0 on padding")
    _require("query_lens", queries, _inert_behind(host.num_reqs, queries), "0 on padding")
    if int(starts[-1]) > host.num_actual_tokens:
        raise MetadataError("num_actual_tokens", host.num_actual_tokens, f"at least {starts[-1]}")
    if (exact := host.seq_lens_cpu) is not None:
        _require("seq_lens_cpu", exact, (exact >= queries) & (exact <= lens), "query_len to bound")
    if page_table is not None:
        _require_int32("page_table", page_table)
        check_page_table(page_table, lens[: len(page_table)], page=page, num_pages=num_pages)


def _inert_behind(real: int, values: np.ndarray) -> np.ndarray:
    """True where an entry is real or 0."""
    return (np.arange(len(values)) < real) | (values == 0)


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
    _require("context rows in chunks", done, done == context_lens, "the context length")


@singledispatch
def check(obj: object, **_) -> None:
    """Check any metadata object of this package; keyword facts depend on its kind.

    Raises:
        MetadataError: an invariant does not hold.
    """
    raise TypeError(f"no invariants are known for {type(obj).__name__}")


@check.register
def _common(
    common: CommonAttentionMetadata, *, page: int, num_pages: int | None = None, **_
) -> None:
    c = _host(common)
    check_starts("query_start_loc", c.query_start_loc)
    queries, real = np.diff(c.query_start_loc), int(c.num_reqs)
    _require("seq_lens", c.seq_lens, c.seq_lens >= queries, "at least the query length")
    for name, values in (("query_lens", queries), ("seq_lens", c.seq_lens)):
        _require(name, values, _inert_behind(real, values), "0 on padding")
    table = c.block_table_tensor
    rows = np.broadcast_to(np.arange(len(table))[:, None] < real, table.shape)
    _require("block_table_tensor", table, rows | (table == 0), "0 on padding")
    check_page_table(table, c.seq_lens, page=page, num_pages=num_pages)
    check_slots(c.slot_mapping, None if num_pages is None else num_pages * page)
    token = np.arange(c.bucket.tokens) < int(c.query_start_loc[-1])
    _require("slot_mapping", c.slot_mapping, token | (c.slot_mapping == PAD_SLOT), PAD_SLOT)
    _require("positions", c.positions, token | (c.positions == 0), "0 on padding")


@check.register
def _decode(given: DecodeMetadata, *, page: int, num_pages: int | None = None, **_) -> None:
    d = _host(given)
    check_starts("decode.query_starts", d.query_starts)
    queries = np.diff(d.query_starts)
    _require("decode.query_lens", queries, queries <= d.max_query_len, d.max_query_len)
    _require("decode.seq_lens", d.seq_lens, d.seq_lens >= queries, "at least the query length")
    check_page_table(d.page_table, d.seq_lens, page=page, num_pages=num_pages)


@check.register
def _prefill(given: PrefillMetadata, **_) -> None:
    p = _host(given)
    check_starts("prefill.query_starts", p.query_starts)
    check_starts("prefill.key_starts", p.key_starts)


@check.register
def _context(c: ContextMetadata, **_) -> None:
    check_starts("context_starts", np.asarray(c.context_starts))
    check_spans(context_spans(c), np.diff(np.asarray(c.context_starts)), c.rows)


def context_spans(c: ContextMetadata) -> list[tuple[ContextSpan, ...]]:
    """What each chunk of the device form covers."""
    chunks = []
    for i in range(int(c.num_chunks())):
        first, keys = _host(c.chunk(jnp.asarray(i, jnp.int32)))
        lens = np.diff(keys.key_starts).tolist()
        pairs = enumerate(zip(first.tolist(), lens, strict=True))
        chunks.append(tuple(ContextSpan(r, start, n) for r, (start, n) in pairs if n))
    return chunks


@check.register
def _mla(m: MLAMetadata, *, page: int, num_pages: int | None = None, **_) -> None:
    slots, real, positions = _host((m.slots, m.real, m.positions))
    check_slots(slots, None if num_pages is None else num_pages * page)
    _require("slots", slots, real | (slots == PAD_SLOT), f"{PAD_SLOT} on padding")
    _require("positions", positions, real | (positions == 0), "0 on padding")
    for part in (m.decode, m.prefill, m.context):
        if part is not None:
            check(part, page=page, num_pages=num_pages)


@check.register
def _local(given: LocalAttentionBatch, *, common: CommonAttentionMetadata, chunk: int, **_) -> None:
    b, c = _host((given, common))
    check_starts("query_starts", b.query_starts)
    real = int(b.num_virtual)
    _require("seq_lens", b.seq_lens, b.seq_lens <= chunk, f"at most a chunk of {chunk}")
    _require("query_lens", b.query_lens, b.query_lens <= b.seq_lens, "at most the keys")
    for name in ("query_lens", "seq_lens"):
        _require(name, getattr(b, name), _inert_behind(real, getattr(b, name)), "0 on padding")
    per_request = np.zeros(len(c.seq_lens), np.int64)
    np.add.at(per_request, b.request[:real], b.query_lens[:real])
    queries = np.diff(c.query_start_loc)
    _require("queries in virtual requests", per_request, per_request == queries, "query_lens")


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
