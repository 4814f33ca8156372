"""What the operations' checks share: sizes of named axes, and what a cache is."""

import numbers
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import check_array, check_cache, dtype_name
from mla_jax.types import SCALE_BLOCK, BlockScaled, cdiv

__all__ = [
    "any_cache_features",
    "bind",
    "cache_features",
    "cache_sizes",
    "check_layer",
    "check_same_dtype",
    "result_dtype",
    "row_values",
    "sizes_of",
]


def bind(op: str, sizes: dict[str, int], **arrays: tuple[Any, str, str]) -> dict[str, int]:
    """Sizes of all named axes, given some of them; each array is ``(array, kind, axes)``.

    ``requests+1`` is an axis one longer than ``requests``; ``codes`` are e4m3 or activations.
    """
    sizes = dict(sizes)
    for name, (x, kind, axes) in arrays.items():
        what = f"{op}: {name}"
        names = axes.split()
        if kind == "e4m3":
            _check_blocks(what, x)
        else:
            check_array(what, x)
        pairs = zip(names, x.shape, strict=False)  # a name that is a number is a size
        if len(x.shape) != len(names) or any(a.isdecimal() and n != int(a) for a, n in pairs):
            raise ArgumentError(what, f"shape {tuple(x.shape)}", f"[{', '.join(names)}]")
        if kind == "int" and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ArgumentError(what, f"dtype {x.dtype}", "an integer dtype")
        if kind == "bool" and x.dtype != jnp.bool_:
            raise ArgumentError(what, f"dtype {x.dtype}", "bool")
        if kind == "float" or (kind == "codes" and x.dtype != jnp.float8_e4m3fn):
            dtype_name(what, x.dtype)
        for axis, n in zip(names, x.shape, strict=True):
            base, _, more = axis.partition("+")
            n -= int(more or 0)
            if sizes.setdefault(base, n) != n:
                raise ArgumentError(
                    f"{what} of shape {tuple(x.shape)}",
                    f"{base}={n}",
                    f"{base}={sizes[base]}, as in the cache or the other arguments",
                )
    return sizes


def sizes_of(size: dict[str, int], *names: str) -> dict[str, int]:
    """Those of these axes, in this order."""
    return {name: size[name] for name in names}


def check_same_dtype(op: str, **arrays: Any) -> None:
    """Refuse arrays of several dtypes."""
    given = {name: str(x.dtype) for name, x in arrays.items()}
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ArgumentError(f"{op}: dtypes", text, "one dtype", "Cast before the call.")


def result_dtype(op: str, dtype: DTypeLike | None, like: Any) -> str:
    """The dtype of the result: that of ``like`` unless stated."""
    return dtype_name(f"{op}: out_dtype", like.dtype if dtype is None else dtype)


def check_layer(
    op: str, cache: Any, layer: Any, *, optional: bool = False, records: bool = False
) -> None:
    """A stack of layers needs one of them, the cache of one layer has none to choose from.

    Whether ``cache`` is one at all is checked first; with ``records`` it may hold byte records.
    """
    check_cache(f"{op}: cache", cache, records=records)
    what, layers = f"{op}: layer", cache.layers
    if layers is None:
        if layer is not None:
            raise ArgumentError(what, layer, "None: this cache has one layer")
        return
    allowed = f"0 to {layers - 1}, an int or a scalar integer array: the cache has {layers} layers"
    if layer is None:
        if not optional:
            raise ArgumentError(what, None, allowed)
    elif isinstance(layer, numbers.Integral) and not isinstance(layer, bool):
        if not 0 <= int(layer) < layers:
            raise ArgumentError(what, layer, allowed)
    else:
        dtype, shape = getattr(layer, "dtype", None), getattr(layer, "shape", None)
        if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.integer):
            given = type(layer).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise ArgumentError(what, given, allowed)


def cache_sizes(op: str, cache: LatentCache) -> dict[str, int]:
    """Its axes by name; pages and scale must be what ``LatentCache.alloc`` makes."""
    if cache.pages.dtype != jnp.dtype(cache.format.dtype):
        raise ArgumentError(
            f"{op}: dtype of cache.pages",
            cache.pages.dtype,
            f"{cache.format.dtype}, as format {cache.format.name} stores",
            "Build caches with LatentCache.alloc.",
        )
    if cache.scale.shape != cache.pages.shape[:-3]:
        raise ArgumentError(
            f"{op}: shape of cache.scale",
            tuple(cache.scale.shape),
            f"{tuple(cache.pages.shape[:-3])}, one scale for each layer",
            "Build caches with LatentCache.alloc.",
        )
    return {"rank": cache.rank, "rope": cache.rope}


def cache_features(cache: LatentCache) -> dict[str, Any]:
    """What a problem says of it."""
    return {
        "cache": cache.format.name,
        "rank": cache.rank,
        "rope": cache.rope,
        "page": cache.page,
    }


def row_values(op: str, cache: LatentCache | RecordCache) -> dict[str, int]:
    """Names and widths of what a row of the cache holds."""
    if isinstance(cache, RecordCache):
        _check_records(op, cache)
        return {f.name: f.count for f in cache.format.values}
    cache_sizes(op, cache)
    return {"kv_latent": cache.rank} | ({"k_rope": cache.rope} if cache.rope else {})


def any_cache_features(cache: LatentCache | RecordCache) -> dict[str, Any]:
    """Those of a cache of elements, or of one of records."""
    if isinstance(cache, LatentCache):
        return cache_features(cache)
    return {"cache": cache.format.name, "row": cache.format.row, "page": cache.page}


def _check_blocks(what: str, x: Any) -> None:
    """Refuse what is not an e4m3 matrix with a float32 scale for each of its blocks."""
    if not isinstance(x, BlockScaled):
        raise ArgumentError(what, type(x).__name__, "BlockScaled")
    if x.values.dtype != jnp.float8_e4m3fn or x.scale.dtype != jnp.float32:
        given = f"{x.values.dtype} scaled by {x.scale.dtype}"
        raise ArgumentError(what, given, "float8_e4m3fn scaled by float32")
    if x.values.ndim < 2:
        raise ArgumentError(f"{what}: shape of its values", x.values.shape, "two axes or more")
    *lead, rows, columns = x.shape
    blocks = *lead, cdiv(rows, SCALE_BLOCK), cdiv(columns, SCALE_BLOCK)
    if x.scale.shape != blocks:
        raise ArgumentError(f"{what}: shape of its scale", x.scale.shape, f"{blocks}")


def _check_records(op: str, cache: RecordCache) -> None:
    """Refuse pages that are not what ``RecordCache.alloc`` makes."""
    pages = cache.pages
    given = f"{pages.dtype}{list(pages.shape)}"
    width = cache.format.page_bytes(cache.page)
    if str(pages.dtype) != "uint8" or len(pages.shape) not in (2, 3) or pages.shape[-1] != width:
        allowed = f"uint8[pages, {width}] or uint8[layers, pages, {width}]"
        hint = f"A page has {cache.page} tokens. Build caches with RecordCache.alloc."
        raise ArgumentError(f"{op}: pages of the cache", given, allowed, hint)
