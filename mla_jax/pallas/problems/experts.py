"""Problems of the router, the experts, products with e4m3 weights, sums over devices, streams."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import (
    check_eps,
    check_fields,
    check_flag,
    checked_count,
    is_static_number,
)
from mla_jax.pallas.problems.parts import bind, check_same_dtype, sizes_of
from mla_jax.pallas.registry import Problem

__all__ = [
    "all_reduce",
    "matmul_float32",
    "matmul_fp8",
    "mix_streams",
    "route",
    "routed",
    "routed_fp8",
]

_MOST_ROUNDS = 1000  # of Sinkhorn's iteration, which is written out; models take 20


def routed(x, gate, up, down, weights, experts, *, limit=None, then=None) -> Problem:
    op = "routed_experts"
    size = bind(
        op,
        {},
        x=(x, "float", "tokens hidden"),
        gate=(gate, "float", "experts hidden width"),
        up=(up, "float", "experts hidden width"),
        down=(down, "float", "experts width hidden"),
        weights=(weights, "float", "tokens topk"),
        experts=(experts, "int", "tokens topk"),
    )
    check_same_dtype(op, x=x, gate=gate, up=up, down=down)
    _check_experts(op, weights, limit)
    _check_then(op, x, then)
    return _routed(op, x, size)


def routed_fp8(
    x, gate, up, down, weights, experts, *, limit=None, then=None, quantise_rows=False
) -> Problem:
    op = "routed_experts_fp8"
    size = bind(
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
    return Problem.of(op, dtype=str(x.dtype), **sizes_of(size, *names), rows_each=each, **more)


def _check_experts(op: str, weights: Any, limit: Any) -> None:
    if weights.dtype != jnp.float32:
        raise ArgumentError(f"{op}: weights", f"dtype {weights.dtype}", "float32")
    if limit is not None and not (is_static_number(limit) and float(limit) > 0):
        hint = "It is static, not an array."
        raise ArgumentError(f"{op}: limit", limit, "None or a finite Python number above 0", hint)


def matmul_fp8(x, weight, *, groups=1, quantise_rows=False) -> Problem:
    op = "matmul_fp8"
    checked_count(f"{op}: groups", groups, low=1)
    size = bind(op, {}, x=(x, "float", "tokens channels"), weight=(weight, "e4m3", "out into"))
    if size["channels"] != groups * size["into"]:
        wanted = f"{groups * size['into']}: groups={groups} times into={size['into']}"
        raise ArgumentError(f"{op}: channels of x", size["channels"], wanted)
    if size["out"] % groups:
        raise ArgumentError(f"{op}: groups", groups, f"a divisor of out={size['out']}")
    check_flag(f"{op}: quantise_rows", quantise_rows)
    facts = {"groups": groups, "group_outputs": size["out"] // groups if groups > 1 else 0}
    sizes = sizes_of(size, "tokens", "into", "out")
    return Problem.of(op, dtype=str(x.dtype), **sizes, **facts, quantise_rows=quantise_rows)


def all_reduce(x, *, axis, peers=None, then=None) -> Problem:
    op = "all_reduce"
    bind(op, {}, x=(x, "float", "tokens hidden"))
    try:
        devices = lax.axis_size(axis)
    except (NameError, TypeError, ValueError):
        allowed = "a name of the mesh's axes, inside of jax.shard_map"
        raise ArgumentError(f"{op}: axis", repr(axis), allowed) from None
    if peers is not None:
        check_fields(f"{op}: peers", peers, "None or the peers of a PeerMemory", "table")
        sizes = {"one": 1, "words": 2 + 2 * devices}
        bind(f"{op}: peers", sizes, table=(peers.table, "int", "one words"))
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
    bind(op, size, residual=(residual, "float", "tokens hidden"), gain=(gain, "float", "hidden"))
    check_same_dtype(op, x=x, residual=residual)
    if not (is_static_number(then.eps) and float(then.eps) > 0):
        hint = "It is static, not an array."
        raise ArgumentError(f"{op}.eps", then.eps, "a finite Python number above 0", hint)


def route(x, kernel, choice_bias, real, *, moe, first=False, norm=None) -> Problem:
    op = "route_tokens"
    check_flag(f"{op}: first", first)
    check_fields(f"{op}: moe", moe, "a MoEConfig", "experts", "topk", "groups", "method", "biased")
    more = {} if choice_bias is None else {"choice_bias": (choice_bias, "float", "experts")}
    if norm is not None:
        check_fields(f"{op}: norm", norm, "a RowNorm", "gain", "eps")
        check_eps(f"{op}: norm.eps", norm.eps)
        more["gain"] = norm.gain, "float", "hidden"
    size = bind(
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
        op, dtype=str(x.dtype), **facts, **sizes_of(size, "experts", "hidden", "tokens")
    )


def matmul_float32(x, kernel) -> Problem:
    op = "matmul_float32"
    size = bind(op, {}, x=(x, "float", "tokens hidden"), kernel=(kernel, "float", "hidden out"))
    return Problem.of(op, dtype=str(x.dtype), **sizes_of(size, "hidden", "out", "tokens"))


def mix_streams(streams, proj, scale, bias, gain=None, *, rounds, eps, norm_eps) -> Problem:
    op = "mix_streams"
    checked_count(f"{op}: rounds", rounds, low=1, high=_MOST_ROUNDS)
    check_eps(f"{op}: eps", eps)
    check_eps(f"{op}: norm_eps", norm_eps)
    size = bind(
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
    return Problem.of(op, dtype=str(streams.dtype), **sizes_of(size, "streams", "hidden", "tokens"))
