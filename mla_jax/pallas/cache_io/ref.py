"""Reference cache traffic: write, gather and move token records.

Index rules shared by all four functions: a negative index means "nothing" and must never
reach a scatter or gather as it is, because -1 is the last row there. Skipped writes are
sent to the first row behind the array and dropped; skipped reads become zeros.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.types import Array, Float, Int

__all__ = ["copy_blocks", "gather_latent", "swap_blocks", "write_latent"]


def write_latent(
    pages: Float[Array, "pages page row"],
    scale: Float[Array, ""],
    kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"],
    slots: Int[Array, "tokens"],
    *,
    format: CacheFormat,
) -> Float[Array, "pages page row"]:
    """``pages[slot] = encode([kv_latent | k_rope])`` for every token with ``slot >= 0``.

    ``slots`` decides how many tokens there are; surplus rows of the data are ignored. Slots
    are distinct; a slot behind the cache is dropped like -1.
    """
    num_pages, page, _ = pages.shape
    n = slots.shape[0]
    parts = (kv_latent[:n], k_rope[:n])
    rows = jnp.concatenate([format.encode(x, scale) for x in parts], axis=1)
    page_id = jnp.where(slots >= 0, slots // page, num_pages)
    return _scatter(pages, (page_id, slots % page), rows)


def gather_latent(
    pages: Float[Array, "pages page row"],
    scale: Float[Array, ""],
    page_table: Int[Array, "requests width"],
    first: Int[Array, "requests"],
    row_starts: Int[Array, "starts"],
    *,
    rows: int,
    dtype: DTypeLike,
    format: CacheFormat,
) -> Float[Array, "{rows} row"]:
    """Row ``f`` of request ``r`` is its cached position ``first[r] + f - row_starts[r]``.

    Request ``r`` owns rows ``row_starts[r]`` to ``row_starts[r + 1]``. Any start is allowed,
    aligned to a page or not. Rows owned by nobody, and positions outside the page table, are
    zeros. Quantised values are ``float32(byte) * scale``, rounded once to ``dtype``.
    """
    num_pages, page, row = pages.shape
    requests, width = page_table.shape
    if not (requests and width and rows):
        return jnp.zeros((rows, row), dtype)
    f = jnp.arange(rows, dtype=row_starts.dtype)
    owner = jnp.searchsorted(row_starts[1:], f, side="right")
    r = jnp.minimum(owner, requests - 1)
    position = first[r] + f - row_starts[r]
    column = position // page
    owned = (owner < requests) & (f >= row_starts[0]) & (column >= 0) & (column < width)
    page_id = page_table[r, jnp.clip(column, 0, width - 1)]
    stored = pages[jnp.clip(page_id, 0, num_pages - 1), position % page]
    return jnp.where(owned[:, None], format.decode(stored, scale), 0).astype(dtype)


def copy_blocks(
    pages: Float[Array, "pages page row"], pairs: Int[Array, "pairs 2"]
) -> Float[Array, "pages page row"]:
    """``pages[dst] = pages[src]`` for every pair ``(src, dst)``, all at once.

    Every source is read before anything is written, so a chain ``(a, b), (b, c)`` gives ``c``
    the old ``b``. Destinations are distinct; a pair with a negative index is skipped.
    """
    return swap_blocks(pages, pages, pairs)


def swap_blocks(
    src: Float[Array, "src_pages page row"],
    dst: Float[Array, "dst_pages page row"],
    pairs: Int[Array, "pairs 2"],
) -> Float[Array, "dst_pages page row"]:
    """``dst[j] = src[i]`` for every pair ``(i, j)``: a one-way copy, despite the name.

    Destinations are distinct. A pair with an index outside its cache is skipped.
    """
    i, j = pairs[:, 0], pairs[:, 1]
    moved = (i >= 0) & (i < src.shape[0]) & (j >= 0)
    return _scatter(dst, jnp.where(moved, j, dst.shape[0]), src[jnp.where(moved, i, 0)])


def _scatter(pages: Array, index: Array | tuple[Array, ...], values: Array) -> Array:
    """``pages[index] = values``, dropping indices behind the end.

    One-byte floats go as bytes: scattering them converts the whole cache to float16 and back.
    """
    if pages.dtype.itemsize > 1:
        return pages.at[index].set(values, mode="drop")
    bits, values = (lax.bitcast_convert_type(x, jnp.uint8) for x in (pages, values))
    return lax.bitcast_convert_type(bits.at[index].set(values, mode="drop"), pages.dtype)
