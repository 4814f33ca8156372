"""The invariants of all metadata, checked on the host: for tests, for debugging, and for input.

``check(obj, …)`` passes silently or raises a ``MetadataError`` that names field, index, value and
bound. ``check_host`` needs host arrays only; ``HostBatch.of`` refuses bad lengths by itself.
"""

from collections.abc import Mapping
from functools import singledispatch
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import INT32_MAX, CommonMetadata, GroupSpec, HostBatch
from mla_jax.metadata.indexer import IndexerMetadata
from mla_jax.metadata.indexer_chunks import NO_CHUNK
from mla_jax.metadata.mla import ContextMetadata, DecodeMetadata, MLAMetadata, PrefillMetadata
from mla_jax.metadata.window import WindowMetadata
from mla_jax.types import PAD_SLOT, Int

__all__ = [
    "check",
    "check_host",
    "check_page_table",
    "check_slots",
    "check_starts",
]


def on_host(tree: object) -> Any:
    """The same tree with numpy leaves."""
    return jax.device_get(tree)


def require(name: str, values: np.ndarray, holds: np.ndarray, bound: object) -> None:
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
    require(name, starts[:1], starts[:1] == 0, 0)
    falls = np.concatenate([[True], starts[1:] >= starts[:-1]])
    require(name, starts, falls, "not below the entry before it")


def check_slots(slots: Int[np.ndarray, "tokens"], num_slots: int | None = None) -> None:
    """At least ``PAD_SLOT``, inside the cache, and no two writers of one row."""
    require("slots", slots, slots >= PAD_SLOT, f"at least {PAD_SLOT}")
    if num_slots is not None:
        require("slots", slots, slots < num_slots, f"below {num_slots} rows of the cache")
    order = np.argsort(slots, kind="stable")
    twice = np.zeros(len(slots), bool)
    twice[order[1:]] = (slots[order[1:]] == slots[order[:-1]]) & (slots[order[1:]] >= 0)
    require("slots", slots, ~twice, "written by one token only")


def check_page_table(
    table: Int[np.ndarray, "requests pages"],
    seq_lens: Int[np.ndarray, "requests"],
    *,
    group: GroupSpec,
    num_pages: int | None = None,
) -> None:
    """Wide enough for every length, every entry a page of the cache."""
    width, name = table.shape[1], f"page_table of {group.name}"
    fits = seq_lens <= width * group.tokens
    require("seq_lens", seq_lens, fits, f"at most {width} pages of {group.tokens}")
    top = INT32_MAX if num_pages is None else num_pages
    require(name, table, (table >= 0) & (table < top), f"0 to {top - 1}")


def check_host(
    host: HostBatch,
    *,
    bucket: CommonBucket,
    groups: tuple[GroupSpec, ...],
    page_tables: Mapping[str, np.ndarray] = MappingProxyType({}),
    num_pages: int | None = None,
) -> None:
    """Refuse a step that no program of this bucket can run; host arrays only, nothing launched.

    Vectorised: 17 to 30 µs of a CPU for 128 to 512 requests with their page tables.
    """
    widths = tuple(g.pages_of(host.max_seq_len) for g in groups)
    bucket.check_holds(requests=host.num_requests, tokens=host.num_tokens, pages=widths)
    starts, lens = host.query_starts, host.seq_lens
    if len(starts) != len(lens) + 1:
        raise MetadataError("query_starts", f"{len(starts)} entries", len(lens) + 1)
    check_starts("query_starts", starts)
    _require_int32("seq_lens", lens)
    queries = np.diff(starts)
    require("seq_lens", lens, lens >= queries, "at least the query length")
    require("seq_lens", lens, lens <= host.max_seq_len, host.max_seq_len)
    require("query_lens", queries, queries <= host.max_query_len, host.max_query_len)
    require("seq_lens", lens, inert_behind(host.num_requests, lens), "0 on padding")
    require("query_lens", queries, inert_behind(host.num_requests, queries), "0 on padding")
    if int(starts[-1]) > host.num_tokens:
        raise MetadataError("num_tokens", host.num_tokens, f"at least {starts[-1]}")
    for group in groups if page_tables else ():
        table = page_tables[group.name]
        _require_int32(f"page_table of {group.name}", table)
        both = table[: len(lens)], lens[: len(table)]
        check_page_table(*both, group=group, num_pages=num_pages)


def inert_behind(real: int, values: np.ndarray) -> np.ndarray:
    """True where an entry is real or 0."""
    return (np.arange(len(values)) < real) | (values == 0)


@singledispatch
def check(obj: object, **_) -> None:
    """Check any metadata object of this package; keyword facts depend on its kind.

    Raises:
        MetadataError: an invariant does not hold, or none is known for this kind of object.
    """
    known = sorted(kind.__name__ for kind in check.registry if kind is not object)
    raise MetadataError("check: object", type(obj).__name__, f"one of {', '.join(known)}")


@check.register
def _common(common: CommonMetadata, *, num_pages: int | None = None, **_) -> None:
    c = on_host(common)
    check_starts("query_starts", c.query_starts)
    queries, real = np.diff(c.query_starts), int(c.num_requests)
    require("seq_lens", c.seq_lens, c.seq_lens >= queries, "at least the query length")
    for name, values in (("query_lens", queries), ("seq_lens", c.seq_lens)):
        require(name, values, inert_behind(real, values), "0 on padding")
    token = np.arange(c.bucket.tokens) < int(c.query_starts[-1])
    require("real", c.real, c.real == token, "whether a request has the token")
    for name, values in (("positions", c.positions), ("requests", c.requests)):
        require(name, values, token | (values == 0), "0 on padding")
    for group in c.groups:
        table, slots = c.page_tables[group.name], c.slots[group.name]
        rows = np.broadcast_to(np.arange(len(table))[:, None] < real, table.shape)
        require(f"page_table of {group.name}", table, rows | (table == 0), "0 on padding")
        check_page_table(table, c.seq_lens, group=group, num_pages=num_pages)
        check_slots(slots, None if num_pages is None else num_pages * group.page)
        require("slots", slots, token | (slots == PAD_SLOT), f"{PAD_SLOT} on padding")


@check.register
def _decode(given: DecodeMetadata, *, page: int, num_pages: int | None = None, **_) -> None:
    d = on_host(given)
    check_starts("decode.query_starts", d.query_starts)
    queries = np.diff(d.query_starts)
    require("decode.query_lens", queries, queries <= d.max_query_len, d.max_query_len)
    require("decode.seq_lens", d.seq_lens, d.seq_lens >= queries, "at least the query length")
    group = GroupSpec("decodes", page)
    check_page_table(d.page_table, d.seq_lens, group=group, num_pages=num_pages)


@check.register
def _prefill(given: PrefillMetadata, **_) -> None:
    p = on_host(given)
    check_starts("prefill.query_starts", p.query_starts)
    check_starts("prefill.key_starts", p.key_starts)


@check.register
def _context(given: ContextMetadata, **_) -> None:
    """Every cached row of every prefill in exactly one chunk, in order; none above ``rows``."""
    starts = np.asarray(given.context_starts)
    check_starts("context_starts", starts)
    lens = np.diff(starts)
    done = np.zeros(len(lens), np.int64)
    for i in range(int(given.num_chunks())):
        first, keys = on_host(given.chunk(jnp.asarray(i, jnp.int32)))
        rows = np.diff(keys.key_starts)
        if rows.sum() > given.rows:
            raise MetadataError(f"rows of chunk {i}", int(rows.sum()), f"at most {given.rows}")
        require(f"first row in chunk {i}", first, (rows == 0) | (first == done), "those before")
        done += rows
    require("context rows in chunks", done, done == lens, "the context length")


@check.register
def _mla(m: MLAMetadata, *, page: int, num_pages: int | None = None, **_) -> None:
    slots, real, positions = on_host((m.slots, m.real, m.positions))
    check_slots(slots, None if num_pages is None else num_pages * page)
    require("slots", slots, real | (slots == PAD_SLOT), f"{PAD_SLOT} on padding")
    require("positions", positions, real | (positions == 0), "0 on padding")
    for part in (m.decode, m.prefill, m.context):
        if part is not None:
            check(part, page=page, num_pages=num_pages)


@check.register
def _indexer(given: IndexerMetadata, **_) -> None:
    m = on_host(given)
    _check_counts(m.counts, m.bucket.decode_rows, m.bucket.chunk_requests)
    check_slots(m.slots)
    if (d := m.decode) is not None:
        held = (d.token_index >= 0).sum(axis=1)
        require("token_index", held, held == d.decode_lens, "decode_lens entries")
    if m.prefill is not None:
        chunks = int(m.counts[4])
        behind = np.arange(len(m.prefill.plan)) >= chunks
        none = (m.prefill.plan == np.asarray(NO_CHUNK)).all(axis=1)
        require("chunk behind the last", m.prefill.plan[:, 1], ~behind | none, "no requests")
        _check_ranges("chunk", m.prefill.plan[:chunks, :4], m.counts)


def _check_counts(counts: np.ndarray, decodes: int, prefills: int) -> None:
    require("counts", counts, counts >= 0, "0 or more")
    require("decodes, prefills", counts[:2], counts[:2] <= [decodes, prefills], "the bucket's")


def _check_ranges(name: str, plan: np.ndarray, counts: np.ndarray) -> None:
    """Request ranges in order, none of them empty, within decodes and prefills."""
    first, last = counts[0], counts[0] + counts[1]
    start, stop = plan[:, 0], plan[:, 1]
    require(f"start of {name}", start, (start >= first) & (start < stop), "below its stop")
    require(f"stop of {name}", stop, stop <= last, f"at most {last}")
    if plan.shape[1] > 2:
        low, high = plan[:, 2], plan[:, 3]
        require(f"queries of {name}", low, low < high, "below their stop")


@check.register
def _windows(given: WindowMetadata, **_) -> None:
    m = on_host(given)
    _check_counts(m.counts, m.bucket.decode_tokens, m.bucket.prefills)
    for name in ("decode", "prefill"):
        indices, lens = getattr(m, f"{name}_indices"), getattr(m, f"{name}_lens")
        seen = (indices >= 0).sum(axis=1)
        require(f"{name}_indices", seen, seen == lens, "as many rows as the length says")
    for name, plan, count in zip(m.layer_types, m.chunks, m.counts[4:], strict=True):
        none = (plan == 0).all(axis=1)
        behind = np.arange(len(plan)) >= count
        require(f"{name} chunk behind the last", plan[:, 1], ~behind | none, "no requests")
        start, stop = plan[:count, 0], plan[:count, 1]
        prefills = int(m.counts[1])
        if count and int(stop[-1]) != prefills:
            raise MetadataError(f"requests in {name} chunks", int(stop[-1]), prefills)
        follows = start == np.concatenate([[0], stop[:-1]])
        require(f"start of {name} chunk", start, follows, "the end of the one before")
