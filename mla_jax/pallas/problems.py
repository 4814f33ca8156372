"""From the arguments of an operation to its ``Problem``: what fits together, and what is asked.

One function per operation, with the operation's own arguments. It refuses what does not fit,
before any backend is asked, and reads shapes and dtypes only.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.checks import is_int
from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import (
    check_array,
    check_cache,
    check_eps,
    check_fields,
    check_flag,
    check_number,
    checked_count,
    checked_pair,
    checked_parts,
    dtype_name,
    is_static_number,
)
from mla_jax.pallas.registry import Problem
from mla_jax.types import SCALE_BLOCK, BlockScaled, cdiv

__all__ = ["PROBLEMS", "check_selection"]

_MOST_ROUNDS = 1000  # of Sinkhorn's iteration, which is written out; models take 20


def write(cache, kv_latent, k_rope, slots, *, layer=None) -> Problem:
    _layer("write_latent", cache, layer)
    size = _bind(
        "write_latent",
        _cache_sizes("write_latent", cache),
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
        **_cache_features(cache),
        tokens=size["tokens"],
    )


def append(
    cache, q, kv, gain, angles, slots, *, eps, interleaved, layer=None, up_k=None
) -> Problem:
    op = "append_latent"
    check_eps(f"{op}: eps", eps)
    check_flag(f"{op}: interleaved", interleaved)
    cos, sin = checked_pair(f"{op}: angles", angles)
    _layer(op, cache, layer)
    if cache.rope % 2:
        raise ArgumentError(f"{op}: rope of the cache", cache.rope, "an even number of channels")
    size = _bind(
        op,
        _cache_sizes(op, cache) | {"row": cache.rank + cache.rope, "pairs": cache.rope // 2},
        q=(q, "float", "tokens heads qk"),
        kv=(kv, "float", "tokens row"),
        gain=(gain, "float", "rank"),
        cos=(cos, "float", "tokens pairs"),
        sin=(sin, "float", "tokens pairs"),
        slots=(slots, "int", "tokens"),
    )
    _same_dtype(op, q=q, kv=kv)
    if size["qk"] < cache.rope:
        raise ArgumentError(f"{op}: columns of q", size["qk"], f"at least rope={cache.rope}")
    size["nope"] = size["qk"] - cache.rope
    if up_k is not None:
        _bind(op, size, up_k=(up_k, "float", "heads nope rank"))
        _same_dtype(op, q=q, up_k=up_k)
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **_cache_features(cache),
        **_sizes(size, "nope", "heads", "tokens"),
        absorbed=up_k is not None,
    )


def append_window(cache, q, kv, gain, angles, slots, *, eps, layer=None) -> Problem:
    op = "append_window"
    check_eps(f"{op}: eps", eps)
    cos, sin = checked_pair(f"{op}: angles", angles)
    _layer(op, cache, layer, records=True)
    row = sum(_values(op, cache).values())
    size = _bind(
        op,
        {"dim": row},
        q=(q, "float", "tokens heads dim"),
        kv=(kv, "float", "tokens dim"),
        gain=(gain, "float", "dim"),
        cos=(cos, "float", "tokens pairs"),
        sin=(sin, "float", "tokens pairs"),
        slots=(slots, "int", "tokens"),
    )
    _same_dtype(op, q=q, kv=kv)
    _check_tail(op, size)
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **_any_cache(cache),
        **_sizes(size, "heads", "dim", "pairs", "tokens"),
    )


def pool_states(ring, pools, groups, positions, angles, *, eps, layer=None) -> Problem:
    op = "pool_states"
    check_eps(f"{op}: eps", eps)
    cos, sin = checked_pair(f"{op}: angles", angles)
    pools = checked_parts(f"{op}: pools", pools, allowed="a tuple of StatePool, one or more")
    check_fields(f"{op}: groups", groups, "a PoolMetadata", "ends", "tokens", "kept", "keep")
    _layer(f"{op}: ring", ring, layer)
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
        _layer(f"{what}.cache", pool.cache, layer, records=True)
        shared = {k: v for k, v in size.items() if k != "dim"}
        size = _bind(
            what,
            shared | {"dim": sum(_values(what, pool.cache).values())},
            **groups,
            values=(pool.values, "float", "tokens halves dim"),
            gates=(pool.gates, "float", "tokens halves dim"),
            bias=(pool.bias, "float", "ratio halves dim"),
            gain=(pool.gain, "float", "dim"),
            slots=(pool.slots, "int", "tokens"),
        )
        _check_tail(what, size)
        _same_dtype(what, values=pool.values, gates=pool.gates, bias=pool.bias)
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
    _layer("gather_latent", cache, layer)
    size = _bind(
        "gather_latent",
        _cache_sizes("gather_latent", cache),
        page_table=(page_table, "int", "requests width"),
        first=(first, "int", "requests"),
        row_starts=(row_starts, "int", "requests+1"),
    )
    checked_count("gather_latent: rows", rows)
    return Problem.of(
        "gather_latent",
        out=dtype_name("gather_latent: dtype", dtype),
        **_cache_features(cache),
        rows=rows,
        requests=size["requests"],
        width=size["width"],
    )


def copy(cache, pairs, *, layer=None) -> Problem:
    _layer("copy_blocks", cache, layer, optional=True)
    size = _cache_sizes("copy_blocks", cache) | {"2": 2}
    size = _bind("copy_blocks", size, pairs=(pairs, "int", "pairs 2"))
    return Problem.of("copy_blocks", **_cache_features(cache), pairs=size["pairs"])


def swap(src, dst, pairs, *, layer=None) -> Problem:
    check_cache("swap_blocks: src", src)
    _layer("swap_blocks", dst, layer, optional=True)
    size = _cache_sizes("swap_blocks", dst) | {"2": 2}
    size = _bind("swap_blocks", size, pairs=(pairs, "int", "pairs 2"))
    given, allowed = (_cache_features(c) | {"layers": c.layers or "none"} for c in (src, dst))
    if given != allowed:
        raise ArgumentError("swap_blocks: src", given, f"{allowed}, as dst")
    _cache_sizes("swap_blocks", src)
    return Problem.of("swap_blocks", **_cache_features(dst), pairs=size["pairs"])


def decode(q_latent, q_rope, cache, meta, *, scale, out_dtype=None, layer=None) -> Problem:
    op = "mla_decode"
    check_array(f"{op}: q_latent", q_latent)
    _layer(op, cache, layer)
    return _decode(op, q_latent, q_rope, cache, meta, scale, out_dtype)


def plan_decode(cache, meta, *, tokens, heads, dtype, out_dtype=None) -> Problem:
    """Of ``mla_decode`` in any layer of the cache; dtypes and sizes are those of the queries."""
    op = "plan_decode"
    check_cache(f"{op}: cache", cache)
    dtype = dtype_name(f"{op}: dtype", dtype)
    shape = checked_count(f"{op}: tokens", tokens), checked_count(f"{op}: heads", heads, low=1)
    q_latent, q_rope = (jax.ShapeDtypeStruct((*shape, n), dtype) for n in (cache.rank, cache.rope))
    return _decode(op, q_latent, q_rope, cache, meta, 1.0, out_dtype)


def _decode(op, q_latent, q_rope, cache, meta, scale, out_dtype) -> Problem:
    parts = "max_query_len", "page_table", "seq_lens", "query_starts"
    check_fields(f"{op}: meta", meta, "a DecodeMetadata", *parts)
    size = _bind(
        op,
        _cache_sizes(op, cache),
        q_latent=(q_latent, "float", "tokens heads rank"),
        q_rope=(q_rope, "float", "tokens heads rope"),
        page_table=(meta.page_table, "int", "requests width"),
        seq_lens=(meta.seq_lens, "int", "requests"),
        query_starts=(meta.query_starts, "int", "requests+1"),
    )
    _same_dtype(op, q_latent=q_latent, q_rope=q_rope)
    check_number(f"{op}: scale", scale)
    checked_count(f"{op}: max_query_len", meta.max_query_len, low=1)
    return Problem.of(
        "mla_decode",
        dtype=str(q_latent.dtype),
        out=_out(op, out_dtype, q_latent),
        heads=size["heads"],
        **_cache_features(cache),
        max_query_len=meta.max_query_len,
        tokens=size["tokens"],
        requests=size["requests"],
        width=size["width"],
    )


def prefill(q, kv, k_rope, meta, *, scale, causal=True, out_dtype=None) -> Problem:
    return _prefill("mla_prefill", q, kv, k_rope, meta, scale, causal, out_dtype)


def plan_prefill(
    meta, *, tokens, keys, heads, nope, rope, v, dtype, causal=True, out_dtype=None
) -> Problem:
    """Of ``mla_prefill`` in any layer."""
    op = "plan_prefill"
    for name, n in (("tokens", tokens), ("keys", keys), ("nope", nope), ("rope", rope)):
        checked_count(f"{op}: {name}", n)
    for name, n in (("heads", heads), ("v", v)):
        checked_count(f"{op}: {name}", n, low=1)
    dtype = dtype_name(f"{op}: dtype", dtype)
    shapes = (tokens, heads, nope + rope), (keys, heads, nope + v), (keys, rope)
    q, kv, k_rope = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return _prefill(op, q, kv, k_rope, meta, 1.0, causal, out_dtype)


def _prefill(op, q, kv, k_rope, meta, scale, causal, out_dtype) -> Problem:
    check_fields(f"{op}: meta", meta, "a PrefillMetadata", "query_starts", "key_starts")
    size = _bind(
        op,
        {},
        q=(q, "float", "tokens heads qk"),
        kv=(kv, "float", "keys heads nope_v"),
        k_rope=(k_rope, "float", "keys rope"),
        query_starts=(meta.query_starts, "int", "requests+1"),
        key_starts=(meta.key_starts, "int", "requests+1"),
    )
    checked_count(f"{op}: heads", size["heads"], low=1)
    nope = size["qk"] - size["rope"]
    v = size["nope_v"] - nope
    if nope < 0 or v < 1:
        raise ArgumentError(
            f"{op}: widths",
            f"q {size['qk']}, k_rope {size['rope']}, kv {size['nope_v']}",
            "q = nope + rope and kv = nope + v with v >= 1",
            "Pass kv as the up-projection leaves it, [k_nope | v] per head.",
        )
    _same_dtype(op, q=q, kv=kv, k_rope=k_rope)
    check_number(f"{op}: scale", scale)
    check_flag(f"{op}: causal", causal)
    return Problem.of(
        "mla_prefill",
        dtype=str(q.dtype),
        out=_out(op, out_dtype, q),
        heads=size["heads"],
        nope=nope,
        rope=size["rope"],
        v=v,
        causal=causal,
        tokens=size["tokens"],
        keys=size["keys"],
        requests=size["requests"],
    )


def merge(*states, out_dtype=None) -> Problem:
    op = "merge_attn_states"
    if not states:
        raise ArgumentError(f"{op}: states", "none", "one or more")
    size: dict[str, int] = {}
    for i, s in enumerate(states):
        check_fields(f"{op}: states[{i}]", s, "an AttnState", "out", "lse")
        arrays = {
            f"states[{i}].out": (s.out, "float", "tokens heads dim"),
            f"states[{i}].lse": (s.lse, "float", "tokens heads"),
        }
        size = _bind(op, size, **arrays)
    return Problem.of(
        op,
        dtype=str(states[0].out.dtype),
        out=_out(op, out_dtype, states[0].out),
        states=len(states),
        **size,
    )


def sinks(state, sinks) -> Problem:
    check_fields("apply_sinks: state", state, "an AttnState", "out", "lse")
    size = _bind(
        "apply_sinks",
        {},
        out=(state.out, "float", "tokens heads dim"),
        lse=(state.lse, "float", "tokens heads"),
        sinks=(sinks, "float", "heads"),
    )
    return Problem.of("apply_sinks", dtype=str(state.out.dtype), **size)


def routed(x, gate, up, down, weights, experts, *, limit=None, then=None) -> Problem:
    op = "routed_experts"
    size = _bind(
        op,
        {},
        x=(x, "float", "tokens hidden"),
        gate=(gate, "float", "experts hidden width"),
        up=(up, "float", "experts hidden width"),
        down=(down, "float", "experts width hidden"),
        weights=(weights, "float", "tokens topk"),
        experts=(experts, "int", "tokens topk"),
    )
    _same_dtype(op, x=x, gate=gate, up=up, down=down)
    _check_experts(op, weights, limit)
    _check_then(op, x, then)
    return _routed(op, x, size)


def all_reduce(x, *, axis, peers=None, then=None) -> Problem:
    op = "all_reduce"
    _bind(op, {}, x=(x, "float", "tokens hidden"))
    try:
        devices = lax.axis_size(axis)
    except (NameError, TypeError, ValueError):
        allowed = "a name of the mesh's axes, inside of jax.shard_map"
        raise ArgumentError(f"{op}: axis", repr(axis), allowed) from None
    if peers is not None:
        check_fields(f"{op}: peers", peers, "None or the peers of a PeerMemory", "table")
        sizes = {"one": 1, "words": 2 + 2 * devices}
        _bind(f"{op}: peers", sizes, table=(peers.table, "int", "one words"))
    _check_then(op, x, then)
    return Problem.of(
        op,
        dtype=str(x.dtype),
        hidden=x.shape[1],
        devices=devices,
        rows_of_all=devices * max(x.shape[0], 1),
        peers=peers is not None,
    )


def _check_then(op: str, x: Any, then: Any) -> None:
    """What is added and normalised has the shape and the dtype of ``x``."""
    if then is None:
        return
    check_fields(f"{op}: then", then, "None or an AddNorm", "residual", "gain", "eps")
    residual, gain = then.residual, then.gain
    op = f"{op}: then"
    tokens, hidden = x.shape
    size = {"tokens": tokens, "hidden": hidden}
    _bind(op, size, residual=(residual, "float", "tokens hidden"), gain=(gain, "float", "hidden"))
    _same_dtype(op, x=x, residual=residual)
    if not (is_static_number(then.eps) and float(then.eps) > 0):
        hint = "It is static, not an array."
        raise ArgumentError(f"{op}.eps", then.eps, "a finite Python number above 0", hint)


def _check_experts(op: str, weights: Any, limit: Any) -> None:
    if weights.dtype != jnp.float32:
        raise ArgumentError(f"{op}: weights", f"dtype {weights.dtype}", "float32")
    if limit is not None and not (is_static_number(limit) and float(limit) > 0):
        hint = "It is static, not an array."
        raise ArgumentError(f"{op}: limit", limit, "None or a finite Python number above 0", hint)


def matmul_fp8(x, weight, *, groups=1, quantise_rows=False) -> Problem:
    op = "matmul_fp8"
    checked_count(f"{op}: groups", groups, low=1)
    size = _bind(op, {}, x=(x, "float", "tokens channels"), weight=(weight, "e4m3", "out into"))
    if size["channels"] != groups * size["into"]:
        wanted = f"{groups * size['into']}: groups={groups} times into={size['into']}"
        raise ArgumentError(f"{op}: channels of x", size["channels"], wanted)
    if size["out"] % groups:
        raise ArgumentError(f"{op}: groups", groups, f"a divisor of out={size['out']}")
    check_flag(f"{op}: quantise_rows", quantise_rows)
    facts = {"groups": groups, "group_outputs": size["out"] // groups if groups > 1 else 0}
    sizes = _sizes(size, "tokens", "into", "out")
    return Problem.of(op, dtype=str(x.dtype), **sizes, **facts, quantise_rows=quantise_rows)


def routed_fp8(
    x, gate, up, down, weights, experts, *, limit=None, then=None, quantise_rows=False
) -> Problem:
    op = "routed_experts_fp8"
    size = _bind(
        op,
        {},
        x=(x, "float", "tokens hidden"),
        gate=(gate, "e4m3", "experts width hidden"),
        up=(up, "e4m3", "experts width hidden"),
        down=(down, "e4m3", "experts hidden width"),
        weights=(weights, "float", "tokens topk"),
        experts=(experts, "int", "tokens topk"),
    )
    _check_experts(op, weights, limit)
    _check_then(op, x, then)
    check_flag(f"{op}: quantise_rows", quantise_rows)
    return _routed(op, x, size, quantise_rows=quantise_rows)


def _routed(op: str, x: Any, size: dict[str, int], **more: bool) -> Problem:
    """Sizes, and how many rows an expert has on average."""
    names = "experts", "topk", "hidden", "width", "tokens"
    each = size["tokens"] * size["topk"] // max(size["experts"], 1)
    return Problem.of(op, dtype=str(x.dtype), **_sizes(size, *names), rows_each=each, **more)


def route(x, kernel, choice_bias, real, *, moe, first=False, norm=None) -> Problem:
    op = "route_tokens"
    check_flag(f"{op}: first", first)
    check_fields(f"{op}: moe", moe, "a MoEConfig", "experts", "topk", "groups", "method", "biased")
    more = {} if choice_bias is None else {"choice_bias": (choice_bias, "float", "experts")}
    if norm is not None:
        check_fields(f"{op}: norm", norm, "a RowNorm", "gain", "eps")
        check_eps(f"{op}: norm.eps", norm.eps)
        more["gain"] = norm.gain, "float", "hidden"
    size = _bind(
        op,
        {"experts": moe.experts},
        x=(x, "float", "tokens hidden"),
        kernel=(kernel, "float", "hidden experts"),
        real=(real, "bool", "tokens"),
        **more,
    )
    if choice_bias is not None and not moe.biased:
        raise ArgumentError(f"{op}: choice_bias with method {moe.method}", "an array", "None")
    facts = {"method": moe.method, "topk": moe.topk, "groups": moe.groups}
    return Problem.of(
        op, dtype=str(x.dtype), **facts, **_sizes(size, "experts", "hidden", "tokens")
    )


def matmul_float32(x, kernel) -> Problem:
    op = "matmul_float32"
    size = _bind(op, {}, x=(x, "float", "tokens hidden"), kernel=(kernel, "float", "hidden out"))
    return Problem.of(op, dtype=str(x.dtype), **_sizes(size, "hidden", "out", "tokens"))


def mix_streams(streams, proj, scale, bias, gain=None, *, rounds, eps, norm_eps) -> Problem:
    op = "mix_streams"
    checked_count(f"{op}: rounds", rounds, low=1, high=_MOST_ROUNDS)
    check_eps(f"{op}: eps", eps)
    check_eps(f"{op}: norm_eps", norm_eps)
    size = _bind(
        op,
        {"three": 3},
        streams=(streams, "float", "tokens streams hidden"),
        proj=(proj, "float", "streams hidden out"),
        scale=(scale, "float", "three"),
        bias=(bias, "float", "out"),
        **({} if gain is None else {"gain": (gain, "float", "hidden")}),
    )
    n = size["streams"]
    if size["out"] != (2 + n) * n:
        raise ArgumentError(f"{op}: columns of proj", size["out"], f"{(2 + n) * n}: (2 + n) n")
    return Problem.of(op, dtype=str(streams.dtype), **_sizes(size, "streams", "hidden", "tokens"))


def write_rows(cache, values, slots, *, layer=None) -> Problem:
    """Of a latent cache that of ``write_latent``, which stores its rows."""
    op = "write_rows"
    _layer(op, cache, layer, records=True)
    wanted = _values(op, cache)
    values = checked_parts(f"{op}: values", values, allowed=f"a tuple ({', '.join(wanted)})")
    if len(values) != len(wanted):
        allowed = f"{len(wanted)}: {', '.join(wanted)}"
        raise ArgumentError(f"{op}: values", len(values), allowed)
    arrays = {n: (x, "float", f"{n}_rows {n}") for n, x in zip(wanted, values, strict=True)}
    size = _bind(op, wanted, **arrays, slots=(slots, "int", "tokens"))
    for name in wanted:
        if size[f"{name}_rows"] < size["tokens"]:
            allowed = f"at least {size['tokens']}, one per slot"
            raise ArgumentError(f"{op}: rows of {name}", size[f"{name}_rows"], allowed)
    if isinstance(cache, LatentCache):
        latent = values[0]
        none = jax.ShapeDtypeStruct((latent.shape[0], 0), latent.dtype)
        return write(cache, latent, values[1] if cache.rope else none, slots, layer=layer)
    return Problem.of(op, **_any_cache(cache), tokens=size["tokens"])


def gather_rows(cache, slots, *, dtype, layer=None) -> Problem:
    op = "gather_rows"
    _layer(op, cache, layer, records=True)
    _values(op, cache)
    check_array(f"{op}: slots", slots)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ArgumentError(f"{op}: slots", f"dtype {slots.dtype}", "an integer dtype")
    out = dtype_name(f"{op}: dtype", dtype)
    return Problem.of(op, out=out, **_any_cache(cache), rows=math.prod(slots.shape))


def gather_codes(cache, slots, *, layer=None) -> Problem:
    op = "gather_codes"
    _layer(op, cache, layer, records=True)
    check_array(f"{op}: slots", slots)
    if not isinstance(cache, RecordCache) or cache.format.name != "index_key":
        hint = "gather_rows reads the values of any cache."
        raise ArgumentError(f"{op}: format of the cache", cache.format.name, "index_key", hint)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ArgumentError(f"{op}: slots", f"dtype {slots.dtype}", "an integer dtype")
    return Problem.of(op, **_any_cache(cache), rows=math.prod(slots.shape))


def check_selection(q, weights, cache, meta, k) -> int:
    """``k``, if these can be arguments of ``select_topk``; its parts compare axes."""
    op = "select_topk"
    check_cache(f"{op}: cache", cache, records=True)
    check_fields(f"{op}: meta", meta, "an IndexerMetadata", "decode", "prefill", "slots")
    if isinstance(cache, RecordCache) and cache.format.name != "index_key":
        allowed = "index_key, or a LatentCache without rotary channels"
        raise ArgumentError(f"{op}: format of the cache", cache.format.name, allowed)
    _bind(
        op,
        {},
        q=(q, "float", "tokens heads dim"),
        weights=(weights, "float", "tokens heads"),
        **{"meta.slots": (meta.slots, "int", "tokens")},
    )
    if meta.decode is None and meta.prefill is None:
        given = "neither decodes nor chunks of prefills"
        allowed = "rows that select: a step whose requests all attend densely has none"
        raise ArgumentError(f"{op}: meta", given, allowed, "Its tokens see all of their keys.")
    return _best(op, k)


def select_decode(q, weights, cache, page_table, lens, *, k, layer=None) -> Problem:
    op = "select_topk_decode"
    _layer(op, cache, layer, records=True)
    dim = sum(_values(op, cache).values())
    size = _bind(
        op,
        {"dim": dim},
        q=(q, "codes", "rows queries heads dim"),
        weights=(weights, "float", "rows queries heads"),
        page_table=(page_table, "int", "rows width"),
        lens=(lens, "int", "rows queries"),
    )
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **_any_cache(cache),
        **_sizes(size, "heads", "dim", "queries", "rows", "width"),
        k=_best(op, k),
    )


def select_prefill(q, weights, keys, starts, ends, *, k, scales=None) -> Problem:
    op = "select_topk_prefill"
    size = _bind(
        op,
        {},
        q=(q, "codes", "queries heads dim"),
        weights=(weights, "float", "queries heads"),
        keys=(keys, "float" if scales is None else "codes", "keys dim"),
        starts=(starts, "int", "queries"),
        ends=(ends, "int", "queries"),
        **({} if scales is None else {"scales": (scales, "float", "keys")}),
    )
    facts = _sizes(size, "heads", "dim", "queries", "keys")
    kinds = {"dtype": str(q.dtype), "keys_dtype": str(keys.dtype)}
    return Problem.of(op, **kinds, **facts, k=_best(op, k))


def _best(op: str, k: Any) -> int:
    return checked_count(f"{op}: k", k, low=1)


def logits(q, weights, keys) -> Problem:
    op = "indexer_logits"
    size = _bind(
        op,
        {},
        q=(q, "float", "tokens heads dim"),
        weights=(weights, "float", "tokens heads"),
        keys=(keys, "float", "keys dim"),
    )
    return Problem.of(op, dtype=str(q.dtype), **size)


def sparse_decode(
    q_latent, q_rope, cache, slots, *, scale, layer=None, lengths=None, sinks=None, extra=None,
    value=None, out_dtype=None,
) -> Problem:  # fmt: skip
    op = "mla_sparse_decode"
    _layer(op, cache, layer, records=True)
    row = sum(_values(op, cache).values())
    size = _sparse(op, q_latent, q_rope, row, slots, "slots", lengths, sinks, scale)
    more = {}
    if extra is not None:
        parts = "cache", "slots", "lengths", "layer"
        check_fields(f"{op}: extra", extra, "a SparseScope", *parts)
        _layer(f"{op}: extra", extra.cache, extra.layer, records=True)
        if sum(_values(op, extra.cache).values()) != row:
            given = sum(_values(op, extra.cache).values())
            raise ArgumentError(f"{op}: row of the extra cache", given, f"{row}, as the first's")
        lists = {"extra.slots": (extra.slots, "int", "tokens extra")}
        if extra.lengths is not None:
            lists["extra.lengths"] = (extra.lengths, "int", "tokens")
        size = _bind(op, size, **lists)
        more = {"extra_keys": size["extra"], "extra_cache": extra.cache.format.name}
    return Problem.of(
        op,
        dtype=str(q_latent.dtype),
        out=_out(op, out_dtype, q_latent),
        heads=size["heads"],
        cache=cache.format.name,
        rank=size["rank"],
        rope=size["rope"],
        value=_value(op, value, size["rank"], row),
        page=cache.page,
        keys=size["keys"],
        extra=extra is not None,
        **more,
        tokens=size["tokens"],
    )


def sparse_prefill(
    q_latent, q_rope, rows, indices, *, scale, lengths=None, sinks=None, value=None, out_dtype=None
) -> Problem:
    op = "mla_sparse_prefill"
    bound = _bind(op, {}, rows=(rows, "float", "rows row"))
    size = _sparse(op, q_latent, q_rope, bound["row"], indices, "indices", lengths, sinks, scale)
    return Problem.of(
        op,
        dtype=str(q_latent.dtype),
        out=_out(op, out_dtype, q_latent),
        heads=size["heads"],
        rank=size["rank"],
        rope=size["rope"],
        value=_value(op, value, size["rank"], bound["row"]),
        keys=size["keys"],
        tokens=size["tokens"],
        rows=bound["rows"],
        rows_dtype=str(rows.dtype),
    )


def _sparse(op, q_latent, q_rope, row, lists, name, lengths, sinks, scale) -> dict[str, int]:
    """Sizes of queries whose width is that of a row, and of their lists."""
    more = {} if lengths is None else {"lengths": (lengths, "int", "tokens")}
    more |= {} if sinks is None else {"sinks": (sinks, "float", "heads")}
    size = _bind(
        op,
        {},
        q_latent=(q_latent, "float", "tokens heads rank"),
        q_rope=(q_rope, "float", "tokens heads rope"),
        **{name: (lists, "int", "tokens keys")},
        **more,
    )
    _same_dtype(op, q_latent=q_latent, q_rope=q_rope)
    check_number(f"{op}: scale", scale)
    if size["rank"] + size["rope"] != row:
        given = f"q_latent {size['rank']} and q_rope {size['rope']}"
        raise ArgumentError(f"{op}: widths", given, f"together {row}, as a cached row")
    return size


def _value(op: str, value: Any, rank: int, row: int) -> int:
    """Columns of a row that are its value: the latent's by default."""
    columns = rank if value is None else value
    if not is_int(columns) or not 1 <= int(columns) <= row:
        raise ArgumentError(f"{op}: value", value, f"None, or 1 to {row} leading columns of a row")
    return int(columns)


def _values(op: str, cache: LatentCache | RecordCache) -> dict[str, int]:
    """Names and widths of what a row of the cache holds."""
    if isinstance(cache, RecordCache):
        _check_records(op, cache)
        return {f.name: f.count for f in cache.format.values}
    _cache_sizes(op, cache)
    return {"kv_latent": cache.rank} | ({"k_rope": cache.rope} if cache.rope else {})


def _check_records(op: str, cache: RecordCache) -> None:
    """Refuse pages that are not what ``RecordCache.alloc`` makes."""
    pages = cache.pages
    given = f"{pages.dtype}{list(pages.shape)}"
    width = cache.format.page_bytes(cache.page)
    if str(pages.dtype) != "uint8" or len(pages.shape) not in (2, 3) or pages.shape[-1] != width:
        allowed = f"uint8[pages, {width}] or uint8[layers, pages, {width}]"
        hint = f"A page has {cache.page} tokens. Build caches with RecordCache.alloc."
        raise ArgumentError(f"{op}: pages of the cache", given, allowed, hint)


def _any_cache(cache: LatentCache | RecordCache) -> dict[str, Any]:
    if isinstance(cache, LatentCache):
        return _cache_features(cache)
    return {"cache": cache.format.name, "row": cache.format.row, "page": cache.page}


def _bind(op: str, sizes: dict[str, int], **arrays: tuple[Any, str, str]) -> dict[str, int]:
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
        if len(x.shape) != len(names):
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


def _sizes(size: dict[str, int], *names: str) -> dict[str, int]:
    """Those of these axes, in this order."""
    return {name: size[name] for name in names}


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


def _cache_sizes(op: str, cache: LatentCache) -> dict[str, int]:
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


def _layer(
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


def _cache_features(cache: LatentCache) -> dict[str, Any]:
    return {
        "cache": cache.format.name,
        "rank": cache.rank,
        "rope": cache.rope,
        "page": cache.page,
    }


def _out(op: str, dtype: DTypeLike | None, like: Any) -> str:
    """The dtype of the result: that of ``like`` unless stated."""
    return dtype_name(f"{op}: out_dtype", like.dtype if dtype is None else dtype)


def _same_dtype(op: str, **arrays: Any) -> None:
    given = {name: str(x.dtype) for name, x in arrays.items()}
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ArgumentError(f"{op}: dtypes", text, "one dtype", "Cast before the call.")


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "write_latent": write,
    "append_latent": append,
    "append_window": append_window,
    "pool_states": pool_states,
    "gather_latent": gather,
    "copy_blocks": copy,
    "swap_blocks": swap,
    "mla_decode": decode,
    "mla_prefill": prefill,
    "merge_attn_states": merge,
    "apply_sinks": sinks,
    "route_tokens": route,
    "matmul_float32": matmul_float32,
    "mix_streams": mix_streams,
    "all_reduce": all_reduce,
    "routed_experts": routed,
    "routed_experts_fp8": routed_fp8,
    "matmul_fp8": matmul_fp8,
    "write_rows": write_rows,
    "gather_rows": gather_rows,
    "gather_codes": gather_codes,
    "indexer_logits": logits,
    "select_topk_decode": select_decode,
    "select_topk_prefill": select_prefill,
    "mla_sparse_decode": sparse_decode,
    "mla_sparse_prefill": sparse_prefill,
}
