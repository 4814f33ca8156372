"""The public operations: check the arguments, choose a backend, call it.

Arrays are positional, everything else is keyword-only. Every operation takes ``backend=None``,
the best one that qualifies; a name means that backend or an ``UnsupportedError``. All work
under ``jit``; the choice is made while tracing, from shapes, dtypes and the device alone.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache
from mla_jax.errors import ArgumentError
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.pallas import cache_io, dense_decode, dense_prefill, merge
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Registry
from mla_jax.types import Array, AttnState, Float, Int

__all__ = [
    "REGISTRY",
    "apply_sinks",
    "copy_blocks",
    "explain",
    "gather_latent",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "support_matrix",
    "swap_blocks",
    "write_latent",
]

REGISTRY = Registry(
    (
        *dense_decode.BACKENDS,
        *dense_prefill.BACKENDS,
        *cache_io.BACKENDS,
        *merge.BACKENDS,
    )
)

ACTIVATIONS = ("bfloat16", "float16", "float32")
"""Dtypes of queries, keys, values and outputs."""


def write_latent(
    cache: LatentCache,
    kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"],
    slots: Int[Array, "tokens"],
    *,
    backend: str | None = None,
) -> LatentCache:
    """Store ``[kv_latent | k_rope]`` of each token at its slot; slot -1 stores nothing.

    The data may have more rows than ``slots``: the surplus is ignored. Slots are distinct.
    """
    run = _choose(_write_problem(cache, kv_latent, k_rope, slots), backend)
    pages = run(cache.pages, cache.scale, kv_latent, k_rope, _int32(slots), format=cache.format)
    return dataclasses.replace(cache, pages=pages)


def gather_latent(
    cache: LatentCache,
    page_table: Int[Array, "requests width"],
    first: Int[Array, "requests"],
    row_starts: Int[Array, "starts"],
    *,
    rows: int,
    dtype: DTypeLike,
    backend: str | None = None,
) -> Float[Array, "{rows} row"]:
    """Cached rows of each request, from position ``first[r]`` on, laid end to end.

    Request ``r`` fills rows ``row_starts[r]`` to ``row_starts[r + 1]``; any start is allowed.
    Rows that nobody fills are zeros. A quantised cache is dequantised.
    """
    problem = _gather_problem(cache, page_table, first, row_starts, rows=rows, dtype=dtype)
    return _choose(problem, backend)(
        cache.pages,
        cache.scale,
        *map(_int32, (page_table, first, row_starts)),
        rows=rows,
        dtype=dtype,
        format=cache.format,
    )


def copy_blocks(
    cache: LatentCache, pairs: Int[Array, "pairs 2"], *, backend: str | None = None
) -> LatentCache:
    """Copy page ``src`` onto page ``dst`` for every pair ``(src, dst)``, all at once.

    Destinations are distinct; a chain ``(a, b), (b, c)`` gives ``c`` the old ``b``; a pair
    with a negative index is skipped.
    """
    run = _choose(_copy_problem(cache, pairs), backend)
    return dataclasses.replace(cache, pages=run(cache.pages, _int32(pairs)))


def swap_blocks(
    src: LatentCache,
    dst: LatentCache,
    pairs: Int[Array, "pairs 2"],
    *,
    backend: str | None = None,
) -> LatentCache:
    """Copy page ``i`` of ``src`` onto page ``j`` of ``dst`` for every pair ``(i, j)``.

    One way, bit for bit: quantised caches must have equal scales. Destinations are distinct;
    a pair with a negative index is skipped.
    """
    run = _choose(_swap_problem(src, dst, pairs), backend)
    return dataclasses.replace(dst, pages=run(src.pages, dst.pages, _int32(pairs)))


def mla_decode(
    q_latent: Float[Array, "tokens heads rank"],
    q_rope: Float[Array, "tokens heads rope"],
    cache: LatentCache,
    meta: DecodeMetadata,
    *,
    scale: float,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    tuning: object = None,
) -> AttnState:
    """Absorbed attention of a few queries per request over the request's pages.

    ``out = softmax(scale * [q_latent | q_rope] row^T) row[:rank]``, before the value
    up-projection; causal inside a request, bottom-right aligned. Padded tokens and requests
    of length 0 give ``(0, -inf)``. ``out`` has the dtype of ``q_latent`` unless stated.
    """
    out = q_latent.dtype if out_dtype is None else out_dtype
    problem = _decode_problem(q_latent, q_rope, cache, meta, scale=scale, out_dtype=out)
    return _choose(problem, backend, tuning)(
        q_latent,
        q_rope,
        cache.pages,
        cache.scale,
        *map(_int32, (meta.page_table, meta.seq_lens, meta.query_starts)),
        max_query_len=meta.max_query_len,
        scale=float(scale),
        format=cache.format,
        out_dtype=out,
    )


def mla_prefill(
    q: Float[Array, "tokens heads qk"],
    kv: Float[Array, "keys heads nope_v"],
    k_rope: Float[Array, "keys rope"],
    meta: PrefillMetadata,
    *,
    scale: float,
    causal: bool = True,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    tuning: object = None,
) -> AttnState:
    """Expanded attention over a ragged batch: ``softmax(scale * q [k_nope | k_rope]^T) v``.

    ``kv = [k_nope | v]`` per head, as the up-projection leaves it; ``k_rope`` is shared by all
    heads. Causal masks are aligned bottom-right; cached context takes ``causal=False`` and is
    merged. Queries without keys give ``(0, -inf)``. ``out`` has the dtype of ``q`` unless stated.
    """
    out = q.dtype if out_dtype is None else out_dtype
    problem = _prefill_problem(q, kv, k_rope, meta, scale=scale, causal=causal, out_dtype=out)
    return _choose(problem, backend, tuning)(
        q,
        kv,
        k_rope,
        *map(_int32, (meta.query_starts, meta.key_starts)),
        scale=float(scale),
        causal=causal,
        out_dtype=out,
    )


def merge_attn_states(
    *states: AttnState, out_dtype: DTypeLike | None = None, backend: str | None = None
) -> AttnState:
    """The state over all keys from states over disjoint parts of them.

    Associative and commutative up to rounding; the identity ``(0, -inf)`` changes no bit.
    Float32 inside; ``out`` has the dtype of the first state unless stated.
    """
    problem = _merge_problem(*states, out_dtype=out_dtype)
    return _choose(problem, backend)(*states, out_dtype=out_dtype or states[0].out.dtype)


def apply_sinks(
    state: AttnState, sinks: Float[Array, "heads"], *, backend: str | None = None
) -> AttnState:
    """One extra key per head with logit ``sink`` and value zero; ``lse`` is unchanged."""
    return _choose(_sinks_problem(state, sinks), backend)(state, sinks)


def explain(
    op: str,
    *args: Any,
    backend: str | None = None,
    device: DeviceInfo | None = None,
    **kwargs: Any,
) -> str:
    """Which backend would run ``op(*args, **kwargs)``, and why not the others.

    Arguments are those of the operation; arrays may be ``jax.ShapeDtypeStruct``. ``device`` is
    the current one unless stated.
    """
    if op not in _PROBLEMS:
        raise ArgumentError("explain: op", repr(op), ", ".join(_PROBLEMS))
    kwargs.pop("tuning", None)
    problem = _PROBLEMS[op](*args, **kwargs)
    return REGISTRY.explain(problem, device or DeviceInfo.current(), backend)


def support_matrix() -> str:
    """Every registered backend and what it requires, as a Markdown table."""
    return REGISTRY.support_matrix()


def _choose(problem: Problem, backend: str | None, tuning: object = None) -> Callable[..., Any]:
    chosen = REGISTRY.choose(problem, DeviceInfo.current(), backend)
    if tuning is None:
        return chosen.run
    name = f"{problem.op}[{chosen.name}]: tuning"
    if chosen.tuning is None:
        raise ArgumentError(name, tuning, "None (this backend has nothing to tune)")
    if not isinstance(tuning, chosen.tuning):
        raise ArgumentError(name, tuning, f"None or {chosen.tuning.__name__}")
    return lambda *args, **kwargs: chosen.run(*args, tuning=tuning, **kwargs)


def _int32(x: Array) -> Array:
    return x.astype(jnp.int32)


# One function per operation: refuse what does not fit, and name the problem.


def _write_problem(cache, kv_latent, k_rope, slots) -> Problem:
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


def _gather_problem(cache, page_table, first, row_starts, *, rows, dtype) -> Problem:
    size = _bind(
        "gather_latent",
        _cache_sizes("gather_latent", cache),
        page_table=(page_table, "int", "requests width"),
        first=(first, "int", "requests"),
        row_starts=(row_starts, "int", "requests+1"),
    )
    if not isinstance(rows, int) or rows < 0:
        raise ArgumentError("gather_latent: rows", rows, "a static int, 0 or more")
    return Problem.of(
        "gather_latent",
        out=_activation("gather_latent: dtype", dtype),
        **_cache_features(cache),
        rows=rows,
        requests=size["requests"],
        width=size["width"],
    )


def _copy_problem(cache, pairs) -> Problem:
    size = _cache_sizes("copy_blocks", cache) | {"2": 2}
    size = _bind("copy_blocks", size, pairs=(pairs, "int", "pairs 2"))
    return Problem.of("copy_blocks", **_cache_features(cache), pairs=size["pairs"])


def _swap_problem(src, dst, pairs) -> Problem:
    size = _cache_sizes("swap_blocks", dst) | {"2": 2}
    size = _bind("swap_blocks", size, pairs=(pairs, "int", "pairs 2"))
    given, allowed = _cache_features(src), _cache_features(dst)
    if given != allowed:
        raise ArgumentError("swap_blocks: src", given, f"{allowed}, as dst")
    _cache_sizes("swap_blocks", src)
    return Problem.of("swap_blocks", **allowed, pairs=size["pairs"])


def _decode_problem(q_latent, q_rope, cache, meta, *, scale, out_dtype=None) -> Problem:
    op = "mla_decode"
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
    _number(op, scale)
    if meta.max_query_len < 1:
        raise ArgumentError(f"{op}: max_query_len", meta.max_query_len, "1 or more")
    return Problem.of(
        "dense_decode",
        dtype=str(q_latent.dtype),
        out=_activation(f"{op}: out_dtype", out_dtype or q_latent.dtype),
        heads=size["heads"],
        **_cache_features(cache),
        max_query_len=meta.max_query_len,
        tokens=size["tokens"],
        requests=size["requests"],
        width=size["width"],
    )


def _prefill_problem(q, kv, k_rope, meta, *, scale, causal=True, out_dtype=None) -> Problem:
    op = "mla_prefill"
    size = _bind(
        op,
        {},
        q=(q, "float", "tokens heads qk"),
        kv=(kv, "float", "keys heads nope_v"),
        k_rope=(k_rope, "float", "keys rope"),
        query_starts=(meta.query_starts, "int", "requests+1"),
        key_starts=(meta.key_starts, "int", "requests+1"),
    )
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
    _number(op, scale)
    if not isinstance(causal, bool):
        raise ArgumentError(f"{op}: causal", causal, "True or False, static")
    return Problem.of(
        "dense_prefill",
        dtype=str(q.dtype),
        out=_activation(f"{op}: out_dtype", out_dtype or q.dtype),
        heads=size["heads"],
        nope=nope,
        rope=size["rope"],
        v=v,
        causal=causal,
        tokens=size["tokens"],
        keys=size["keys"],
        requests=size["requests"],
    )


def _merge_problem(*states, out_dtype=None) -> Problem:
    op = "merge_attn_states"
    if not states:
        raise ArgumentError(f"{op}: states", "none", "one or more")
    size: dict[str, int] = {}
    for i, s in enumerate(states):
        arrays = {
            f"states[{i}].out": (s.out, "float", "tokens heads dim"),
            f"states[{i}].lse": (s.lse, "float", "tokens heads"),
        }
        size = _bind(op, size, **arrays)
    return Problem.of(
        op,
        dtype=str(states[0].out.dtype),
        out=_activation(f"{op}: out_dtype", out_dtype or states[0].out.dtype),
        states=len(states),
        **size,
    )


def _sinks_problem(state, sinks) -> Problem:
    size = _bind(
        "apply_sinks",
        {},
        out=(state.out, "float", "tokens heads dim"),
        lse=(state.lse, "float", "tokens heads"),
        sinks=(sinks, "float", "heads"),
    )
    return Problem.of("apply_sinks", dtype=str(state.out.dtype), **size)


_PROBLEMS: dict[str, Callable[..., Problem]] = {
    "write_latent": _write_problem,
    "gather_latent": _gather_problem,
    "copy_blocks": _copy_problem,
    "swap_blocks": _swap_problem,
    "mla_decode": _decode_problem,
    "mla_prefill": _prefill_problem,
    "merge_attn_states": _merge_problem,
    "apply_sinks": _sinks_problem,
}


def _bind(op: str, sizes: dict[str, int], **arrays: tuple[Any, str, str]) -> dict[str, int]:
    """Sizes of all named axes, given some of them; each array is ``(array, kind, axes)``.

    ``requests+1`` is an axis one longer than ``requests``.
    """
    sizes = dict(sizes)
    for name, (x, kind, axes) in arrays.items():
        what = f"{op}: {name}"
        names = axes.split()
        if len(x.shape) != len(names):
            raise ArgumentError(what, f"shape {tuple(x.shape)}", f"[{', '.join(names)}]")
        if kind == "int" and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ArgumentError(what, f"dtype {x.dtype}", "an integer dtype")
        if kind == "float":
            _activation(what, x.dtype)
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


def _cache_sizes(op: str, cache: LatentCache) -> dict[str, int]:
    if cache.pages.dtype != jnp.dtype(cache.format.dtype):
        raise ArgumentError(
            f"{op}: dtype of cache.pages",
            cache.pages.dtype,
            f"{cache.format.dtype}, as format {cache.format.name} stores",
            "Build caches with LatentCache.alloc.",
        )
    return {"rank": cache.rank, "rope": cache.rope}


def _cache_features(cache: LatentCache) -> dict[str, Any]:
    return {
        "cache": cache.format.name,
        "rank": cache.rank,
        "rope": cache.rope,
        "page": cache.page,
    }


def _activation(what: str, dtype: DTypeLike) -> str:
    name = jnp.dtype(dtype).name
    if name not in ACTIVATIONS:
        raise ArgumentError(what, f"dtype {name}", ", ".join(ACTIVATIONS))
    return name


def _same_dtype(op: str, **arrays: Any) -> None:
    given = {name: str(x.dtype) for name, x in arrays.items()}
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ArgumentError(f"{op}: dtypes", text, "one dtype", "Cast before the call.")


def _number(op: str, scale: Any) -> None:
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ArgumentError(
            f"{op}: scale",
            scale,
            "a finite Python number",
            "It is static, not an array.",
        )
