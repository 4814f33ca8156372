"""DeepSeek V4: a window of raw tokens and compressed states in one softmax, over mixed streams.

One row of a token is key and value of all heads. Every layer attends to the last ``window`` rows;
layers of the overlapping ratio (C4) also to the states that their indexer selects, layers of the
disjoint ratio (C128) to all states. Decodes read the pages; prefills gather what their chunk sees
into a workspace, as the metadata plans it.

With ``fp8`` the products that are published in 8 bits and fewer have block-scaled e4m3 weights,
zeros until they are loaded.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax import ops
from mla_jax.cache import LatentCache, RecordCache, SparseScope
from mla_jax.config_v4 import V4Config, V4Kind
from mla_jax.metadata.common import slot_mapping
from mla_jax.metadata.deepseek_v4 import PoolMetadata, V4Metadata
from mla_jax.metadata.sparse import (
    C128ATopkMetadata,
    build_c128a_topk_metadata,
    combine_topk_swa_indices,
    compressed_lens,
    convert_req_index_to_global_index,
)
from mla_jax.metadata.window import layer_type, ratios_of
from mla_jax.model.compressor import Pool, StateIndexer
from mla_jax.model.embed import Embed, Head, checked_tokens, project_to_vocab
from mla_jax.model.hyper_connections import StreamHead, Streams
from mla_jax.model.linear import GroupedLinear, Linear, precision_of
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.moe import Experts, HashRouter, Router, routed, routed_and_shared
from mla_jax.model.norm import RMSNorm
from mla_jax.model.rope import cos_sin
from mla_jax.model.sharding import divided, divides
from mla_jax.model.stack import Layers, Stack, periods_of
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.pooling.ref import rotate_tail
from mla_jax.pallas.topk.ref import best_positions
from mla_jax.placement import Placement
from mla_jax.types import Array, Bool, Float, Int

__all__ = ["DeepseekV4", "V4Attention", "V4Block", "V4MoE"]

type Cache = LatentCache | RecordCache
type Angles = tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]]


class _OfRatio(NamedTuple):
    """What all layers of one ratio share in a step."""

    angles: Angles  # of the tokens
    pool: PoolMetadata | None  # None: window only
    firsts: Angles | None  # of the groups' first positions
    every: C128ATopkMetadata | None  # lists of all states; None: selected, or none


class _Products(NamedTuple):
    """What a layer's weights make of new tokens."""

    q: Float[Array, "tokens heads dim"]
    kv: Float[Array, "tokens dim"]
    pools: tuple[tuple[Float[Array, "tokens _ _"], Float[Array, "tokens _ _"]], ...]  # v and g
    select: tuple[Float[Array, "tokens _ _"], Float[Array, "tokens _"]] | None  # of the indexer


class V4Attention(nnx.Module):
    """One layer's attention. ``ratio`` 0: the window alone."""

    def __init__(
        self,
        config: V4Config,
        *,
        ratio: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        facts = {"dtype": dtype, "rngs": rngs}
        low: dict[str, Any] = {**facts, "fp8": fp8}
        self.config, self.ratio = config, ratio
        self.q_down = Linear((config.hidden,), (config.q_rank,), **low)
        self.q_norm = RMSNorm(config.q_rank, eps=config.eps, dtype=dtype)
        self.q_up = Linear((config.q_rank,), (config.heads, config.dim), **low, parallel="column")
        self.kv = Linear((config.hidden,), (config.dim,), **low)
        self.kv_norm = RMSNorm(config.dim, eps=config.eps, dtype=dtype)
        self.sink = nnx.Param(jnp.zeros((config.heads,), jnp.float32))
        groups, width = config.out_groups, config.heads * config.dim // config.out_groups
        self.out_a = GroupedLinear(groups, width, config.out_rank, **low)
        ranks = groups, config.out_rank
        self.out_b = Linear(ranks, (config.hidden,), **low, parallel="row")
        self.pool = Pool(config, config.dim, ratio=ratio, **facts) if ratio else None
        selects = ratio == config.overlapping
        self.indexer = StateIndexer(config, **low) if selects else None

    def step(
        self,
        x: Float[Array, "tokens hidden"],
        meta: V4Metadata,
        caches: Mapping[str, Cache],
        shared: _OfRatio,
        *,
        layer: Int[Array, ""] | int,
        number: Int[Array, ""] | int,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], dict[str, Cache]]:
        """Write the new rows and states, select, attend, project back.

        ``layer`` is this layer's number in the window's stack, ``number`` its number among the
        layers of its ratio.
        """
        where = {"backend": backend, "placement": placement}
        given = self.products(x, shared.angles, **where)
        facts = {"layer": layer, "number": number, **where}
        out, caches = self.attend(given, meta, caches, shared, **facts)
        return self._project(out, shared.angles, **where), caches

    def products(
        self,
        x: Float[Array, "tokens hidden"],
        angles: Angles,
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> _Products:
        """What the layer's weights make of new tokens, before any cache is read."""
        where = {"backend": backend, "placement": placement}
        low = self.q_norm(self.q_down(x, **where))
        pools = () if self.pool is None else (self.pool.products(x),)
        select = None
        if self.indexer is not None:
            weights = self.indexer.weights(x, **where)
            select = self.indexer.queries(low, angles, **where), weights
            pools = (*pools, self.indexer.pool.products(x))
        q, kv = self.q_up(low, **where), self.kv(x, **where)
        return _Products(q=q, kv=kv, pools=pools, select=select)

    def attend(
        self,
        new: _Products,
        meta: V4Metadata,
        caches: Mapping[str, Cache],
        shared: _OfRatio,
        *,
        layer: Int[Array, ""] | int,
        number: Int[Array, ""] | int,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens heads dim"], dict[str, Cache]]:
        """``step`` between its products: write, select, attend; numbers as ``step`` has them."""
        caches, slots = dict(caches), meta.common.slots

        def append(cache, q, kv, gain, angles, slots, layer):
            naming = ops.named("append_window", backend)
            facts: dict[str, Any] = {"eps": self.config.eps, "layer": layer, "backend": naming}
            return ops.append_window(cache, q, kv, gain, angles, slots, **facts)

        shards = placement if divides(placement, self.config.heads) else None
        append = divided(append, shards, given=(None, 1, *(None,) * 5), returned=(1, None))
        rows = new.q, new.kv, self.kv_norm.scale[...]
        numbers = jnp.asarray(layer), jnp.asarray(number)
        given = caches["window"], *rows, shared.angles, slots["window"], numbers[0]
        q, caches["window"] = append(*given)
        chosen = None
        if self.pool is not None:
            caches |= self._complete_groups(new, meta, caches, shared, numbers[1], backend, shards)
        if self.indexer is not None:
            assert meta.indexer is not None and new.select is not None, "this layer has an indexer"
            chosen = ops.select_topk(
                *new.select,
                caches["index_keys"],
                meta.indexer,
                self.indexer.topk,
                layer=number,
                backend=ops.named("select_topk_decode", backend),
            )
        states = caches.get(f"states_{self.ratio}")

        def attend(q, sink, window, states, chosen, layer, number, meta, shared):
            scopes = _Scopes(self, meta, shared, window, states, chosen, layer, number, backend)
            out = jnp.zeros(q.shape, new.kv.dtype)
            if meta.windows.bucket.decode_tokens:
                out = scopes.decodes(out, q, sink)
            if meta.windows.bucket.prefills:
                out = scopes.prefills(out, q, sink)
            return out

        attend = divided(attend, shards, given=(1, 0, *(None,) * 7), returned=1)
        given = q, self.sink[...], caches["window"], states, chosen, *numbers, meta, shared
        return attend(*given), caches

    def _complete_groups(
        self,
        new: _Products,
        meta: V4Metadata,
        caches: Mapping[str, Cache],
        shared: _OfRatio,
        number: Int[Array, ""],
        backend: str | None,
        shards: Placement | None,
    ) -> dict[str, Cache]:
        """Store the states of groups that end in this step, and what later groups need."""
        assert self.pool is not None and shared.pool is not None and shared.firsts is not None
        pools = {f"states_{self.ratio}": self.pool}
        if self.indexer is not None:
            pools["index_keys"] = self.indexer.pool
        slots, ring = meta.common.slots, f"open_{self.ratio}"

        def complete(ring, given, groups, positions, firsts, number):
            naming = ops.named("pool_states", backend)
            facts: dict[str, Any] = {"eps": self.config.eps, "layer": number, "backend": naming}
            return ops.pool_states(ring, given, groups, positions, firsts, **facts)

        complete = divided(complete, shards, given=(None,) * 6, returned=None)
        made = zip(pools.items(), new.pools, strict=True)
        given = tuple(pool.given(x, caches[name], slots[name]) for (name, pool), x in made)
        written, found = complete(
            caches[ring], given, shared.pool, meta.positions, shared.firsts, number
        )
        return {ring: written, **dict(zip(pools, found, strict=True))}

    def _project(
        self,
        out: Float[Array, "tokens heads dim"],
        angles: Angles,
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Rotated back at the query's position, by groups of heads, then together."""
        cos, sin = angles
        out = rotate_tail(out, cos, -sin)
        grouped = out.reshape(len(out), self.config.out_groups, -1)
        where: dict[str, Any] = {"backend": backend, "placement": placement}
        return self.out_b(self.out_a(grouped, **where), **where)

    def whole(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """One whole sequence without a cache: the oracle of ``step``; differentiable."""
        config, tokens = self.config, len(x)
        t = jnp.arange(tokens, dtype=jnp.int32)
        angles = cos_sin(t, config.rope(self.ratio))
        plain: dict[str, Any] = {"backend": "xla"}
        low = self.q_norm(self.q_down(x, **plain))
        ones = jnp.ones((config.dim,), x.dtype)
        q = rotate_tail(rms_norm(self.q_up(low, **plain), ones, eps=config.eps), *angles)
        keys = rotate_tail(self.kv_norm(self.kv(x, **plain)), *angles)
        ago = t[:, None] - t
        seen = (ago >= 0) & (ago < config.window)
        if self.pool is not None:
            states = self.pool.whole(x, angles)
            keys = jnp.concatenate([keys, states])
            seen = jnp.concatenate([seen, self.seen_states(x, low, angles, len(states))], axis=1)
        wide = {"precision": precision_of(x.dtype), "preferred_element_type": jnp.float32}
        s = config.scale * jnp.einsum("thd,sd->ths", q, keys, **wide)
        s = jnp.where(seen[:, None], s, -jnp.inf)
        sink = jnp.broadcast_to(self.sink[...][None, :, None], (tokens, config.heads, 1))
        p = nnx.softmax(jnp.concatenate([s, sink], axis=-1), axis=-1)[..., :-1]
        out = jnp.einsum("ths,sd->thd", p, keys.astype(jnp.float32), precision="highest")
        return self._project(out.astype(x.dtype), angles, **plain)

    def seen_states(
        self,
        x: Float[Array, "tokens hidden"],
        low: Float[Array, "tokens q_rank"],
        angles: Angles,
        states: int,
    ) -> Bool[Array, "tokens states"]:
        """Complete groups of each token; of an overlapping ratio the selected ones."""
        complete = (jnp.arange(len(x), dtype=jnp.int32) + 1) // self.ratio
        if self.indexer is None or not states:
            return jnp.arange(states) < complete[:, None]
        keys = self.indexer.pool.whole(x, angles)
        queries = self.indexer.queries(low, angles, backend="xla")
        scores = ops.indexer_logits(queries, self.indexer.weights(x, backend="xla"), keys)
        chosen = best_positions(scores, complete, k=self.indexer.topk)
        column = jnp.where(chosen >= 0, chosen, states)
        row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        return jnp.zeros((len(x), states), jnp.bool_).at[row, column].set(True, mode="drop")


class _Scopes(NamedTuple):
    """Where the keys of one layer's step are."""

    attention: V4Attention
    meta: V4Metadata
    shared: _OfRatio
    window: Cache
    states: Cache | None
    chosen: Int[Array, "tokens topk"] | None  # states of each token's request
    layer: Int[Array, ""]
    number: Int[Array, ""]
    backend: str | None

    @property
    def _facts(self) -> dict[str, Any]:
        config = self.attention.config
        return {"scale": config.scale, "value": config.dim}

    def decodes(
        self,
        out: Float[Array, "tokens heads dim"],
        q: Float[Array, "tokens heads dim"],
        sink: Float[Array, "heads"],
    ) -> Float[Array, "tokens heads dim"]:
        """``out`` with the rows of decodes, read from the pages."""
        windows, rows = self.meta.windows, self.meta.windows.bucket.decode_tokens
        found = ops.mla_sparse_decode(
            *_parts(q[:rows], self.attention.config),
            self.window,
            windows.decode_indices,
            lengths=windows.decode_lens,
            layer=self.layer,
            sinks=sink,
            extra=self._decode_states(rows),
            backend=ops.named("mla_sparse_decode", self.backend),
            **self._facts,
        )
        return jnp.concatenate([found.out, out[rows:]])

    def _decode_states(self, rows: int) -> SparseScope | None:
        if self.states is None:
            return None
        if self.shared.every is not None:
            slots, lengths = self.shared.every.decode_global_indices, self.shared.every.decode_lens
        else:
            assert self.chosen is not None, "selected, or every one"
            ratio, common = self.attention.ratio, self.meta.common
            chosen = self.chosen[:rows]
            table, request = common.page_tables[f"states_{ratio}"], common.requests[:rows]
            slots = convert_req_index_to_global_index(table, request, chosen, page=self.states.page)
            # How many were chosen is known before: no launch has to count them.
            real = self.meta.windows.decode_lens > 0
            facts = {"ratio": ratio, "width": chosen.shape[1]}
            lengths = compressed_lens(common.positions[:rows], real, **facts)
        return SparseScope(cache=self.states, slots=slots, lengths=lengths, layer=self.number)

    def prefills(
        self,
        out: Float[Array, "tokens heads dim"],
        q: Float[Array, "tokens heads dim"],
        sink: Float[Array, "heads"],
    ) -> Float[Array, "tokens heads dim"]:
        """``out`` with the rows of prefills, chunk by chunk of gathered rows."""
        config, windows = self.attention.config, self.meta.windows
        name = layer_type(self.attention.ratio, ratios_of(config.overlapping, config.disjoint))
        chunks, count = windows.chunks_of(name)
        first_token = windows.counts[2]  # tokens of the decodes
        lane = jnp.arange(windows.bucket.prefill_tokens, dtype=jnp.int32)

        def one_chunk(i: Array, out: Array) -> Array:
            chunk = _Chunk.of(self.meta, chunks[i])
            rows = self._workspace(chunk, windows.workspace(name), q.dtype)
            token = chunk.query_starts[0] + lane
            at = jnp.minimum(token, len(q) - 1)
            lists = jnp.full((len(lane), 0), -1, jnp.int32)
            if self.shared.every is not None:
                every = self.shared.every.prefill_local_indices
                lists = every[jnp.clip(token - first_token, 0, len(every) - 1)]
            elif self.chosen is not None:
                lists = self.chosen[at]
            indices, lengths = combine_topk_swa_indices(
                lists,
                chunk.query_starts,
                chunk.seq_lens,
                chunk.gather_lens,
                chunk.stride,
                chunk.compressed,
                topk=lists.shape[1],
                ratio=max(self.attention.ratio, 1),
                window=config.window,
            )
            found = ops.mla_sparse_prefill(
                *_parts(q[at], config),
                rows,
                indices,
                lengths=lengths,
                sinks=sink,
                backend=ops.named("mla_sparse_prefill", self.backend),
                **self._facts,
            )
            real = token < chunk.query_starts[-1]
            place = jnp.where(real, token, len(out))
            return out.at[place].set(found.out, mode="drop")

        return lax.fori_loop(0, count, one_chunk, out)

    def _workspace(self, chunk: "_Chunk", rows: int, dtype: jnp.dtype) -> Float[Array, "rows dim"]:
        """Of each request of a chunk its states, then the last rows that its queries see."""
        common, ratio = self.meta.common, self.attention.ratio
        request, column = chunk.places(rows)
        keys, tail = chunk.seq_lens[request], chunk.gather_lens[request]
        owner = chunk.owners[request]
        behind = column - chunk.compressed
        position = keys - tail + behind
        slots = slot_mapping(
            common.page_tables["window"],
            owner,
            position,
            (behind >= 0) & (behind < tail),
            page=self.window.page,
        )
        facts: dict[str, Any] = {"dtype": dtype, "backend": ops.named("gather_rows", self.backend)}
        found = ops.gather_rows(self.window, slots, layer=self.layer, **facts)
        if self.states is None:
            return found
        there = (behind < 0) & (column < keys // ratio)
        table = common.page_tables[f"states_{ratio}"]
        slots = slot_mapping(table, owner, column, there, page=self.states.page)
        states = ops.gather_rows(self.states, slots, layer=self.number, **facts)
        return jnp.where((behind < 0)[:, None], states, found)


class _Chunk(NamedTuple):
    """Prefills whose rows are gathered together; padded requests have length 0."""

    query_starts: Int[Array, "starts"]  # of tokens of the step
    seq_lens: Int[Array, "prefills"]
    gather_lens: Int[Array, "prefills"]
    owners: Int[Array, "prefills"]  # requests of the step
    compressed: Int[Array, ""]
    stride: Int[Array, ""]

    @classmethod
    def of(cls, meta: V4Metadata, plan: Int[Array, "4"]) -> "_Chunk":
        """From a ``WindowChunk`` of the metadata."""
        start, stop, compressed, stride = (plan[i] for i in range(4))
        windows, common = meta.windows, meta.common
        assert windows.prefill_gather_lens is not None, "the bucket has prefills"
        lane = jnp.arange(windows.bucket.prefills + 1, dtype=jnp.int32)
        first = windows.counts[0] + start
        last = windows.counts[0] + stop
        inside = lane[:-1] < stop - start
        owners = jnp.where(inside, first + lane[:-1], 0)
        of_prefill = jnp.minimum(start + lane[:-1], windows.bucket.prefills - 1)
        return cls(
            query_starts=common.query_starts[jnp.minimum(first + lane, last)],
            seq_lens=jnp.where(inside, common.seq_lens[owners], 0),
            gather_lens=jnp.where(inside, windows.prefill_gather_lens[of_prefill], 0),
            owners=owners,
            compressed=compressed,
            stride=stride,
        )

    def places(self, rows: int) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
        """The chunk's request that each workspace row belongs to, and its column there."""
        row = jnp.arange(rows, dtype=jnp.int32)
        stride = jnp.maximum(self.stride, 1)
        request = row // stride
        inside = request < len(self.seq_lens)  # a request of length 0 has no rows
        column = jnp.where(inside, row % stride, jnp.iinfo(jnp.int32).max // 2)
        return jnp.minimum(request, len(self.seq_lens) - 1), column


def _parts(q: Float[Array, "tokens heads dim"], config: V4Config) -> tuple[Array, Array]:
    """Channels that are not rotated, and those that are."""
    return q[..., : -config.rope_dim], q[..., -config.rope_dim :]


class V4MoE(nnx.Module):
    """Routed experts, by score or by token id, plus the shared SwiGLU; all clamped."""

    def __init__(
        self,
        config: V4Config,
        *,
        hashed: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        moe, hidden = config.moe, config.hidden
        facts = {"dtype": dtype, "rngs": rngs, "limit": config.swiglu_limit, "fp8": fp8}
        self.router = (
            HashRouter(hidden, config.vocab, moe, rngs=rngs)
            if hashed
            else Router(hidden, moe, rngs=rngs)
        )
        self.experts = Experts(hidden, moe, **facts)
        width = moe.shared * moe.width
        self.shared = SwiGLU(hidden, width, bias=False, **facts) if width else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        token_ids: Int[Array, "tokens"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Rows that are not real reach no expert and give the shared part only."""
        facts = {"backend": backend, "placement": placement}
        if isinstance(self.router, HashRouter):
            weights, experts = self.router(x, token_ids, real, **facts)
        else:
            weights, experts, x = routed(self.router, x, real, fp8=self.experts.fp8, **facts)
        return routed_and_shared(self.experts, self.shared, x, weights, experts, **facts)


class V4Block(nnx.Module):
    """``S <- mix(S, attn(norm(sum S)))``, then the same with the experts."""

    def __init__(
        self,
        config: V4Config,
        kind: V4Kind,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}
        mixing = {"eps": config.eps, "rngs": rngs}
        self.attn_streams = Streams(config.hidden, config.streams, **mixing)
        self.attn_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.attn = V4Attention(config, ratio=kind.ratio, **facts)
        self.mlp_streams = Streams(config.hidden, config.streams, **mixing)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.moe = V4MoE(config, hashed=kind.hashed, **facts)

    def step(
        self,
        streams: Float[Array, "tokens streams hidden"],
        token_ids: Int[Array, "tokens"],
        meta: V4Metadata,
        caches: Mapping[str, Cache],
        shared: _OfRatio,
        *,
        backend: str | None = None,
        placement: Placement | None = None,
        **facts: Any,
    ) -> tuple[Float[Array, "tokens streams hidden"], dict[str, Cache]]:
        """One step of this layer; ``facts`` as ``V4Attention.step`` takes them."""
        more = {"backend": backend, "placement": placement}
        x, mixing = self.attn_streams(streams, self.attn_norm.scale[...], **more)
        y, written = self.attn.step(x, meta, caches, shared, **facts, **more)
        streams = mixing.back(streams, y)
        x, mixing = self.mlp_streams(streams, self.mlp_norm.scale[...], **more)
        y = self.moe(x, token_ids, meta.real, **more)
        return mixing.back(streams, y), written

    def whole(
        self,
        streams: Float[Array, "sequences tokens streams hidden"],
        token_ids: Int[Array, "sequences tokens"],
    ) -> Float[Array, "sequences tokens streams hidden"]:
        """Whole sequences without a cache; all tokens real."""
        shape, tokens = streams.shape, token_ids.size
        flat = streams.reshape(tokens, *shape[2:])
        x, mixing = self.attn_streams(flat, backend="xla")
        sequences = self.attn_norm(x).reshape(*shape[:2], -1)
        y = jax.vmap(self.attn.whole)(sequences).reshape(tokens, -1)
        flat = mixing.back(flat, y)
        x, mixing = self.mlp_streams(flat, backend="xla")
        real = jnp.ones((tokens,), jnp.bool_)
        y = self.moe(self.mlp_norm(x), token_ids.reshape(-1), real, backend="xla")
        return mixing.back(flat, y).reshape(shape)


class DeepseekV4(nnx.Module):
    """Token ids to hidden states to float32 logits, over windows and compressed states."""

    def __init__(self, config: V4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        def block(kind: V4Kind, rngs: nnx.Rngs) -> V4Block:
            return V4Block(config, kind, dtype=dtype, rngs=rngs, fp8=fp8)

        self.config = config
        self.embed = Embed(config.vocab, config.hidden, dtype=dtype, rngs=rngs)
        self.stacks = nnx.List(Stack(p, block, rngs) for p in periods_of(config.kinds))
        self.stream_head = StreamHead(config.hidden, config.streams, eps=config.eps, rngs=rngs)
        self.final_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.lm_head = Head(config.hidden, config.vocab, dtype=dtype, rngs=rngs)

    @property
    def layers(self) -> Layers[V4Block]:
        """The decoder's layers in order, each with copies of its weights."""
        return Layers(self.stacks)

    def derive(self) -> None:
        """Nothing follows from the weights."""

    def __call__(
        self,
        token_ids: Int[Array, "tokens"],
        meta: V4Metadata,
        caches: Mapping[str, Cache],
        *,
        derived: None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], dict[str, Cache]]:
        """One step over the caches of all groups: final hidden states, and the caches."""
        del derived
        shared = self._shared(meta)
        ratios = self.config.compress_ratios
        numbers = jnp.asarray([ratios[:i].count(r) for i, r in enumerate(ratios)], jnp.int32)

        def layer(block: V4Block, _: None, i: Int[Array, ""] | int, carry: tuple) -> tuple:
            streams, caches = carry
            return block.step(
                streams,
                token_ids,
                meta,
                caches,
                shared[block.attn.ratio],
                layer=i,
                number=numbers[i],
                backend=backend,
                placement=placement,
            )

        carry = self._streams(token_ids), dict(caches)
        for stack in self.stacks:
            carry = stack.run(carry, layer)
        streams, written = carry
        last = self.stream_head(streams, backend=backend, placement=placement)
        return self.final_norm(last), written

    def _streams(self, token_ids: Int[Array, "*tokens"]) -> Float[Array, "*tokens streams hidden"]:
        """The embedding, copied into all streams."""
        x = self.embed(token_ids)[..., None, :]
        return jnp.broadcast_to(x, (*x.shape[:-2], self.config.streams.count, x.shape[-1]))

    def _shared(self, meta: V4Metadata) -> dict[int, _OfRatio]:
        """What the layers of each ratio share."""
        config, found = self.config, {}
        pools = dict(zip(sorted(set(config.compress_ratios) - {0}), meta.pools, strict=True))
        for ratio in set(config.compress_ratios):
            rope, pool = config.rope(ratio), pools.get(ratio)
            found[ratio] = _OfRatio(
                angles=cos_sin(meta.positions, rope),
                pool=pool,
                firsts=None if pool is None else cos_sin(pool.first, rope),
                every=_every_state(meta, config) if ratio == config.disjoint else None,
            )
        return found

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """float32 logits of some hidden states."""
        return project_to_vocab(hidden, self.lm_head.kernel[...], tied=False)

    def full(
        self, token_ids: Int[Array, "sequences tokens"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """Whole sequences without a cache: the oracle of everything above.

        Shorter sequences are padded on the right: causality keeps padding out of the rest.
        """
        token_ids = checked_tokens(token_ids, self.config)

        def layer(block: V4Block, _: None, number: Any, streams: Array) -> Array:
            return block.whole(streams, token_ids)

        streams = self._streams(token_ids)
        for stack in self.stacks:
            streams = stack.run(streams, layer)
        head = functools.partial(self.stream_head, backend="xla")
        return self.final_norm(jax.vmap(head)(streams))


def _every_state(meta: V4Metadata, config: V4Config) -> C128ATopkMetadata:
    """All complete states that each token sees, for the layers of the disjoint ratio."""
    common, bucket = meta.common, meta.windows.bucket
    name = f"states_{config.disjoint}"
    return build_c128a_topk_metadata(
        common.page_tables[name],
        common.requests,
        common.positions,
        common.slots["window"],
        meta.windows.counts[2],
        decode_tokens=bucket.decode_tokens,
        prefill_tokens=bucket.prefill_tokens,
        width=bucket.c128a_width,
        page=common.group(name).page,
        ratio=config.disjoint,
    )
