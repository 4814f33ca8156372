"""Where each multiprocessor starts in the list of (query, key segment) items of a decode batch.

Items of one request are its key segments (256 keys) times its query items; requests follow one
another, and every multiprocessor gets the same number of items up to one.
"""

from typing import Literal

import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import check_sizes, exclusive_sum
from mla_jax.types import Array, Int, cdiv

__all__ = ["SPLIT_KEYS", "paged_mqa_logits_schedule"]

SPLIT_KEYS = 256
"""Keys of one segment."""


def paged_mqa_logits_schedule(
    seq_lens: Int[Array, "rows queries"],
    *,
    num_sms: int,
    split: int = SPLIT_KEYS,
    remainder: Literal["first", "last"] = "first",
    item: Literal["atom", "token"] = "atom",
    request: Int[Array, "rows"] | None = None,
) -> Int[Array, "sms 2"]:
    """``[num_sms + 1, 2]``: row ``s`` starts multiprocessor ``s`` and ends ``s - 1``.

    A row is (query item, key segment); only the last column of ``seq_lens`` counts. With
    ``item="atom"`` (SM90) a request has ``ceil(queries / 2)`` items per segment, ordered item
    first; with ``item="token"`` (SM100) one per query, and starts are rounded down to whole
    segments. ``remainder`` says which multiprocessors take one item more when the division leaves
    one. ``request`` (SM100, one query per row): consecutive equal entries form one request, whose
    last row's length counts. Rows without keys have no items; past the work every row is
    ``(items of all rows, 0)``.

    Source: DeepGEMM paged MQA-logits metadata (``first``/``atom``: spring 2026).
    """
    check_sizes(num_sms=num_sms, split=split)
    if remainder not in ("first", "last"):
        raise MetadataError("remainder", repr(remainder), "'first' or 'last'")
    rows, queries = seq_lens.shape
    if rows == 0:
        return jnp.zeros((num_sms + 1, 2), jnp.int32)
    width = queries if item == "token" else cdiv(queries, 2)
    first = jnp.arange(rows, dtype=jnp.int32) * width  # first item of each row's request
    items = jnp.full((rows,), width, jnp.int32)
    segments = (jnp.maximum(seq_lens[:, -1], 0) + split - 1) // split
    if request is not None:
        run = jnp.cumsum(jnp.diff(request, prepend=request[:1]) != 0)
        same = run == run[:, None]
        items = jnp.sum(same, axis=1, dtype=jnp.int32)
        first = jnp.argmax(same, axis=1).astype(jnp.int32)
        segments = jnp.where(jnp.arange(rows) == first + items - 1, segments, 0)

    done = exclusive_sum(segments * items)
    share, extra = done[-1] // num_sms, done[-1] % num_sms
    s = jnp.arange(num_sms + 1, dtype=jnp.int32)
    late = jnp.minimum(s, extra) if remainder == "first" else jnp.maximum(s - num_sms + extra, 0)
    start = s * share + late

    row = jnp.sum(done[1:] <= start[:, None], axis=1, dtype=jnp.int32)
    busy = row < rows
    row = jnp.minimum(row, rows - 1)
    offset = start - done[row]
    if item == "token":
        at, segment = first[row], offset // jnp.maximum(items[row], 1)
    else:
        per_item = jnp.maximum(segments[row], 1)
        at, segment = first[row] + offset // per_item, offset % per_item
    end = jnp.int32(rows * width)
    return jnp.stack([jnp.where(busy, at, end), jnp.where(busy, segment, 0)], axis=1)
