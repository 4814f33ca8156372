"""Reference writes and reads of single rows: byte records from their format's data alone.

Bytes behind a page's records, and records that no slot names, keep what they hold.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.types import Array, Float, Int

__all__ = ["gather_codes", "gather_records", "gather_rows", "write_records"]


def write_records(
    cache: RecordCache,
    values: tuple[Float[Array, "_ _"], ...],
    slots: Int[Array, "tokens"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> RecordCache:
    """Store ``format.encode(*values)`` of every token at its slot.

    ``slots`` decides how many tokens there are; surplus rows of the values are ignored. Slots
    are distinct; one outside the cache, or a layer that a stack has not, writes nothing.
    ``layer`` is given if and only if the cache is a stack.
    """
    parts = cache.format.encode(*(x[: slots.shape[0]] for x in values))
    pages = cache.pages
    for part, place in zip(parts, _places(cache, slots, layer), strict=True):
        pages = pages.at[place].set(part, mode="drop")
    return RecordCache(pages=pages, page=cache.page, format=cache.format)


def gather_records(
    cache: RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "*tokens row"]:
    """The values at ``slots``, side by side in ``dtype``, each rounded to it once.

    A slot outside the cache, or a layer that a stack has not, reads as zeros. ``layer`` as in
    ``write_records``.
    """
    places = _places(cache, slots, layer)
    parts = (cache.pages.at[p].get(mode="fill", fill_value=0) for p in places)  # zeros read as 0
    return jnp.concatenate(cache.format.decode(tuple(parts), dtype=dtype), axis=-1)


def gather_rows(
    cache: LatentCache | RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "*tokens row"]:
    """``gather_records`` of either cache: the values at ``slots``; outside of it zeros."""
    if isinstance(cache, RecordCache):
        return gather_records(cache, slots, dtype=dtype, layer=layer)
    inside = (slots >= 0) & (slots < cache.num_slots)
    lead: tuple[int | Array, ...] = ()
    if layer is not None:
        inside &= (layer >= 0) & (layer < cache.pages.shape[0])
        lead = (jnp.clip(layer, 0, cache.pages.shape[0] - 1),)
    at = jnp.where(inside, slots, 0)
    rows = cache.pages[*lead, at // cache.page, at % cache.page]
    scale = cache.scale[lead]
    return jnp.where(inside[..., None], cache.format.decode(rows, scale), 0).astype(dtype)


def gather_codes(
    cache: RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    layer: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "*tokens dim"], Float[Array, "*tokens"]]:
    """The stored e4m3 codes of the index keys at ``slots``, and the float32 scale of each key.

    ``codes * scale`` is ``gather_records``; both are 0 where that is. ``layer`` as in
    ``write_records``.
    """
    places = _places(cache, slots, layer)
    stored = cache.format.stored(
        tuple(cache.pages.at[p].get(mode="fill", fill_value=0) for p in places)
    )
    (key,) = cache.format.values
    return stored[key.name], stored[key.scale][..., 0]


def _places(
    cache: RecordCache, slots: Array, layer: int | Array | None
) -> list[tuple[int | Array, ...]]:
    """Indices into ``pages`` of every byte of the slots' records, ``[*tokens, width]`` a plane.

    What is not in the cache has the page behind the last one: -1 would be the last page.
    """
    if (layer is None) != (cache.layers is None):
        allowed = "None" if cache.layers is None else f"below {cache.layers}, the layers stacked"
        raise ArgumentError("layer of a RecordCache", layer, allowed)
    inside = (slots >= 0) & (slots < cache.num_slots)
    if layer is not None:
        inside &= (layer >= 0) & (layer < cache.pages.shape[0])
    page_id = jnp.where(inside, slots // cache.page, cache.num_pages)[..., None]
    lead, offset = () if layer is None else (layer,), (slots % cache.page)[..., None]
    planes = zip(cache.format.begins(cache.page), cache.format.widths, strict=True)
    return [(*lead, page_id, begin + offset * w + jnp.arange(w)) for begin, w in planes]
