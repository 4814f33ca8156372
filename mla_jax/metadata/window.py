"""Sliding windows: which raw tokens a query sees, in cache rows and in a prefill workspace."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.common import slot_mapping, token_positions, token_to_request
from mla_jax.types import PAD_SLOT, Array, Bool, Int, cdiv, round_up

__all__ = [
    "NO_CHUNK",
    "WindowChunk",
    "WindowLimits",
    "combine_topk_swa_indices",
    "compute_prefill_gather_lens",
    "gather_lens_of",
    "plan_window_chunks",
    "sliding_window_indices",
    "window_plans",
]


def sliding_window_indices(
    page_table: Int[Array, "requests pages"],
    request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    is_valid_token: Bool[Array, "tokens"],
    *,
    window: int,
    page: int,
) -> tuple[Int[Array, "tokens window"], Int[Array, "tokens"]]:
    """Cache rows of the last ``window`` positions up to the token itself, oldest first.

    ``len = min(p + 1, window)``; a token that is not valid sees nothing: all -1, length 0.
    """
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
    limits = WindowLimits(window, chunk_requests, max_model_len, max_batched_tokens)
    keys = seq_lens.tolist()
    tails = gather_lens_of(query_lens.tolist(), keys, window)
    (chunks,) = window_plans(keys, tails, [(ratio, limits.rows(ratio))])
    return [WindowChunk(*c) for c in chunks]


class WindowLimits(NamedTuple):
    """What the workspace of a chunk is made for."""

    window: int
    chunk_requests: int
    max_model_len: int
    max_batched_tokens: int

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
) -> list[list[tuple[int, int, int, int]]]:
    """``plan_window_chunks`` of host integers for each ratio and the rows of its workspace.

    ``tails`` are the rows gathered of each request.
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
            plans.append([(0, n, states, states + tail)])
        elif ratio > 1:
            plans.append(_greedy_chunks(seq_lens, tails, ratio, rows, sure))
        else:
            plans.append(_greedy_chunks([0] * n, tails, 1, rows, sure))
    return plans


def _greedy_chunks(
    seq_lens: list[int], tails: list[int], ratio: int, rows: int, sure: int
) -> list[tuple[int, int, int, int]]:
    """Chunks of at least ``sure`` requests, each as long as the next request fits too."""
    n = len(tails)
    chunks = []
    start = 0
    while start < n:
        stop = min(start + sure, n)
        longest, tail = max(seq_lens[start:stop]), max(tails[start:stop])
        while stop < n:
            keys = seq_lens[stop] if seq_lens[stop] > longest else longest
            rest = tails[stop] if tails[stop] > tail else tail
            if (stop + 1 - start) * (keys // ratio + rest) > rows:
                break
            longest, tail, stop = keys, rest, stop + 1
        chunks.append((start, stop, longest // ratio, longest // ratio + tail))
        start = stop
    return chunks


def combine_topk_swa_indices(
    topk_indices: Int[Array, "tokens keys"],
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    gather_lens: Int[Array, "requests"],
    stride: Int[Array, ""],
    compressed: Int[Array, ""],
    *,
    topk: int,
    ratio: int,
    window: int,
) -> tuple[Int[Array, "tokens row"], Int[Array, "tokens"]]:
    """Workspace rows of a chunk's queries: selected states, then the window; -1 behind.

    Request ``g`` of the chunk owns rows from ``stride * g``: ``compressed`` states, then
    positions ``seq_len - gather_len …``. Of a token at ``p`` the first
    ``min((p + 1) // ratio, topk)`` entries of its list count. ``query_starts`` may start above 0;
    padded requests have length 0. The row width is ``round_up(topk + window, 128)``.
    """
    tokens = topk_indices.shape[0]
    starts = query_starts - query_starts[0]
    g, real = token_to_request(starts, tokens)
    p = token_positions(starts, seq_lens, g, real)
    selected = jnp.where(real, jnp.clip((p + 1) // ratio, 0, topk), 0)[:, None]
    seen = jnp.where(real, jnp.clip(p + 1, 0, window), 0)[:, None]
    base = (stride * g)[:, None]
    tail = (p + 1)[:, None] - seen - (seq_lens - gather_lens)[g][:, None]

    column = jnp.arange(round_up(topk + window, 128), dtype=jnp.int32)
    behind = column - selected
    width = topk_indices.shape[1]
    padded = jnp.pad(topk_indices, ((0, 0), (0, max(column.size - width, 0))))
    chosen = base + padded[:, : column.size]
    window_rows = base + compressed + tail + behind
    row = jnp.where(column < selected, chosen, window_rows)
    lens = selected + seen
    return jnp.where(column < lens, row, PAD_SLOT), lens[:, 0]
