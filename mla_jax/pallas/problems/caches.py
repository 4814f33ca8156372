"""Problems of what writes caches, reads them, or moves their blocks."""

import math

import jax
import jax.numpy as jnp

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import (
    check_array,
    check_cache,
    check_eps,
    check_fields,
    check_flag,
    checked_count,
    checked_pair,
    checked_parts,
    dtype_name,
)
from mla_jax.pallas.problems.parts import (
    any_cache_features,
    bind,
    cache_features,
    cache_sizes,
    check_layer,
    check_same_dtype,
    row_values,
    sizes_of,
)
from mla_jax.pallas.registry import Problem

__all__ = [
    "append",
    "append_window",
    "copy",
    "gather",
    "gather_codes",
    "gather_rows",
    "pool_states",
    "swap",
    "write",
    "write_rows",
]


def write(cache, kv_latent, k_rope, slots, *, layer=None) -> Problem:
    check_layer("write_latent", cache, layer)
    size = bind(
        "write_latent",
        cache_sizes("write_latent", cache),
        kv_latent=(kv_latent, "float", "latents rank"),
        k_rope=(k_rope, "float", "ropes rope"),
        slots=(slots, "int", "tokens"),
    )
    for name, rows in (("kv_latent", size["latents"]), ("k_rope", size["ropes"])):
        if rows < size["tokens"]:
            allowed = f"at least {size['tokens']}, one per slot"
            raise ArgumentError(f"write_latent: rows of {name}", rows, allowed)
    return Problem.of(
        "write_latent",
        dtype=str(kv_latent.dtype),
        **cache_features(cache),
        tokens=size["tokens"],
    )


def append(
    cache, q, kv, gain, angles, slots, *, eps, interleaved, layer=None, up_k=None
) -> Problem:
    op = "append_latent"
    check_eps(f"{op}: eps", eps)
    check_flag(f"{op}: interleaved", interleaved)
    cos, sin = checked_pair(f"{op}: angles", angles)
    check_layer(op, cache, layer)
    if cache.rope % 2:
        raise ArgumentError(f"{op}: rope of the cache", cache.rope, "an even number of channels")
    size = bind(
        op,
        cache_sizes(op, cache) | {"row": cache.rank + cache.rope, "pairs": cache.rope // 2},
        q=(q, "float", "tokens heads qk"),
        kv=(kv, "float", "tokens row"),
        gain=(gain, "float", "rank"),
        cos=(cos, "float", "tokens pairs"),
        sin=(sin, "float", "tokens pairs"),
        slots=(slots, "int", "tokens"),
    )
    check_same_dtype(op, q=q, kv=kv)
    if size["qk"] < cache.rope:
        raise ArgumentError(f"{op}: columns of q", size["qk"], f"at least rope={cache.rope}")
    size["nope"] = size["qk"] - cache.rope
    if up_k is not None:
        bind(op, size, up_k=(up_k, "float", "heads nope rank"))
        check_same_dtype(op, q=q, up_k=up_k)
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **cache_features(cache),
        **sizes_of(size, "nope", "heads", "tokens"),
        absorbed=up_k is not None,
    )


def append_window(cache, q, kv, gain, angles, slots, *, eps, layer=None) -> Problem:
    op = "append_window"
    check_eps(f"{op}: eps", eps)
    cos, sin = checked_pair(f"{op}: angles", angles)
    check_layer(op, cache, layer, records=True)
    row = sum(row_values(op, cache).values())
    size = bind(
        op,
        {"dim": row},
        q=(q, "float", "tokens heads dim"),
        kv=(kv, "float", "tokens dim"),
        gain=(gain, "float", "dim"),
        cos=(cos, "float", "tokens pairs"),
        sin=(sin, "float", "tokens pairs"),
        slots=(slots, "int", "tokens"),
    )
    check_same_dtype(op, q=q, kv=kv)
    _check_tail(op, size)
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **any_cache_features(cache),
        **sizes_of(size, "heads", "dim", "pairs", "tokens"),
    )


def pool_states(ring, pools, groups, positions, angles, *, eps, layer=None) -> Problem:
    op = "pool_states"
    check_eps(f"{op}: eps", eps)
    cos, sin = checked_pair(f"{op}: angles", angles)
    pools = checked_parts(f"{op}: pools", pools, allowed="a tuple of StatePool, one or more")
    check_fields(f"{op}: groups", groups, "a PoolMetadata", "ends", "tokens", "kept", "keep")
    check_layer(f"{op}: ring", ring, layer)
    size, dims, columns = {}, [], 0
    groups = {
        "ends": (groups.ends, "int", "groups"),
        "tokens": (groups.tokens, "int", "groups span"),
        "kept": (groups.kept, "int", "groups span"),
        "keep": (groups.keep, "int", "tokens"),
        "positions": (positions, "int", "tokens"),
        "cos": (cos, "float", "groups pairs"),
        "sin": (sin, "float", "groups pairs"),
    }
    for i, pool in enumerate(pools):
        what = f"{op}: pools[{i}]"
        parts = "cache", "values", "gates", "bias", "gain", "slots"
        check_fields(what, pool, "a StatePool", *parts)
        check_layer(f"{what}.cache", pool.cache, layer, records=True)
        shared = {k: v for k, v in size.items() if k != "dim"}
        size = bind(
            what,
            shared | {"dim": sum(row_values(what, pool.cache).values())},
            **groups,
            values=(pool.values, "float", "tokens halves dim"),
            gates=(pool.gates, "float", "tokens halves dim"),
            bias=(pool.bias, "float", "ratio halves dim"),
            gain=(pool.gain, "float", "dim"),
            slots=(pool.slots, "int", "tokens"),
        )
        _check_tail(what, size)
        check_same_dtype(what, values=pool.values, gates=pool.gates, bias=pool.bias)
        dims.append(size["dim"])
        columns += 2 * size["halves"] * size["dim"]
    if size["halves"] not in (1, 2) or size["span"] != size["ratio"] * size["halves"]:
        given = f"{size['halves']} for {size['span']} places of groups of {size['ratio']}"
        raise ArgumentError(f"{op}: halves", given, "1, or 2 where a group has twice its tokens")
    if ring.pages.shape[-1] != columns:
        allowed = f"{columns}, values and gates of all pools"
        raise ArgumentError(f"{op}: columns of the ring", ring.pages.shape[-1], allowed)
    return Problem.of(
        op,
        dtype=str(pools[0].values.dtype),
        ring=ring.format.name,
        caches="+".join(p.cache.format.name for p in pools),
        dim=dims[0],
        more_dim=max(dims[1:], default=0),
        **{name: size[name] for name in ("span", "halves", "pairs", "groups", "tokens")},
    )


def _check_tail(op: str, size: dict[str, int]) -> None:
    if 2 * size["pairs"] > size["dim"]:
        allowed = f"at most {size['dim'] // 2}, half of the channels"
        raise ArgumentError(f"{op}: pairs of angles", size["pairs"], allowed)


def gather(cache, page_table, first, row_starts, *, rows, dtype, layer=None) -> Problem:
    check_layer("gather_latent", cache, layer)
    size = bind(
        "gather_latent",
        cache_sizes("gather_latent", cache),
        page_table=(page_table, "int", "requests width"),
        first=(first, "int", "requests"),
        row_starts=(row_starts, "int", "requests+1"),
    )
    checked_count("gather_latent: rows", rows)
    return Problem.of(
        "gather_latent",
        out=dtype_name("gather_latent: dtype", dtype),
        **cache_features(cache),
        rows=rows,
        requests=size["requests"],
        width=size["width"],
    )


def copy(cache, pairs, *, layer=None) -> Problem:
    check_layer("copy_blocks", cache, layer, optional=True)
    size = cache_sizes("copy_blocks", cache)
    size = bind("copy_blocks", size, pairs=(pairs, "int", "pairs 2"))
    return Problem.of("copy_blocks", **cache_features(cache), pairs=size["pairs"])


def swap(src, dst, pairs, *, layer=None) -> Problem:
    check_cache("swap_blocks: src", src)
    check_layer("swap_blocks", dst, layer, optional=True)
    size = cache_sizes("swap_blocks", dst)
    size = bind("swap_blocks", size, pairs=(pairs, "int", "pairs 2"))
    given, allowed = (cache_features(c) | {"layers": c.layers or "none"} for c in (src, dst))
    if given != allowed:
        raise ArgumentError("swap_blocks: src", given, f"{allowed}, as dst")
    cache_sizes("swap_blocks", src)
    return Problem.of("swap_blocks", **cache_features(dst), pairs=size["pairs"])


def write_rows(cache, values, slots, *, layer=None) -> Problem:
    """Of a latent cache that of ``write_latent``, which stores its rows."""
    op = "write_rows"
    check_layer(op, cache, layer, records=True)
    wanted = row_values(op, cache)
    values = checked_parts(f"{op}: values", values, allowed=f"a tuple ({', '.join(wanted)})")
    if len(values) != len(wanted):
        allowed = f"{len(wanted)}: {', '.join(wanted)}"
        raise ArgumentError(f"{op}: values", len(values), allowed)
    arrays = {n: (x, "float", f"{n}_rows {n}") for n, x in zip(wanted, values, strict=True)}
    size = bind(op, wanted, **arrays, slots=(slots, "int", "tokens"))
    for name in wanted:
        if size[f"{name}_rows"] < size["tokens"]:
            allowed = f"at least {size['tokens']}, one per slot"
            raise ArgumentError(f"{op}: rows of {name}", size[f"{name}_rows"], allowed)
    if isinstance(cache, LatentCache):
        latent = values[0]
        none = jax.ShapeDtypeStruct((latent.shape[0], 0), latent.dtype)
        return write(cache, latent, values[1] if cache.rope else none, slots, layer=layer)
    return Problem.of(op, **any_cache_features(cache), tokens=size["tokens"])


def gather_rows(cache, slots, *, dtype, layer=None) -> Problem:
    op = "gather_rows"
    check_layer(op, cache, layer, records=True)
    row_values(op, cache)
    check_array(f"{op}: slots", slots)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ArgumentError(f"{op}: slots", f"dtype {slots.dtype}", "an integer dtype")
    out = dtype_name(f"{op}: dtype", dtype)
    return Problem.of(op, out=out, **any_cache_features(cache), rows=math.prod(slots.shape))


def gather_codes(cache, slots, *, layer=None) -> Problem:
    op = "gather_codes"
    check_layer(op, cache, layer, records=True)
    check_array(f"{op}: slots", slots)
    if not isinstance(cache, RecordCache) or cache.format.name != "index_key":
        hint = "gather_rows reads the values of any cache."
        raise ArgumentError(f"{op}: format of the cache", cache.format.name, "index_key", hint)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ArgumentError(f"{op}: slots", f"dtype {slots.dtype}", "an integer dtype")
    return Problem.of(op, **any_cache_features(cache), rows=math.prod(slots.shape))
