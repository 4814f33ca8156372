"""The public operations: check the arguments, choose a backend, call it.

Arrays are positional, everything else is keyword-only. Every operation takes ``backend=None``,
the best one that qualifies; a name means that backend or an ``UnsupportedError``. All work
under ``jit``; the choice is made while tracing, from shapes, dtypes and the device alone.
Those of sparse attention are in ``sparse_ops``. Arguments that do not fit each other or the cache
raise an ``ArgumentError``.
"""

import dataclasses
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.config import MoEConfig
from mla_jax.dispatch import (
    REGISTRY,
    Layer,
    backend_of,
    choose,
    explain,
    in_one_kernel,
    int32,
    named,
    number,
    support_matrix,
    tuned,
)
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.pallas import problems
from mla_jax.pallas.axes import (
    AddNorm,
    Choices,
    ChoiceWeights,
    ExpertsIn,
    ExpertsOut,
    Hidden,
    Mixed,
    RowNorm,
    StreamRows,
)
from mla_jax.pallas.registry import Problem
from mla_jax.peers import Peers
from mla_jax.sparse_ops import (
    append_window,
    indexer_logits,
    mla_sparse_decode,
    mla_sparse_prefill,
    pool_states,
    select_topk,
)
from mla_jax.types import Array, AttnState, BlockScaled, Bool, Float, Int, gathered

__all__ = [
    "REGISTRY",
    "AddNorm",
    "RowNorm",
    "all_reduce",
    "append_latent",
    "append_window",
    "apply_sinks",
    "backend_of",
    "copy_blocks",
    "explain",
    "gather_codes",
    "gather_latent",
    "gather_rows",
    "in_one_kernel",
    "indexer_logits",
    "matmul_float32",
    "matmul_fp8",
    "merge_attn_states",
    "mix_streams",
    "mla_decode",
    "mla_prefill",
    "mla_sparse_decode",
    "mla_sparse_prefill",
    "named",
    "plan_decode",
    "plan_prefill",
    "pool_states",
    "route_tokens",
    "routed_experts",
    "routed_experts_fp8",
    "select_topk",
    "support_matrix",
    "swap_blocks",
    "write_latent",
    "write_rows",
]


def write_latent(
    cache: LatentCache,
    kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"],
    slots: Int[Array, "tokens"],
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> LatentCache:
    """Store ``[kv_latent | k_rope]`` of each token at its slot; slot -1 stores nothing.

    The data may have more rows than ``slots``: the surplus is ignored. Slots are distinct, and
    one behind the cache stores nothing. ``layer`` is the one of a stack, which stays in place; an
    array that names none of its layers stores nothing.
    """
    run = choose(problems.write(cache, kv_latent, k_rope, slots, layer=layer), backend)
    pages = run(
        cache.pages,
        cache.scale,
        gathered(kv_latent),
        gathered(k_rope),
        int32(slots),
        layer=number(layer),
        format=cache.format,
    )
    return dataclasses.replace(cache, pages=pages)


def append_latent(
    cache: LatentCache,
    q: Float[Array, "tokens heads qk"],
    kv: Float[Array, "tokens row"],
    gain: Float[Array, "rank"],
    angles: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
    slots: Int[Array, "tokens"],
    *,
    eps: float,
    interleaved: bool,
    layer: Layer = None,
    up_k: Float[Array, "heads nope rank"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "tokens heads first"], Float[Array, "tokens heads rope"], LatentCache]:
    """Store a decode step's new rows and rotate its queries: ``(q_nope, q_rope, cache)``.

    Of each token ``[norm(latent) | rotate(k_rope)]`` is stored at its slot, ``[latent | k_rope]``
    being its row of ``kv``, with ``norm(c) = gain * c / sqrt(mean(c^2) + eps)``; slot -1 stores
    nothing. The last ``rope`` columns of ``q`` are rotated. ``angles`` are cos and sin of each
    token's pairs: channels ``(2i, 2i + 1)`` if ``interleaved``, else ``(i, i + rope / 2)``. All is
    computed in float32 and rounded to the dtype of ``q``, then to that of the cache.

    With ``up_k``, the up-projection ``U_k^T`` of the keys of each head, the first result is
    ``q_latent = q_nope U_k^T`` ``[tokens, heads, rank]``, what ``mla_decode`` takes: accumulated
    in float32 and rounded once.
    """
    problem = problems.append(
        cache, q, kv, gain, angles, slots, eps=eps, interleaved=interleaved, layer=layer, up_k=up_k
    )
    first, q_rope, pages = choose(problem, backend)(
        cache.pages,
        cache.scale,
        q,
        kv,
        gain,
        *angles,
        int32(slots),
        eps=eps,
        interleaved=interleaved,
        layer=number(layer),
        up_k=up_k,
        format=cache.format,
    )
    return first, q_rope, dataclasses.replace(cache, pages=pages)


def gather_latent(
    cache: LatentCache,
    page_table: Int[Array, "requests width"],
    first: Int[Array, "requests"],
    row_starts: Int[Array, "starts"],
    *,
    rows: int,
    dtype: DTypeLike,
    layer: Layer = None,
    backend: str | None = None,
) -> Float[Array, "{rows} row"]:
    """Cached rows of each request, from position ``first[r]`` on, laid end to end.

    Request ``r`` fills rows ``row_starts[r]`` to ``row_starts[r + 1]``; any start is allowed.
    Rows that no request fills are zeros. A quantised cache is dequantised. ``layer`` is the one of
    a stack; an array is clamped to its layers.
    """
    problem = problems.gather(
        cache, page_table, first, row_starts, rows=rows, dtype=dtype, layer=layer
    )
    return choose(problem, backend)(
        cache.pages,
        cache.scale,
        *map(int32, (page_table, first, row_starts)),
        layer=number(layer),
        rows=int(rows),
        dtype=dtype,
        format=cache.format,
    )


def copy_blocks(
    cache: LatentCache,
    pairs: Int[Array, "pairs 2"],
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> LatentCache:
    """Copy page ``src`` onto page ``dst`` for every pair ``(src, dst)``, all at once.

    Destinations are distinct; a chain ``(a, b), (b, c)`` gives ``c`` the old ``b``; a pair
    with a negative index is skipped. In a stack the pages move in every layer, or in ``layer``
    alone.
    """
    run = choose(problems.copy(cache, pairs, layer=layer), backend)
    pages = run(cache.pages, int32(pairs), layer=number(layer))
    return dataclasses.replace(cache, pages=pages)


def swap_blocks(
    src: LatentCache,
    dst: LatentCache,
    pairs: Int[Array, "pairs 2"],
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> LatentCache:
    """Copy page ``i`` of ``src`` onto page ``j`` of ``dst`` for every pair ``(i, j)``.

    One way, bit for bit: quantised caches must have equal scales. Destinations are distinct;
    a pair with a negative index is skipped. Between stacks, which have equally many layers, the
    pages move in every layer, or in ``layer`` alone.
    """
    run = choose(problems.swap(src, dst, pairs, layer=layer), backend)
    pages = run(src.pages, dst.pages, int32(pairs), layer=number(layer))
    return dataclasses.replace(dst, pages=pages)


def mla_decode(
    q_latent: Float[Array, "tokens heads rank"],
    q_rope: Float[Array, "tokens heads rope"],
    cache: LatentCache,
    meta: DecodeMetadata,
    *,
    scale: float,
    layer: Layer = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    tuning: object = None,
    plan: object = None,
) -> AttnState:
    """Absorbed attention of a few queries per request over the request's pages.

    ``out = softmax(scale * [q_latent | q_rope] row^T) row[:rank]``, before the value
    up-projection; causal inside a request, bottom-right aligned. Padded tokens and requests
    of length 0 give ``(0, -inf)``. ``out`` has the dtype of ``q_latent`` unless stated.
    ``plan`` is ``plan_decode`` of the same arguments; without it one is made for this call.
    ``layer`` is the one of a stacked cache; an array is clamped to its layers.
    """
    problem = problems.decode(
        q_latent, q_rope, cache, meta, scale=scale, out_dtype=out_dtype, layer=layer
    )
    return choose(problem, backend, tuning, plan)(
        gathered(q_latent, 1),
        gathered(q_rope, 1),
        cache.pages,
        cache.scale,
        *map(int32, (meta.page_table, meta.seq_lens, meta.query_starts)),
        layer=number(layer),
        max_query_len=meta.max_query_len,
        scale=float(scale),
        format=cache.format,
        out_dtype=_out_dtype(problem),
    )


def plan_decode(
    meta: DecodeMetadata,
    cache: LatentCache,
    *,
    tokens: int,
    heads: int,
    dtype: DTypeLike,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    tuning: object = None,
) -> Any:
    """The division of ``mla_decode``'s work: made once per step, the same for all layers.

    Depends on lengths alone; ``tokens``, ``heads`` and ``dtype`` are those of the queries. A
    stacked cache is taken as it is. None where the backend makes no plan.
    """
    problem = problems.plan_decode(
        cache, meta, tokens=tokens, heads=heads, dtype=dtype, out_dtype=out_dtype
    )
    chosen, tuning = tuned(problem, backend, tuning)
    if chosen.plan is None:
        return None
    return chosen.plan(
        *map(int32, (meta.seq_lens, meta.query_starts)),
        tokens=int(tokens),
        heads=int(heads),
        max_query_len=meta.max_query_len,
        page=cache.page,
        width=meta.page_table.shape[1],
        tuning=tuning,
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
    plan: object = None,
) -> AttnState:
    """Expanded attention over a ragged batch: ``softmax(scale * q [k_nope | k_rope]^T) v``.

    ``kv = [k_nope | v]`` per head, as the up-projection leaves it; ``k_rope`` is shared by all
    heads. Causal masks are aligned bottom-right; cached context takes ``causal=False`` and is
    merged. Queries without keys give ``(0, -inf)``. ``out`` has the dtype of ``q`` unless stated.
    ``plan`` is ``plan_prefill`` of the same arguments; without it one is made for this call.
    """
    facts: dict[str, Any] = {"scale": scale, "causal": causal, "out_dtype": out_dtype}
    problem = problems.prefill(q, kv, k_rope, meta, **facts)
    return choose(problem, backend, tuning, plan)(
        gathered(q, 1),
        gathered(kv, 1),
        gathered(k_rope),
        *map(int32, (meta.query_starts, meta.key_starts)),
        scale=float(scale),
        causal=causal,
        out_dtype=_out_dtype(problem),
    )


def plan_prefill(
    meta: PrefillMetadata,
    *,
    tokens: int,
    keys: int,
    heads: int,
    nope: int,
    rope: int,
    v: int,
    dtype: DTypeLike,
    causal: bool = True,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    tuning: object = None,
) -> Any:
    """Which tiles of queries see which keys in ``mla_prefill``: once per step, for all layers.

    Depends on lengths alone; sizes and ``dtype`` are those of ``q [tokens, heads, nope + rope]``
    and ``kv [keys, heads, nope + v]``. None where the backend makes no plan.
    """
    sizes = {"tokens": tokens, "keys": keys, "heads": heads, "nope": nope, "rope": rope, "v": v}
    problem = problems.plan_prefill(meta, **sizes, dtype=dtype, causal=causal, out_dtype=out_dtype)
    chosen, tuning = tuned(problem, backend, tuning)
    if chosen.plan is None:
        return None
    starts = map(int32, (meta.query_starts, meta.key_starts))
    sizes = {"tokens": int(tokens), "keys": int(keys)}
    return chosen.plan(*starts, **sizes, causal=causal, tuning=tuning)


def merge_attn_states(
    *states: AttnState, out_dtype: DTypeLike | None = None, backend: str | None = None
) -> AttnState:
    """The state over all keys from states over disjoint parts of them.

    Associative and commutative up to rounding; the identity ``(0, -inf)`` changes no bit, except
    that -0 becomes 0.
    Float32 inside; ``out`` has the dtype of the first state unless stated.
    """
    problem = problems.merge(*states, out_dtype=out_dtype)
    return choose(problem, backend)(*states, out_dtype=_out_dtype(problem))


def _out_dtype(problem: Problem) -> jnp.dtype:
    return jnp.dtype(str(problem["out"]))


def apply_sinks(
    state: AttnState, sinks: Float[Array, "heads"], *, backend: str | None = None
) -> AttnState:
    """One extra key per head with logit ``sink`` and value zero; ``lse`` is unchanged."""
    return choose(problems.sinks(state, sinks), backend)(state, sinks)


@overload
def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig, first: Literal[False] = False,
    norm: None = None, backend: str | None = None,
) -> tuple[ChoiceWeights, Choices]: ...  # fmt: skip


@overload
def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig, first: Literal[True],
    norm: RowNorm | None = None, backend: str | None = None,
) -> tuple[ChoiceWeights, Choices, Hidden]: ...  # fmt: skip


def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig, first: bool = False,
    norm: RowNorm | None = None, backend: str | None = None,
) -> tuple[ChoiceWeights, Choices] | tuple[ChoiceWeights, Choices, Hidden]:  # fmt: skip
    """``(weights, experts)`` of each token: the best of ``scores(x @ kernel)``, as ``moe`` says.

    Logits and weights are float32, whatever the dtype of ``x``; of equal scores the lower index is
    taken. A token that is not real has experts -1. ``choice_bias`` is added to the scores for the
    choice alone (``noaux_tc``). Scores, groups and weights: ``pallas/router/ref.py``.

    With ``first`` the result is ``(weights, experts, x)``. ``x`` has not changed, but on a GPU what
    is computed from it starts after the logits: shared experts then do not delay the choice.

    With ``norm=RowNorm(gain, eps)`` each row is normalised first, ``gain * x / sqrt(mean(x^2) +
    eps)``, and rounded to x's dtype. The result is ``(weights, experts, normalised x)``. For up to
    16 tokens the kernel of the logits normalises.
    """
    facts = {"moe": moe, "first": first, "norm": norm}
    run = choose(problems.route(x, kernel, choice_bias, real, **facts), backend)
    return run(x, kernel, choice_bias, real, **facts)


def matmul_float32(
    x: Hidden, kernel: Float[Array, "hidden out"], *, backend: str | None = None
) -> Float[Array, "tokens out"]:
    """``x @ kernel`` in float32, never TF32, whatever the dtype of ``x``; for few columns.

    Routers, gates and the heads' weights of an indexer are such products: too narrow to fill a
    machine by cuBLAS, and rounded by less than the choices that follow from them may be.
    """
    run = choose(problems.matmul_float32(x, kernel), backend)
    return run(x, kernel)


def mix_streams(
    streams: StreamRows, proj: Float[Array, "streams hidden out"], scale: Float[Array, "3"],
    bias: Float[Array, "out"], gain: Float[Array, "hidden"] | None = None, *, rounds: int,
    eps: float, norm_eps: float, backend: str | None = None,
) -> Mixed:  # fmt: skip
    """``(x, post, M)`` of hyper-connections: what a sub-block reads, and how it is given back.

    With ``z = W rms(vec(S))``, cut into n, n and n x n entries, ``x = sum_n pre_n S_n`` with ``pre
    = sigmoid(a_0 z_pre + b_pre) + eps``, ``post = 2 sigmoid(a_1 z_post + b_post)``, and ``M`` is
    Sinkhorn's matrix of ``softmax_rows(a_2 z_mix + b_mix) + eps``; all in float32, x rounded once.
    With ``gain`` x is normalised then: ``gain x / sqrt(mean(x^2) + norm_eps)``.
    Source: mHC, arXiv:2512.24880; DeepSeek-V4.
    """
    facts = {"rounds": rounds, "eps": eps, "norm_eps": norm_eps}
    given = streams, proj, scale, bias, gain
    run = choose(problems.mix_streams(*given, **facts), backend)
    return run(*given, rounds=rounds, eps=float(eps), norm_eps=float(norm_eps))


@overload
def all_reduce(
    x: Hidden, *, axis: str, peers: Peers | None = None, then: None = None,
    backend: str | None = None,
) -> Hidden: ...  # fmt: skip


@overload
def all_reduce(
    x: Hidden, *, axis: str, peers: Peers | None = None, then: AddNorm, backend: str | None = None
) -> tuple[Hidden, Hidden]: ...


def all_reduce(
    x: Hidden, *, axis: str, peers: Peers | None = None, then: AddNorm | None = None,
    backend: str | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``y = sum_d x_d`` over the devices ``d`` along a mesh axis, on each of them.

    Inside of ``jax.shard_map`` with ``check_vma=False``. ``then=AddNorm(residual, gain, eps)``
    returns ``(h, norm(h))`` instead, ``h = residual + y``, as ``routed_experts`` does; all devices
    give the same. A kernel needs ``peers``, a device's row of a ``PeerMemory`` of these devices; it
    adds in float32 and rounds once, in the same order everywhere. XLA's sum may round after each.
    """
    problem = problems.all_reduce(x, axis=axis, peers=peers, then=then)
    return choose(problem, backend)(x, axis=axis, peers=peers, then=then)


@overload
def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: None = None, backend: str | None = None,
    tuning: object = None,
) -> Hidden: ...  # fmt: skip


@overload
def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm, backend: str | None = None,
    tuning: object = None,
) -> tuple[Hidden, Hidden]: ...  # fmt: skip


def routed_experts(
    x: Hidden, gate: ExpertsIn, up: ExpertsIn, down: ExpertsOut, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
    backend: str | None = None, tuning: object = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``y_t = sum_k weights[t, k] * down_e (silu(gate_e x_t) * up_e x_t)``, ``e = experts[t, k]``.

    An index that is no expert (padding: -1, or the number of experts) adds nothing, whatever the
    token's row and weight hold; where all are, the result is 0. ``limit`` clamps the gate from
    above and ``up x`` from both sides before the product (V4). ``weights`` are float32; products
    accumulate in float32 and each is rounded to x's dtype, the sum is rounded once.

    ``then=AddNorm(residual, gain, eps)`` returns ``(h, norm(h))`` instead, ``h = residual + y`` and
    ``norm(h) = gain * h / sqrt(mean(h^2) + eps)``: what the next sub-block reads, in one kernel.
    """
    problem = problems.routed(x, gate, up, down, weights, experts, limit=limit, then=then)
    run = choose(problem, backend, tuning)
    clamp = None if limit is None else float(limit)
    return run(x, gate, up, down, weights, int32(experts), limit=clamp, then=then)


@overload
def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: None = None, quantise_rows: bool = False,
    backend: str | None = None,
) -> Hidden: ...  # fmt: skip


@overload
def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm, quantise_rows: bool = False,
    backend: str | None = None,
) -> tuple[Hidden, Hidden]: ...  # fmt: skip


def routed_experts_fp8(
    x: Hidden, gate: BlockScaled, up: BlockScaled, down: BlockScaled, weights: ChoiceWeights,
    experts: Choices, *, limit: float | None = None, then: AddNorm | None = None,
    quantise_rows: bool = False, backend: str | None = None,
) -> Hidden | tuple[Hidden, Hidden]:  # fmt: skip
    """``routed_experts`` with e4m3 weights in 128 x 128 blocks as published: rows are outputs.

    ``gate`` and ``up`` are [experts, width, hidden], ``down`` is [experts, hidden, width]. The
    result is that of the widened weights. ``quantise_rows`` rounds rows and gated products to e4m3
    too, with a float32 scale for each 128 channels: as the models were trained, less exact, and
    faster from 64 rows an expert on. Source: DeepSeek-V3 (arXiv:2412.19437) 3.3.2.
    """
    facts: dict[str, Any] = {"then": then, "quantise_rows": quantise_rows}
    problem = problems.routed_fp8(x, gate, up, down, weights, experts, limit=limit, **facts)
    clamp = None if limit is None else float(limit)
    run = choose(problem, backend)
    return run(x, gate, up, down, weights, int32(experts), limit=clamp, **facts)


def matmul_fp8(
    x: Float[Array, "tokens channels"], weight: BlockScaled, *, groups: int = 1,
    quantise_rows: bool = False, backend: str | None = None,
) -> Float[Array, "tokens out"]:  # fmt: skip
    """``x W^T``, accumulated in float32, with e4m3 weights in 128 x 128 blocks [out, in].

    With ``groups`` outputs are cut into so many, and x has as many times ``in`` channels: ``y_g =
    x_g W_g^T`` (V4's products of groups of heads). ``quantise_rows`` rounds rows to e4m3 too, with
    a float32 scale for each 128 channels: as the models were trained, less exact, and faster from
    512 rows on. Source: DeepSeek-V3 (arXiv:2412.19437) 3.3.2.
    """
    facts: dict[str, Any] = {"groups": groups, "quantise_rows": quantise_rows}
    return choose(problems.matmul_fp8(x, weight, **facts), backend)(x, weight, **facts)


def write_rows(
    cache: LatentCache | RecordCache,
    values: tuple[Float[Array, "_ _"], ...],
    slots: Int[Array, "tokens"],
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> LatentCache | RecordCache:
    """Store a row of each token at its slot, in any cache; slot -1 stores nothing.

    ``values`` are those of the format: ``(kv_latent, k_rope)`` of a latent cache and of ``ds_mla``,
    ``(key,)`` of ``index_key``. Records quantise by their own rule. Slots are distinct; the values
    may have more rows than ``slots``; ``layer`` is the one of a stack, which stays in place. A
    latent cache has the backends of ``write_latent``.
    """
    problem = problems.write_rows(cache, values, slots, layer=layer)
    if isinstance(cache, LatentCache):
        latent, rope = values[0], values[1] if cache.rope else values[0][:, :0]
        return write_latent(cache, latent, rope, slots, layer=layer, backend=backend)
    run = choose(problem, backend)
    return run(cache, tuple(map(gathered, values)), int32(slots), layer=number(layer))


def gather_rows(
    cache: LatentCache | RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    dtype: DTypeLike,
    layer: Layer = None,
    backend: str | None = None,
) -> Float[Array, "*tokens row"]:
    """The rows at ``slots`` of any cache, dequantised and rounded once; zeros outside of it."""
    run = choose(problems.gather_rows(cache, slots, dtype=dtype, layer=layer), backend)
    return run(cache, int32(slots), dtype=dtype, layer=number(layer))


def gather_codes(
    cache: RecordCache,
    slots: Int[Array, "*tokens"],
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> tuple[Float[Array, "*tokens dim"], Float[Array, "*tokens"]]:
    """The index keys at ``slots`` as they are stored: e4m3 codes, and the float32 scale of each.

    ``codes * scale`` is what ``gather_rows`` gives; both are 0 outside of the cache. Of a cache of
    ``index_key`` records.
    """
    run = choose(problems.gather_codes(cache, slots, layer=layer), backend)
    return run(cache, int32(slots), layer=number(layer))
