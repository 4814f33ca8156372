"""Selected logical positions to cache slots: top-k lists, all compressed states, compaction.

Selections are request-local positions (of tokens, or of compressed states), -1 = none. Slots are
flat cache rows through the page table of the cache they address.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mla_jax.metadata.common import check_sizes, slot_mapping, token_positions, token_to_request
from mla_jax.types import PAD_SLOT, Array, Bool, Int, cdiv, round_up

__all__ = [
    "C128ATopkMetadata",
    "build_c128a_topk_metadata",
    "c128a_width",
    "combine_topk_swa_indices",
    "compact_indices",
    "compressed_lens",
    "compute_global_topk_indices_and_lens",
    "convert_req_index_to_global_index",
]


def convert_req_index_to_global_index(
    page_table: Int[Array, "requests pages"], request: Int[Array, "tokens"],
    local: Int[Array, "tokens keys"], *, page: int,
) -> Int[Array, "tokens keys"]:  # fmt: skip
    """``page_table[request, x // page] * page + x % page``; -1 for x < 0 or beyond the table."""
    flat = local.reshape(-1)
    owner = jnp.broadcast_to(request[:, None], local.shape).reshape(-1)
    slots = slot_mapping(page_table, owner, flat, flat >= 0, page=page)
    return slots.reshape(local.shape)


def compact_indices(
    indices: Int[Array, "tokens keys"],
) -> tuple[Int[Array, "tokens keys"], Int[Array, "tokens"]]:
    """Entries ``>= 0`` of each row moved to the front in order, and their number; -1 behind."""
    tokens, keys = indices.shape
    valid = indices >= 0
    place = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(valid, place, keys)  # out of range: dropped
    row = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    front = jnp.full_like(indices, PAD_SLOT).at[row, place].set(indices, mode="drop")
    return front, jnp.sum(valid, axis=1, dtype=jnp.int32)


def compute_global_topk_indices_and_lens(
    page_table: Int[Array, "requests pages"], request: Int[Array, "tokens"],
    topk: Int[Array, "tokens keys"], is_valid_token: Bool[Array, "tokens"], *, page: int,
) -> tuple[Int[Array, "tokens keys"], Int[Array, "tokens"]]:  # fmt: skip
    """C4A: slots of a top-k list in its own columns, and how many there are.

    The length of a token that is not valid is 0; its row is converted all the same.
    """
    slots = convert_req_index_to_global_index(page_table, request, topk, page=page)
    lens = jnp.sum(topk >= 0, axis=1, dtype=jnp.int32)
    return slots, jnp.where(is_valid_token, lens, 0)


def compressed_lens(
    positions: Int[Array, "tokens"],
    is_valid_token: Bool[Array, "tokens"],
    *,
    ratio: int,
    width: int,
) -> Int[Array, "tokens"]:
    """Complete states a token sees, at most ``width``: ``min((p + 1) // ratio, width)``."""
    lens = jnp.clip((positions + 1) // ratio, 0, width)
    return jnp.where(is_valid_token, lens, 0)


def c128a_width(max_seq_len: int, max_model_len: int, *, ratio: int = 128) -> int:
    """Columns of a C128A list: a power of two from 128, at most what the model can need."""
    check_sizes(max_model_len=max_model_len, ratio=ratio)
    whole = round_up(cdiv(max_model_len, ratio), 128)
    states = max(max_seq_len // ratio, 128)
    return min(1 << (states - 1).bit_length(), whole)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class C128ATopkMetadata:
    """Every complete state of a token's past; decode rows as slots, prefill rows as positions."""

    decode_global_indices: Int[Array, "decode_tokens keys"]
    decode_lens: Int[Array, "decode_tokens"]
    prefill_local_indices: Int[Array, "prefill_tokens keys"]


def build_c128a_topk_metadata(
    page_table: Int[Array, "requests pages"],
    request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    slots: Int[Array, "tokens"],
    num_decode_tokens: Int[Array, ""],
    *,
    decode_tokens: int,
    prefill_tokens: int,
    width: int,
    page: int,
    ratio: int = 128,
) -> C128ATopkMetadata:
    """All compressed states visible to each token.

    ``page_table`` and ``page`` are those of the compressed cache; ``slots`` are the tokens' own.
    Prefill row ``i`` is token ``num_decode_tokens + i``; rows past the tokens are all -1.
    """
    tokens = positions.shape[0]
    column = jnp.arange(width, dtype=jnp.int32)
    seen = jnp.clip((positions + 1) // ratio, 0, width)

    first = jnp.arange(decode_tokens, dtype=jnp.int32)
    is_decode = first < num_decode_tokens
    rows = jnp.where(is_decode, seen[:decode_tokens], 0)
    local = jnp.where(column < rows[:, None], column, PAD_SLOT)
    valid = is_decode & (slots[:decode_tokens] >= 0)

    later = num_decode_tokens + jnp.arange(prefill_tokens, dtype=jnp.int32)
    there = later < tokens
    rest = jnp.where(there, seen[jnp.where(there, later, 0)], 0)
    return C128ATopkMetadata(
        decode_global_indices=convert_req_index_to_global_index(
            page_table, request[:decode_tokens], local, page=page
        ),
        decode_lens=jnp.where(valid, rows, 0),
        prefill_local_indices=jnp.where(column < rest[:, None], column, PAD_SLOT),
    )


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
