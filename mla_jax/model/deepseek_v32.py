"""DeepSeek V3.2 and GLM-5: the V3 decoder, each token attending to the tokens an indexer selects.

Attention is absorbed and sparse: a token's list of cache slots is made by its layer's indexer,
or, in GLM's layers without one, by the last layer before that has one. A step whose sequences are
all no longer than the selection is dense: nothing is scored, prefills are expanded and decodes
take all of their pages; index keys are written all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.config import LayerKind, ModelConfig
from mla_jax.errors import ArgumentError
from mla_jax.metadata.common import slot_mapping, token_to_request
from mla_jax.metadata.deepseek_v32 import V32Metadata
from mla_jax.metadata.mla import DecodeMetadata, MLAMetadata
from mla_jax.metadata.sparse import convert_req_index_to_global_index
from mla_jax.model.decoder import Decoder, DecoderBlock, Derived
from mla_jax.model.embed import checked_tokens
from mla_jax.model.indexer import Indexer
from mla_jax.model.linear import contract, precision_of, project
from mla_jax.model.loops import computed_zero
from mla_jax.model.mla import MLA, Absorbed, Rows, StepPlan, Up, plan_step
from mla_jax.model.rope import cos_sin
from mla_jax.model.sharding import divided, divides
from mla_jax.pallas.axes import AddNorm, PageTable, PerRequest, Starts
from mla_jax.pallas.topk.ref import best_positions
from mla_jax.placement import Placement
from mla_jax.types import Array, AttnState, Float, Int

__all__ = ["DeepseekV32", "SparseBlock", "SparseMLA"]


class _State(NamedTuple):
    """What goes from layer to layer."""

    h: Float[Array, "tokens hidden"]
    x: Float[Array, "tokens hidden"]
    """Of ``h``, normalised as the next layer reads it; behind the last layer, as the head does."""
    latent: LatentCache | RecordCache
    index_keys: LatentCache | RecordCache
    slots: Int[Array, "_ _"] | None
    """Of the last selection, ``[tokens, topk]``; None: every layer selects. In a dense step over
    byte records the same for all layers: all rows of each decode."""


class SparseMLA(MLA):
    """One layer of sparse latent attention; without ``indexer`` it takes a selection."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        selects: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, fp8=fp8)
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}
        self.indexer = Indexer(config, config.selector, **facts) if selects else None
        self.topk = config.selector.topk

    def step(
        self,
        x: Float[Array, "tokens hidden"],
        meta: V32Metadata,
        state: _State,
        *,
        layer: Int[Array, ""] | int,
        index_layer: Int[Array, ""] | int,
        angles: tuple[Array, Array],
        then: AddNorm,
        absorbed: Absorbed | None = None,
        plan: StepPlan | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]], _State]:
        """Write the new rows and index keys, select, attend, project back, add to the residual.

        That sum and its norm, and the state with what was written. ``layer`` and ``index_layer``
        are this layer's numbers in the stacks of latents and of index keys; ``plan`` is that of a
        dense step. The state's ``h`` and ``x`` stay as they are.
        """
        facts: dict[str, Any] = {"backend": backend, "placement": placement}
        low = self.query_latents(x, **facts)
        q = self._rotate_queries(self.q_up(low, **facts), angles)
        new = Rows(q, *self.latents(x, angles, **facts))
        latent, keys, slots = state.latent, state.index_keys, state.slots

        def writing(cache: LatentCache | RecordCache) -> str | None:
            op = "write_latent" if isinstance(cache, LatentCache) else "write_rows"
            return ops.named(op, backend)

        row = new.latent, new.k_rope
        latent = ops.write_rows(latent, row, meta.slots, layer=layer, backend=writing(latent))
        if self.indexer is not None:
            key = self.indexer.keys(x, angles, **facts)
            at = {"layer": index_layer, "backend": writing(keys)}
            keys = ops.write_rows(keys, (key,), meta.indexer.slots, **at)
            if meta.dense is None:
                chosen = ops.select_topk(
                    self.indexer.queries(low, angles, **facts),
                    self.indexer.weights(x, **facts),
                    keys,
                    meta.indexer,
                    self.topk,
                    layer=index_layer,
                    backend=ops.named("select_topk_decode", backend),
                )
                slots = slots_of(chosen, meta, page=latent.page)
        plan = StepPlan() if plan is None else plan
        heads = self._heads(
            new, absorbed, meta.dense, latent, slots, layer=layer, plan=plan, **facts
        )
        kept = None if state.slots is None else slots
        state = state._replace(latent=latent, index_keys=keys, slots=kept)
        return self.out.onto(then, heads, **facts), state

    def _heads(
        self,
        new: Rows,
        absorbed: Absorbed | None,
        dense: MLAMetadata | None,
        latent: LatentCache | RecordCache,
        slots: Int[Array, "_ _"] | None,
        *,
        layer: Int[Array, ""] | int,
        plan: StepPlan,
        backend: str | None,
        placement: Placement | None,
    ) -> Float[Array, "tokens heads v"]:
        """Attention of all heads, by each device with its own, over a cache with the new rows."""
        absorbed = self.absorbed() if absorbed is None else absorbed

        def attend(new, kv_up, absorbed, dense, latent, slots, number, plan):
            at = {"scale": self.scale, "layer": number}
            naming = ops.named("mla_sparse_decode", backend)

            def listed(q_latent: Array, q_rope: Array, _: object = None) -> AttnState:
                return ops.mla_sparse_decode(q_latent, q_rope, latent, slots, **at, backend=naming)

            def decode(q_latent: Array, q_rope: Array, view: DecodeMetadata) -> AttnState:
                facts = {"plan": plan.decode, "backend": ops.named("mla_decode", backend)}
                return ops.mla_decode(q_latent, q_rope, latent, view, **at, **facts)

            if dense is None:
                found = listed(contract("thd,hdr->thr", new.q_nope, absorbed.k), new.q_rope)
                return contract("thr,hrv->thv", found.out, absorbed.v).astype(new.q_nope.dtype)
            facts = {"backend": backend, "plan": plan}
            up, view = Up(kv_up, absorbed), decode if isinstance(latent, LatentCache) else listed
            return self.attended(new, up, dense, latent, view, layer=number, **facts)

        kv_up = None if dense is None else self._up_projection()
        if divides(placement, self.dims.heads):
            given = (Rows._make((1, None, None)), 1, 0, *(None,) * 5)
            attend = divided(attend, placement, given=given, returned=1)
        return attend(new, kv_up, absorbed, dense, latent, slots, jnp.asarray(layer), plan)

    def cached_rows(
        self,
        cache: LatentCache | RecordCache,
        page_table: PageTable,
        first: PerRequest,
        row_starts: Starts,
        *,
        rows: int,
        dtype: DTypeLike,
        layer: Int[Array, ""] | int | None,
        backend: str | None,
    ) -> Float[Array, "{rows} row"]:
        """``ops.gather_latent``, of byte records too."""
        facts: dict[str, Any] = {"dtype": dtype, "layer": layer}
        if isinstance(cache, LatentCache):
            given = cache, page_table, first, row_starts
            return super().cached_rows(*given, rows=rows, backend=backend, **facts)
        owner, real = token_to_request(row_starts, rows)
        place = jnp.arange(rows, dtype=jnp.int32) - row_starts[owner]
        slots = slot_mapping(page_table, owner, first[owner] + place, real, page=cache.page)
        return ops.gather_rows(cache, slots, **facts, backend=ops.named("gather_rows", backend))

    def full(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """One whole sequence, without a cache; of a layer that selects."""
        return self.whole(x, None)[0]

    def whole(
        self, x: Float[Array, "tokens hidden"], selected: Int[Array, "tokens topk"] | None
    ) -> tuple[Float[Array, "tokens hidden"], Int[Array, "tokens topk"]]:
        """One whole sequence by the expanded path and its selection; differentiable but for it.

        ``selected`` is that of the layer before, for a layer without an indexer.

        Raises:
            ArgumentError: such a layer, and no selection.
        """
        tokens = x.shape[0]
        at = jnp.arange(tokens, dtype=jnp.int32)
        angles = cos_sin(at, self.rope)
        if self.indexer is not None:
            selected = best_positions(self.scores(x, angles), at + 1, k=self.topk)
        if selected is None:
            allowed = "the selection of the layer before: this one has no indexer"
            raise ArgumentError("SparseMLA.whole: selected", None, allowed)
        seen = jnp.zeros((tokens, tokens), jnp.bool_)
        column = jnp.where(selected >= 0, selected, tokens)
        seen = seen.at[at[:, None], column].set(True, mode="drop")
        q = self._rotate_queries(self._project_queries(x, "xla"), angles)
        latent, k_rope = self.latents(x, angles, backend="xla")
        kv = project(latent, self._up_projection())
        k_nope, v = kv[..., : self.dims.nope], kv[..., self.dims.nope :]
        wide = {"precision": precision_of(x.dtype), "preferred_element_type": jnp.float32}
        s = jnp.einsum("thd,shd->hts", q[..., : self.dims.nope], k_nope, **wide)
        s = s + jnp.einsum("thd,sd->hts", q[..., self.dims.nope :], k_rope, **wide)
        p = nnx.softmax(jnp.where(seen, self.scale * s, -jnp.inf), axis=-1)
        out = jnp.einsum("hts,shv->thv", p, v.astype(jnp.float32), precision="highest")
        return self.out(out.astype(x.dtype), backend="xla"), selected

    def scores(
        self, x: Float[Array, "tokens hidden"], angles: tuple[Array, Array]
    ) -> Float[Array, "tokens tokens"]:
        """Index scores of every pair of a sequence's tokens, later ones too; differentiable.

        Raises:
            ArgumentError: the layer has no indexer.
        """
        if self.indexer is None:
            allowed = "a layer that selects: this one takes the selection of another"
            raise ArgumentError("SparseMLA.scores: layer", "no indexer", allowed)
        low = self.query_latents(x, backend="xla")
        return ops.indexer_logits(
            self.indexer.queries(low, angles, backend="xla"),
            self.indexer.weights(x, backend="xla"),
            self.indexer.keys(x, angles, backend="xla"),
        )


def slots_of(
    chosen: Int[Array, "tokens topk"], meta: V32Metadata, *, page: int
) -> Int[Array, "tokens topk"]:
    """Latent rows of selected positions of each token's request."""
    owners = meta.common.requests
    return convert_req_index_to_global_index(meta.page_table, owners, chosen, page=page)


def all_slots(decode: DecodeMetadata, *, page: int, most: int) -> Int[Array, "requests _"]:
    """Latent rows of each decode, which sees ``most`` positions at most; -1 behind them."""
    requests, pages = decode.page_table.shape
    seen = jnp.arange(min(most, pages * page), dtype=jnp.int32)
    seen = jnp.where(seen < decode.seq_lens[:, None], seen, -1)
    owners = jnp.arange(requests, dtype=jnp.int32)
    return convert_req_index_to_global_index(decode.page_table, owners, seen, page=page)


class SparseBlock(DecoderBlock[SparseMLA]):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))`` with sparse attention."""

    @staticmethod
    def attention(config: ModelConfig, kind: LayerKind, **facts: Any) -> SparseMLA:
        return SparseMLA(config, selects=kind.selects, **facts)

    def step(
        self,
        meta: V32Metadata,
        state: _State,
        *,
        derived: Derived,
        backend: str | None = None,
        placement: Placement | None = None,
        **facts: Any,
    ) -> _State:
        """One step of this layer; ``facts`` as ``SparseMLA.step`` takes them."""
        shared = {"backend": backend, "placement": placement}
        facts["absorbed"] = derived.absorbed
        then = self.before_feed(state.h)
        (h, x), state = self.attn.step(state.x, meta, state, then=then, **facts, **shared)
        h, x = self.feed_forward(h, x, meta.real, after=derived.after, **shared)
        return state._replace(h=h, x=x)


class DeepseekV32(Decoder[SparseBlock]):
    """Token ids to hidden states to float32 logits, over latents and index keys."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        def block(kind: LayerKind, rngs: nnx.Rngs) -> SparseBlock:
            return SparseBlock(config, kind=kind, dtype=dtype, rngs=rngs, fp8=fp8)

        super().__init__(config, block, dtype=dtype, rngs=rngs)
        self.selecting, self.topk = config.selector.full, config.selector.topk

    def __call__(
        self,
        token_ids: Int[Array, "tokens"],
        meta: V32Metadata,
        caches: Mapping[str, LatentCache | RecordCache],
        *,
        derived: Sequence[Sequence[Derived]] | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], dict[str, LatentCache | RecordCache]]:
        """One step over the paged caches of all layers: final hidden states, and the caches.

        ``caches`` has the groups ``latent`` and ``index_keys``. ``derived`` is ``self.derive()``;
        without it the step derives it again.
        """
        dims, rope = self.config.dims, self.config.rope
        angles = cos_sin(meta.positions, rope)
        number = np.maximum(np.cumsum(self.selecting) - 1, 0).astype(np.int32)
        h, latent, slots, plan = self.embed(token_ids), caches["latent"], None, None
        if meta.dense is not None:
            facts = {"backend": backend, "placement": placement}
            plan = plan_step(dims, rope, meta.dense, latent, dtype=h.dtype, **facts)
            if meta.dense.decode is not None and isinstance(latent, RecordCache):
                slots = all_slots(meta.dense.decode, page=latent.page, most=self.topk)
        elif not all(self.selecting):
            slots = jnp.full((len(token_ids), self.topk), -1, jnp.int32)

        def layer(
            block: SparseBlock, of_block: Derived, i: Int[Array, ""] | int, state: _State
        ) -> _State:
            index_layer = i if all(self.selecting) else jnp.asarray(number)[i]
            return block.step(
                meta,
                state,
                layer=i,
                index_layer=index_layer,
                angles=angles,
                derived=of_block,
                plan=plan,
                backend=backend,
                placement=placement,
            )

        state = _State(h, self.first_norm(h), latent, caches["index_keys"], slots)
        derived = self.derive() if derived is None else derived
        zero = computed_zero(token_ids)
        for stack, beside in zip(self.stacks, derived, strict=True):
            state = stack.run(state, layer, beside=beside, zero=zero)
        written = {"latent": state.latent, "index_keys": state.index_keys}
        return state.x, written

    def full(
        self, token_ids: Int[Array, "sequences tokens"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """Whole sequences without a cache: the oracle of everything above.

        Shorter sequences are padded on the right: causality keeps padding out of the rest.
        """
        token_ids = checked_tokens(token_ids, self.config)
        h = self.embed(token_ids)
        if not token_ids.size:
            return h
        selected = jnp.full((*token_ids.shape, self.topk), -1, jnp.int32)

        def layer(block: SparseBlock, _: None, number: Any, carry: tuple[Array, Array]):
            h, selected = carry
            y, selected = jax.vmap(block.attn.whole)(block.attn_norm(h), selected)
            return block.feed_whole(h + y), selected

        for stack in self.stacks:
            h, selected = stack.run((h, selected), layer)
        return self.final_norm(h)
