"""Sliding windows: which raw tokens a query sees, in cache rows and in a prefill workspace.

Every layer of DeepSeek V4 sees a window of raw tokens; layers of ratio 4 (C4A) add selected
compressed states, layers of ratio 128 (C128A) all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import ConfigError
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, check_sizes, slot_mapping
from mla_jax.metadata.packed import counts_and_rows
from mla_jax.metadata.sparse import c128a_width
from mla_jax.metadata.split import DecodePrefillSplit, SplitCounts
from mla_jax.types import Array, Bool, Int, cdiv, made

__all__ = [
    "NO_CHUNK",
    "RATIOS",
    "WindowBucket",
    "WindowChunk",
    "WindowDecision",
    "WindowLimits",
    "WindowMetadata",
    "Windows",
    "compute_prefill_gather_lens",
    "gather_lens_of",
    "layer_type",
    "plan_window_chunks",
    "ratios_of",
    "sliding_window_indices",
    "window_plans",
]


def sliding_window_indices(
    page_table: Int[Array, "requests pages"], request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"], is_valid_token: Bool[Array, "tokens"], *, window: int,
    page: int,
) -> tuple[Int[Array, "tokens window"], Int[Array, "tokens"]]:  # fmt: skip
    """Cache rows of the last ``window`` positions up to the token itself, oldest first.

    ``len = min(p + 1, window)``; a token that is not valid sees nothing: all -1, length 0.
    """
    check_sizes(window=window)
    lens = jnp.where(is_valid_token, jnp.clip(positions + 1, 0, window), 0)
    column = jnp.arange(window, dtype=jnp.int32)
    seen = column < lens[:, None]
    slots = slot_mapping(
        page_table,
        jnp.broadcast_to(request[:, None], seen.shape).reshape(-1),
        ((positions + 1 - lens)[:, None] + column).reshape(-1),
        seen.reshape(-1),
        page=page,
    )
    return slots.reshape(seen.shape), lens


def compute_prefill_gather_lens[A: (Array, np.ndarray)](
    query_lens: A, seq_lens: A, *, window: int
) -> A:
    """Trailing positions of a request that its queries may see.

    ``query_len + clip(seq_len - query_len, 0, window - 1)``.
    """
    return query_lens + (seq_lens - query_lens).clip(0, window - 1)


class WindowChunk(NamedTuple):
    """Prefills ``[start, stop)`` gathered together, one workspace row range per request.

    A request's range is ``stride`` long: ``compressed`` states, then its window's tail.
    """

    start: int
    stop: int
    compressed: int
    stride: int


NO_CHUNK = WindowChunk(0, 0, 0, 0)
"""A padding chunk: no prefills."""


def plan_window_chunks(
    query_lens: Int[np.ndarray, "requests"],
    seq_lens: Int[np.ndarray, "requests"],
    *,
    ratio: int,
    window: int,
    chunk_requests: int,
    max_model_len: int,
    max_batched_tokens: int,
) -> list[WindowChunk]:
    """Greedy groups of prefills that fit a workspace of ``chunk_requests`` of the largest ones.

    Rows: ``chunk_requests * (ceil(max_model_len / ratio) + window + max_batched_tokens)``,
    without the first term for ``ratio <= 1`` (no compressed states). A prefill that fits no
    workspace stands alone.
    """
    limits = WindowLimits(window, chunk_requests, max_model_len, max_batched_tokens).check()
    keys = seq_lens.tolist()
    tails = gather_lens_of(query_lens.tolist(), keys, window)
    (chunks,) = window_plans(keys, tails, [(ratio, limits.rows(ratio))])
    return [WindowChunk(*c) for c in batched(chunks, len(NO_CHUNK))]


class WindowLimits(NamedTuple):
    """What the workspace of a chunk is made for."""

    window: int
    chunk_requests: int
    max_model_len: int
    max_batched_tokens: int

    def check(self) -> "WindowLimits":
        """Refuse limits below 1."""
        check_sizes(**self._asdict())
        return self

    def rows(self, ratio: int) -> int:
        """Rows of the workspace of layers of this ratio; up to 1 there are no states."""
        states = cdiv(self.max_model_len, ratio) if ratio > 1 else 0
        return self.chunk_requests * (states + self.window + self.max_batched_tokens)


def gather_lens_of(query_lens: list[int], seq_lens: list[int], window: int) -> list[int]:
    """``compute_prefill_gather_lens`` of host integers."""
    most = window - 1
    return [
        q + most if k - q > most else k if k > q else q
        for q, k in zip(query_lens, seq_lens, strict=True)
    ]


def window_plans(
    seq_lens: list[int], tails: list[int], workspaces: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """``plan_window_chunks`` of host integers for each ratio and the rows of its workspace.

    The chunks of a plan lie end to end. ``tails`` are the rows gathered of each request.
    """
    n = len(tails)
    if not n:
        return [[] for _ in workspaces]
    longest, tail = max(seq_lens), max(tails)
    plans = []
    for ratio, rows in workspaces:
        states = longest // ratio if ratio > 1 else 0
        sure = max(rows // max(states + tail, 1), 1)  # so many fit, whichever
        if n <= sure:
            plans.append([0, n, states, states + tail])
        elif ratio > 1:
            plans.append(_greedy_chunks(seq_lens, tails, ratio, rows))
        else:
            plans.append(_greedy_chunks([0] * n, tails, 1, rows))
    return plans


def _greedy_chunks(seq_lens: list[int], tails: list[int], ratio: int, rows: int) -> list[int]:
    """Chunks of consecutive requests, end to end, each as long as the next request fits too.

    A request longer than those before it in the chunk widens the chunk's ranges; until one does,
    the chunk has room for requests below ``end``, and nothing is computed.
    """
    chunks: list[int] = []
    start = end = longest = tail = 0
    for i, keys in enumerate(seq_lens):
        rest = tails[i]  # not by ``zip``: that takes a quarter longer
        if keys <= longest and rest <= tail and i < end:
            continue
        if keys < longest:
            keys = longest
        if rest < tail:
            rest = tail
        if i > start and (i + 1 - start) * (keys // ratio + rest) > rows:
            states = longest // ratio
            chunks += start, i, states, states + tail
            start, keys, rest = i, seq_lens[i], tails[i]
        longest, tail = keys, rest
        end = start + rows // (longest // ratio + tail or 1)
    states = longest // ratio
    chunks += start, len(tails), states, states + tail
    return chunks


RATIOS = {"swaonly": 1, "c4a": 4, "c128a": 128}
"""Tokens per compressed state of each layer type; ``swaonly`` has no states."""


def ratios_of(overlapping: int, disjoint: int) -> dict[str, int]:
    """Tokens of a compressed state in each layer type, of a model with these two ratios."""
    return RATIOS | {"c4a": overlapping, "c128a": disjoint}


def layer_type(compress_ratio: int, ratios: Mapping[str, int] = RATIOS) -> str:
    """``swaonly``, ``c4a`` (states overlap and are selected) or ``c128a`` (all are seen)."""
    for name, ratio in ratios.items():
        if compress_ratio == ratio or (compress_ratio, ratio) == (0, 1):
            return name
    known = [str(ratio) for ratio in ratios.values()]
    allowed = f"0, {', '.join(known[:-1])} or {known[-1]}"
    raise ConfigError("compress_ratio of a layer", compress_ratio, allowed)


@dataclass(frozen=True, order=True, kw_only=True)
class WindowBucket:
    """Static half of one step of sliding-window metadata."""

    decode_tokens: int  # 0 iff no decodes
    prefills: int  # prefill requests; 0 iff prefill_tokens is 0
    prefill_tokens: int
    chunks: int  # workspace chunks of the prefills
    c128a_width: int  # columns of a C128A list; 0 = no such layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WindowDecision:
    """What the host decides: bucket, counts and the workspace chunks of each layer type."""

    bucket: WindowBucket = field(metadata={"static": True})
    counts: Int[Array | np.ndarray, "counts"]  # decodes, prefills, their tokens; chunks per type
    chunks: Int[Array | np.ndarray, "types chunks 4"]  # a WindowChunk per row, then zeros

    @classmethod
    def nothing(cls, bucket: WindowBucket, types: int) -> "WindowDecision":
        """The bucket with nothing in it."""
        counts, chunks = counts_and_rows((0,) * (4 + types), [[]] * types, bucket.chunks, NO_CHUNK)
        return cls(bucket=bucket, counts=counts, chunks=chunks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WindowMetadata(SplitCounts):
    """One step. Indices address the window's cache."""

    bucket: WindowBucket = field(metadata={"static": True})
    layer_types: tuple[str, ...] = field(metadata={"static": True})
    workspaces: tuple[int, ...] = field(metadata={"static": True})  # rows, of each layer type
    counts: Int[Array, "counts"]  # those of the split; chunks of each layer type
    has_slot: Bool[Array, "tokens"]  # of the window's cache: what has none sees nothing
    decode_indices: Int[Array, "decode_tokens window"]  # cache rows, oldest first; then -1
    decode_lens: Int[Array, "decode_tokens"]
    prefill_indices: Int[Array, "prefill_tokens window"]  # row i is token num_decode_tokens + i
    prefill_lens: Int[Array, "prefill_tokens"]
    prefill_seq_lens: Int[Array, "prefills"] | None  # None iff the bucket has no prefills
    prefill_gather_lens: Int[Array, "prefills"] | None  # trailing rows to gather; None likewise
    chunks: Int[Array, "types chunks 4"]  # of each layer type; requests from 0

    def chunks_of(self, name: str) -> tuple[Int[Array, "chunks 4"], Int[Array, ""]]:
        """Workspace chunks of a layer type, a ``WindowChunk`` per row, and how many there are."""
        at = self.layer_types.index(name)
        return self.chunks[at], self.counts[4 + at]

    def workspace(self, name: str) -> int:
        """Rows that hold any chunk of a layer type."""
        return self.workspaces[self.layer_types.index(name)]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Plans and builds ``WindowMetadata`` in a bucket that the caller chooses."""

    group: GroupSpec  # of the raw tokens
    window: int
    compress_ratios: tuple[int, ...]  # one per layer
    max_model_len: int
    max_batched_tokens: int
    chunk_requests: int = 4  # prefills of the longest kind that the workspace holds
    overlapping: int = RATIOS["c4a"]
    disjoint: int = RATIOS["c128a"]

    def __post_init__(self):
        self.limits.check()
        for ratio in self.compress_ratios:
            layer_type(ratio, self.ratios)

    @cached_property
    def ratios(self) -> dict[str, int]:
        """Tokens per compressed state of each layer type."""
        return ratios_of(self.overlapping, self.disjoint)

    @property
    def limits(self) -> WindowLimits:
        """What the workspace of a chunk is made for."""
        return WindowLimits(
            self.window, self.chunk_requests, self.max_model_len, self.max_batched_tokens
        )

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """Types present, in the order of ``RATIOS``."""
        present = {layer_type(r, self.ratios) for r in self.compress_ratios} or {"swaonly"}
        return tuple(name for name in RATIOS if name in present)

    @cached_property
    def _workspaces(self) -> list[tuple[int, int]]:
        """Ratio and workspace rows of each layer type."""
        ratios = (self.ratios[name] for name in self.layer_types)
        return [(ratio, self.limits.rows(ratio)) for ratio in ratios]

    def c128a_width(self, max_seq_len: int) -> int:
        """Columns of a C128A list for requests up to this length; 0 without such layers."""
        if "c128a" not in self.layer_types:
            return 0
        return c128a_width(max_seq_len, self.max_model_len, ratio=self.disjoint)

    def bucket(
        self, *, decodes: int, prefills: int, prefill_tokens: int, max_seq_len: int
    ) -> WindowBucket:
        """What any step of these sizes needs.

        Every chunk but the last holds ``chunk_requests`` prefills or more.
        """
        return WindowBucket(
            decode_tokens=decodes,
            prefills=prefills,
            prefill_tokens=prefill_tokens,
            chunks=cdiv(prefills, self.chunk_requests),
            c128a_width=self.c128a_width(max_seq_len),
        )

    def workspaces(self, bucket: WindowBucket, longest: int) -> tuple[int, ...]:
        """Rows of each layer type that hold any chunk of such a step."""
        tail = bucket.prefill_tokens + self.window - 1
        return tuple(
            min(rows, bucket.prefills * ((longest // ratio if ratio > 1 else 0) + tail))
            for ratio, rows in self._workspaces
        )

    def plans(self, host: HostBatch, decodes: int) -> list[list[int]]:
        """``WindowChunk``s of the requests behind the decodes, end to end, for each layer type."""
        queries, keys = host.lens_from(decodes)
        return window_plans(keys, gather_lens_of(queries, keys, self.window), self._workspaces)

    def decide(
        self, host: HostBatch, bucket: WindowBucket, split: DecodePrefillSplit
    ) -> WindowDecision:
        """The step in a bucket that holds it."""
        return self.filled(bucket, split, self.plans(host, split.num_decodes))

    def filled(
        self, bucket: WindowBucket, split: DecodePrefillSplit, plans: list[list[int]]
    ) -> WindowDecision:
        """The decision of these parts."""
        given = *split, *[len(plan) // len(NO_CHUNK) for plan in plans]
        counts, chunks = counts_and_rows(given, plans, bucket.chunks, NO_CHUNK)
        return made(WindowDecision, bucket=bucket, counts=counts, chunks=chunks)

    def build(self, common: CommonMetadata, decision: WindowDecision) -> WindowMetadata:
        """Device half, over the table and slots of ``group`` in ``common``."""
        bucket, counts = decision.bucket, jnp.asarray(decision.counts)
        decodes, prefills, decode_tokens, prefill_tokens = (counts[i] for i in range(4))
        has_slot = common.slots[self.group.name] >= 0
        tokens = has_slot.shape[0]

        def windows(size, first, count):
            """Those of tokens ``[first, first + count)``."""
            lane = jnp.arange(size, dtype=jnp.int32)
            here = (lane < count) & (first + lane < tokens)
            token = jnp.where(here, first + lane, 0)
            return sliding_window_indices(
                common.page_tables[self.group.name],
                common.requests[token],
                common.positions[token],
                here & has_slot[token],
                window=self.window,
                page=self.group.page,
            )

        decode_indices, decode_lens = windows(bucket.decode_tokens, jnp.int32(0), decode_tokens)
        prefill_indices, prefill_lens = windows(
            bucket.prefill_tokens, decode_tokens, prefill_tokens
        )
        prefill_seq_lens, gather_lens = self._prefill_lens(common, decodes, prefills, bucket)
        return WindowMetadata(
            bucket=bucket,
            layer_types=self.layer_types,
            workspaces=self.workspaces(
                bucket, common.page_tables[self.group.name].shape[1] * self.group.tokens
            ),
            counts=counts,
            has_slot=has_slot,
            decode_indices=decode_indices,
            decode_lens=decode_lens,
            prefill_indices=prefill_indices,
            prefill_lens=prefill_lens,
            prefill_seq_lens=prefill_seq_lens,
            prefill_gather_lens=gather_lens,
            chunks=jnp.asarray(decision.chunks),
        )

    def _prefill_lens(self, common: CommonMetadata, decodes, prefills, bucket: WindowBucket):
        """Lengths of the prefills and of their gathered tails; 0 on padding."""
        if not bucket.prefills:
            return None, None
        lane = jnp.arange(bucket.prefills, dtype=jnp.int32)
        here = lane < prefills
        row = jnp.where(here, decodes + lane, 0)
        lens = jnp.where(here, common.seq_lens[row], 0)
        queries = jnp.where(here, common.query_lens[row], 0)
        return lens, compute_prefill_gather_lens(queries, lens, window=self.window)
