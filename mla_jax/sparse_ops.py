"""The public operations of sparse attention: scores, selection, attention over selected rows.

Conventions as in ``ops``, which has them too.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache, SparseScope, StatePool
from mla_jax.dispatch import Layer, choose, int32, named, number
from mla_jax.metadata.deepseek_v4 import PoolMetadata
from mla_jax.metadata.indexer import (
    IndexerDecodeMetadata,
    IndexerMetadata,
    IndexerPrefillMetadata,
)
from mla_jax.pallas import problems
from mla_jax.pallas.axes import Groups
from mla_jax.pallas.indexer.ref import quantise_queries
from mla_jax.types import Array, AttnState, Float, Int, full_among, gathered

Gathered = tuple[Array, Array | None]
"""Keys, or codes with the scale of each."""

__all__ = [
    "append_window",
    "indexer_logits",
    "mla_sparse_decode",
    "mla_sparse_prefill",
    "pool_states",
    "select_topk",
]


def indexer_logits(
    q: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    keys: Float[Array, "keys dim"],
    *,
    backend: str | None = None,
) -> Float[Array, "tokens keys"]:
    """``sum_h weights[t, h] * relu(q[t, h] . keys[s])``, float32: what ``select_topk`` ranks.

    No causal mask. Differentiable, for the indexer's own training loss.
    Source: DeepSeek-V3.2-Exp report, section 2.1.
    """
    return choose(problems.logits(q, weights, keys), backend)(q, weights, keys)


def select_topk(
    q: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    cache: LatentCache | RecordCache,
    meta: IndexerMetadata,
    k: int,
    *,
    layer: Layer = None,
    backend: str | None = None,
) -> Int[Array, "tokens {k}"]:
    """The positions of each token's request with the ``k`` largest scores, ascending; -1 behind.

    Scores are ``indexer_logits`` over the request's keys in the cache, up to the token's own
    position. Of equal scores the lower position is taken; a token that sees at most ``k`` keys
    takes all of them, and nothing is scored where all tokens do. In a cache of ``index_key``
    records queries are quantised as the keys are: e4m3, a power of two as the scale of each head.
    Where a key stands for several tokens, positions count keys. Padding selects nothing. The
    workspace does not grow with queries times context. ``meta`` says which keys a token sees.
    """
    k = problems.check_selection(q, weights, cache, meta, k)
    q, weights = jnp.asarray(q), jnp.asarray(weights)
    if isinstance(cache, RecordCache):
        q, weights = quantise_queries(q, weights)
    mixed = full_among((q, weights, *jax.tree.leaves((cache, meta))), (), 0.0)
    found = jnp.full_like(mixed, -1, shape=(q.shape[0], k), dtype=jnp.int32)
    facts: dict[str, Any] = {"k": k, "layer": layer, "backend": backend}
    if meta.decode is not None:
        found = _select_decodes(found, q, weights, cache, meta.decode, **facts)
    if meta.prefill is not None:
        found = _select_prefills(found, q, weights, cache, meta.prefill, **facts)
    return found


def _select_decodes(
    found: Int[Array, "tokens _"],
    q: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    cache: LatentCache | RecordCache,
    meta: IndexerDecodeMetadata,
    *,
    k: int,
    layer: Layer,
    backend: str | None,
) -> Int[Array, "tokens _"]:
    """``found`` with the rows of decodes."""
    at = jnp.maximum(meta.token_index, 0)
    there = meta.token_index >= 0
    lens = jnp.where(there, meta.seq_lens, 0)
    given = q[at], weights[at], cache, int32(meta.page_table), int32(lens)
    problem = problems.select_decode(*given, k=k, layer=layer)
    chosen = choose(problem, backend)(*given, k=k, layer=number(layer))
    # Which row a token has, the same in all layers: XLA fuses what reads a gather, not a scatter.
    tokens, rows = len(found), at.size
    row = jnp.full((tokens,), rows, jnp.int32)
    row = row.at[jnp.where(there, at, tokens)].set(jnp.arange(rows).reshape(at.shape), mode="drop")
    own = chosen.reshape(rows, -1)[jnp.minimum(row, rows - 1)]
    return jnp.where((row < rows)[:, None], own, found)


def _select_prefills(
    found: Int[Array, "tokens _"],
    q: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    cache: LatentCache | RecordCache,
    meta: IndexerPrefillMetadata,
    *,
    k: int,
    layer: Layer,
    backend: str | None,
) -> Int[Array, "tokens _"]:
    """``found`` with the rows of prefills, chunk by chunk: keys gathered, queries scored."""
    meta = jax.tree.map(lambda x: x if x.dtype == jnp.bool_ else int32(x), meta)
    bucket, tokens = meta.bucket, found.shape[0]
    dim, lane = q.shape[-1], jnp.arange(bucket.chunk_queries, dtype=jnp.int32)
    coded = isinstance(cache, RecordCache)
    exact = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
    dtype = exact.get(cache.format.name, jnp.float32)

    def one_chunk(i: Array, carry: tuple[Array, Gathered]) -> tuple[Array, Gathered]:
        found, keys = carry
        chunk = meta.chunk(i)

        def gather() -> Gathered:
            r = jnp.minimum(chunk.token_to_seq, bucket.chunk_requests - 1)
            p = jnp.arange(bucket.chunk_keys, dtype=jnp.int32) - chunk.cu_seq_lens[r]
            column = jnp.clip(p // cache.page, 0, chunk.page_table.shape[1] - 1)
            slots = chunk.page_table[r, column] * cache.page + p % cache.page
            slots = jnp.where(chunk.token_to_seq < bucket.chunk_requests, slots, -1)
            if coded:
                problem = problems.gather_codes(cache, slots, layer=layer)
                run = choose(problem, named("gather_codes", backend))
                return run(cache, slots, layer=number(layer))
            problem = problems.gather_rows(cache, slots, dtype=dtype, layer=layer)
            run = choose(problem, named("gather_rows", backend))
            return run(cache, slots, dtype=dtype, layer=number(layer)), None

        keys = lax.cond(chunk.skip_kv_gather, lambda: keys, gather)
        token = chunk.token_start + lane
        real = token < chunk.token_end
        at = jnp.minimum(token, tokens - 1)
        bounds = chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
        given, scales = (q[at], weights[at], keys[0], *bounds), keys[1]
        problem = problems.select_prefill(*given, k=k, scales=scales)
        chosen = choose(problem, backend)(*given, k=k, scales=scales)
        return found.at[jnp.where(real, token, tokens)].set(chosen, mode="drop"), keys

    stored = jnp.float8_e4m3fn if coded else dtype
    mixed = full_among(tuple(jax.tree.leaves((cache, meta))), (), 0.0)
    keys = jnp.zeros_like(mixed, shape=(bucket.chunk_keys, dim), dtype=stored)
    keys = keys, jnp.zeros_like(mixed, shape=bucket.chunk_keys) if coded else None
    return lax.fori_loop(0, meta.num_chunks, one_chunk, (found, keys))[0]


def mla_sparse_decode(
    q_latent: Float[Array, "tokens heads rank"],
    q_rope: Float[Array, "tokens heads rope"],
    cache: LatentCache | RecordCache,
    slots: Int[Array, "tokens keys"],
    *,
    scale: float,
    layer: Layer = None,
    lengths: Int[Array, "tokens"] | None = None,
    sinks: Float[Array, "heads"] | None = None,
    extra: SparseScope | None = None,
    value: int | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> AttnState:
    """Absorbed attention of each token over its own rows of the cache, by slot.

    ``out = softmax(scale * [q_latent | q_rope] row^T) row[:value]`` over the first ``lengths``
    entries of ``slots`` (all by default) that lie in the cache; others, such as -1, are no rows. A
    slot that is there twice counts twice. ``extra`` are more rows, of another cache, in the same
    softmax. ``value`` is the width of ``q_latent`` by default. ``sinks`` are logits of one more key
    per head with value 0, which ``lse`` does not count. A token without rows gives ``(0, -inf)``.
    Causality is what the lists say. Source: FlashMLA's sparse decoding; DeepSeek-V3.2-Exp, 2.1.
    """
    facts: dict[str, Any] = {"scale": scale, "value": value, "out_dtype": out_dtype}
    more: dict[str, Any] = {"layer": layer, "lengths": lengths, "sinks": sinks, "extra": extra}
    problem = problems.sparse_decode(q_latent, q_rope, cache, slots, **facts, **more)
    scopes = [(cache, _first(slots, lengths), number(layer))]
    if extra is not None:
        scopes += [(extra.cache, _first(extra.slots, extra.lengths), number(extra.layer))]
    return choose(problem, backend)(
        jnp.concatenate([q_latent, q_rope], axis=-1),
        tuple(scopes),
        scale=float(scale),
        value=problem["value"],
        out_dtype=problem["out"],
        sinks=sinks,
    )


def mla_sparse_prefill(
    q_latent: Float[Array, "tokens heads rank"],
    q_rope: Float[Array, "tokens heads rope"],
    rows: Float[Array, "rows row"],
    indices: Int[Array, "tokens keys"],
    *,
    scale: float,
    lengths: Int[Array, "tokens"] | None = None,
    sinks: Float[Array, "heads"] | None = None,
    value: int | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> AttnState:
    """``mla_sparse_decode`` over gathered rows: ``indices`` are numbers of ``rows``."""
    facts: dict[str, Any] = {"scale": scale, "value": value, "out_dtype": out_dtype}
    problem = problems.sparse_prefill(
        q_latent, q_rope, rows, indices, **facts, lengths=lengths, sinks=sinks
    )
    return choose(problem, backend)(
        jnp.concatenate([q_latent, q_rope], axis=-1),
        jnp.asarray(rows),
        _first(indices, lengths),
        scale=float(scale),
        value=problem["value"],
        out_dtype=problem["out"],
        sinks=sinks,
    )


def append_window(
    cache: LatentCache | RecordCache,
    q: Float[Array, "tokens heads dim"],
    kv: Float[Array, "tokens dim"],
    gain: Float[Array, "dim"],
    angles: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
    slots: Int[Array, "tokens"],
    *,
    eps: float,
    layer: Layer = None,
    backend: str | None = None,
) -> tuple[Float[Array, "tokens heads dim"], LatentCache | RecordCache]:
    """V4's queries, ready for attention, and each token's one row stored at its slot.

    ``q_h = rotate(rms_norm(q_h))`` without a gain, ``row = rotate(gain * rms_norm(kv))``; a row is
    key and value of all heads. The last ``2 * pairs`` channels are rotated, ``angles`` being cos
    and sin of the pairs ``(2i, 2i + 1)``. Slot -1 stores nothing. Norms and rotation in float32.
    Source: DeepSeek-V4.
    """
    problem = problems.append_window(cache, q, kv, gain, angles, slots, eps=eps, layer=layer)
    given = gathered(q, 1), *map(gathered, (kv, gain, *angles)), int32(slots)
    return choose(problem, backend)(cache, *given, eps=float(eps), layer=number(layer))


def pool_states(
    ring: LatentCache,
    pools: tuple[StatePool, ...],
    groups: PoolMetadata,
    positions: Int[Array, "tokens"],
    angles: tuple[Float[Array, "groups pairs"], Float[Array, "groups pairs"]],
    *,
    eps: float,
    layer: Layer = None,
    backend: str | None = None,
) -> tuple[LatentCache, tuple[LatentCache | RecordCache, ...]]:
    """V4's compressor for one step: ``(ring, caches)`` with what its tokens change in them.

    Each group that the step completes leaves one state in the cache of every pool, at the slot of
    the token that completes it::

        state = rotate(gain * rms_norm(sum_j softmax_j(gate_j + bias_j) * value_j))

    The softmax is over the places of a group, for each channel by itself. With two halves
    (overlapping groups) the older half of the places takes the first values and gates of their
    tokens, the newer half the second. A place's token is of this step, or its row waits in
    ``ring``: float32, ``[values | gates + bias]`` of each pool side by side. ``groups`` says which,
    and which tokens of this step wait; so a state is the same however a sequence is cut into
    steps. ``positions`` are the tokens', ``angles`` cos and sin of each group's first position.
    ``layer`` is that of the ring and of all caches. Sums, norm and rotation in float32.
    Source: DeepSeek-V4, the compressor.
    """
    problem = problems.pool_states(ring, pools, groups, positions, angles, eps=eps, layer=layer)
    lists = (groups.ends, groups.tokens, groups.kept, groups.keep, positions)
    given = Groups(*map(int32, lists), *map(gathered, angles))
    ready = tuple(
        replace(
            p,
            **{name: gathered(getattr(p, name)) for name in ("values", "gates", "bias", "gain")},
            slots=int32(p.slots),
        )
        for p in pools
    )
    return choose(problem, backend)(ring, ready, given, eps=float(eps), layer=number(layer))


def _first(lists: Int[Array, "tokens keys"], lengths: Array | None) -> Int[Array, "tokens keys"]:
    """The lists in int32, -1 from each one's length on."""
    lists = int32(lists)
    if lengths is None:
        return lists
    column = jnp.arange(lists.shape[1], dtype=jnp.int32)
    return jnp.where(column < int32(lengths)[:, None], lists, -1)
