"""Problems of attention, and of its partial results."""

from typing import Any

import jax

from mla_jax.checks import is_int
from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import (
    check_array,
    check_cache,
    check_fields,
    check_flag,
    check_number,
    checked_count,
    dtype_name,
)
from mla_jax.pallas.problems.parts import (
    bind,
    cache_features,
    cache_sizes,
    check_layer,
    check_same_dtype,
    result_dtype,
    row_values,
)
from mla_jax.pallas.registry import Problem

__all__ = [
    "decode",
    "merge",
    "plan_decode",
    "plan_prefill",
    "prefill",
    "sinks",
    "sparse_decode",
    "sparse_prefill",
]


def decode(q_latent, q_rope, cache, meta, *, scale, out_dtype=None, layer=None) -> Problem:
    op = "mla_decode"
    check_array(f"{op}: q_latent", q_latent)
    check_layer(op, cache, layer)
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
    size = bind(
        op,
        cache_sizes(op, cache),
        q_latent=(q_latent, "float", "tokens heads rank"),
        q_rope=(q_rope, "float", "tokens heads rope"),
        page_table=(meta.page_table, "int", "requests width"),
        seq_lens=(meta.seq_lens, "int", "requests"),
        query_starts=(meta.query_starts, "int", "requests+1"),
    )
    check_same_dtype(op, q_latent=q_latent, q_rope=q_rope)
    check_number(f"{op}: scale", scale)
    checked_count(f"{op}: max_query_len", meta.max_query_len, low=1)
    return Problem.of(
        "mla_decode",
        dtype=str(q_latent.dtype),
        out=result_dtype(op, out_dtype, q_latent),
        heads=size["heads"],
        **cache_features(cache),
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
    size = bind(
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
    check_same_dtype(op, q=q, kv=kv, k_rope=k_rope)
    check_number(f"{op}: scale", scale)
    check_flag(f"{op}: causal", causal)
    return Problem.of(
        "mla_prefill",
        dtype=str(q.dtype),
        out=result_dtype(op, out_dtype, q),
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
        size = bind(op, size, **arrays)
    return Problem.of(
        op,
        dtype=str(states[0].out.dtype),
        out=result_dtype(op, out_dtype, states[0].out),
        states=len(states),
        **size,
    )


def sinks(state, sinks) -> Problem:
    check_fields("apply_sinks: state", state, "an AttnState", "out", "lse")
    size = bind(
        "apply_sinks",
        {},
        out=(state.out, "float", "tokens heads dim"),
        lse=(state.lse, "float", "tokens heads"),
        sinks=(sinks, "float", "heads"),
    )
    return Problem.of("apply_sinks", dtype=str(state.out.dtype), **size)


def sparse_decode(
    q_latent, q_rope, cache, slots, *, scale, layer=None, lengths=None, sinks=None, extra=None,
    value=None, out_dtype=None,
) -> Problem:  # fmt: skip
    op = "mla_sparse_decode"
    check_layer(op, cache, layer, records=True)
    row = sum(row_values(op, cache).values())
    size = _sparse(op, q_latent, q_rope, row, slots, "slots", lengths, sinks, scale)
    more = {}
    if extra is not None:
        parts = "cache", "slots", "lengths", "layer"
        check_fields(f"{op}: extra", extra, "a SparseScope", *parts)
        check_layer(f"{op}: extra", extra.cache, extra.layer, records=True)
        if sum(row_values(op, extra.cache).values()) != row:
            given = sum(row_values(op, extra.cache).values())
            raise ArgumentError(f"{op}: row of the extra cache", given, f"{row}, as the first's")
        lists = {"extra.slots": (extra.slots, "int", "tokens extra")}
        if extra.lengths is not None:
            lists["extra.lengths"] = (extra.lengths, "int", "tokens")
        size = bind(op, size, **lists)
        more = {"extra_keys": size["extra"], "extra_cache": extra.cache.format.name}
    return Problem.of(
        op,
        dtype=str(q_latent.dtype),
        out=result_dtype(op, out_dtype, q_latent),
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
    bound = bind(op, {}, rows=(rows, "float", "rows row"))
    size = _sparse(op, q_latent, q_rope, bound["row"], indices, "indices", lengths, sinks, scale)
    return Problem.of(
        op,
        dtype=str(q_latent.dtype),
        out=result_dtype(op, out_dtype, q_latent),
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
    size = bind(
        op,
        {},
        q_latent=(q_latent, "float", "tokens heads rank"),
        q_rope=(q_rope, "float", "tokens heads rope"),
        **{name: (lists, "int", "tokens keys")},
        **more,
    )
    check_same_dtype(op, q_latent=q_latent, q_rope=q_rope)
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
