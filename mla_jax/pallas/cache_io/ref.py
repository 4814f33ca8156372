"""Reference cache traffic: write, gather and move token records.

Index rules shared by all four functions: a negative index means "nothing" and must never
reach a scatter or gather as it is, because -1 is the last row there. Skipped writes are
sent to the first row behind the array and dropped; skipped reads become zeros.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.pallas.axes import CacheScale, Layer, Pages, PageTable, PerRequest, Slots, Starts
from mla_jax.types import Array, Float, Int

__all__ = ["copy_blocks", "gather_latent", "swap_blocks", "write_latent"]


def write_latent(
    pages: Pages, scale: CacheScale, kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"], slots: Slots, *, format: CacheFormat, layer: Layer = None,
) -> Pages:  # fmt: skip
    """``pages[slot] = encode([kv_latent | k_rope])`` for every token with ``slot >= 0``.

    ``slots`` decides how many tokens there are; surplus rows of the data are ignored. Slots
    are distinct; a slot behind the cache, or a layer that a stack has not, is dropped like -1.
    """
    num_pages, page, _ = pages.shape[-3:]
    n = slots.shape[0]
    parts = (kv_latent[:n], k_rope[:n])
    scale = scale[_readable(pages, layer)]
    rows = jnp.concatenate([format.encode(x, scale) for x in parts], axis=1)
    page_id = jnp.where(slots >= 0, slots // page, num_pages)
    return _scatter(pages, (*_writable(pages, layer), page_id, slots % page), rows)


def gather_latent(
    pages: Pages, scale: CacheScale, page_table: PageTable, first: PerRequest, row_starts: Starts,
    *, rows: int, dtype: DTypeLike, format: CacheFormat, layer: Layer = None,
) -> Float[Array, "{rows} row"]:  # fmt: skip
    """Row ``f`` of request ``r`` is its cached position ``first[r] + f - row_starts[r]``.

    Request ``r`` owns rows ``row_starts[r]`` to ``row_starts[r + 1]``. Any start is allowed,
    aligned to a page or not. Rows owned by nobody, and positions outside the page table, are
    zeros. Quantised values are ``float32(byte) * scale``, rounded once to ``dtype``.
    """
    num_pages, page, row = pages.shape[-3:]
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
    in_layer = _readable(pages, layer)
    stored = pages[*in_layer, jnp.clip(page_id, 0, num_pages - 1), position % page]
    return jnp.where(owned[:, None], format.decode(stored, scale[in_layer]), 0).astype(dtype)


def copy_blocks(
    pages: Pages,
    pairs: Int[Array, "pairs 2"],
    *,
    layer: Layer = None,
) -> Pages:
    """``pages[dst] = pages[src]`` for every pair ``(src, dst)``, all at once.

    Every source is read before anything is written, so a chain ``(a, b), (b, c)`` gives ``c``
    the old ``b``. Destinations are distinct; a pair with a negative index is skipped.
    """
    return swap_blocks(pages, pages, pairs, layer=layer)


def swap_blocks(
    src: Float[Array, "*layers src_pages page row"],
    dst: Float[Array, "*layers dst_pages page row"],
    pairs: Int[Array, "pairs 2"],
    *,
    layer: Layer = None,
) -> Float[Array, "*layers dst_pages page row"]:
    """``dst[j] = src[i]`` for every pair ``(i, j)``: a one-way copy, despite the name.

    Destinations are distinct. A pair with an index outside its cache is skipped. In a stack the
    pages move in ``layer``, or in every layer.
    """
    i, j = pairs[:, 0], pairs[:, 1]
    moved = (i >= 0) & (i < src.shape[-3]) & (j >= 0)
    i, j = jnp.where(moved, i, 0), jnp.where(moved, j, dst.shape[-3])
    if layer is None:  # of one layer, or of all
        read, written = (..., i, slice(None), slice(None)), (..., j, slice(None), slice(None))
    else:
        read, written = (*_readable(src, layer), i), (*_writable(dst, layer), j)
    # All is read before anything is written: XLA would do both at once, on a copy of the cache.
    return _scatter(dst, written, lax.optimization_barrier(_bits(src)[read]))


def _readable(stack: Array, layer: Array | None) -> tuple[Array, ...]:
    """Index of a layer to read from, clamped; empty if the cache has no stack."""
    return () if layer is None else (jnp.clip(layer, 0, stack.shape[0] - 1),)


def _writable(stack: Array, layer: Array | None) -> tuple[Array, ...]:
    """Index of a layer to write to; behind the stack if it has no such layer."""
    return () if layer is None else (jnp.where(layer < 0, stack.shape[0], layer),)


def _scatter(pages: Array, index: tuple[Any, ...], values: Array) -> Array:
    """``pages[index] = values``, or their bits, dropping indices behind the end."""
    changed = _bits(pages).at[index].set(_bits(values), mode="drop")
    return changed if changed.dtype == pages.dtype else _bits(changed, pages.dtype)


def _bits(x: Array, dtype: DTypeLike = jnp.uint8) -> Array:
    """One-byte floats as bytes: scattering them converts the whole cache to float16 and back."""
    return x if x.dtype.itemsize > 1 else lax.bitcast_convert_type(x, dtype)
