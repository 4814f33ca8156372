"""The V2/V3 decoder: V2-Lite, V2, V3, R1, Kimi-K2, GLM-4.7-Flash and Youtu by config alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import LayerKind, ModelConfig
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.model.decoder import Decoder, DecoderBlock, Derived
from mla_jax.model.embed import checked_tokens
from mla_jax.model.loops import computed_zero
from mla_jax.model.mla import MLA, StepPlan, plan_step
from mla_jax.placement import Placement
from mla_jax.types import Array, Float, Int

__all__ = ["Block", "DeepseekV3"]


class _State(NamedTuple):
    """What goes from layer to layer."""

    h: Float[Array, "tokens hidden"]
    x: Float[Array, "tokens hidden"]
    """Of ``h``, normalised as the next layer reads it; behind the last layer, as the head does."""
    cache: LatentCache


class Block(DecoderBlock[MLA]):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))`` with dense attention."""

    @staticmethod
    def attention(config: ModelConfig, kind: LayerKind, **facts: Any) -> MLA:
        return MLA(config, **facts)

    def __call__(
        self,
        state: _State,
        meta: MLAMetadata,
        *,
        derived: Derived,
        layer: Int[Array, ""] | int | None = None,
        backend: str | None = None,
        plan: StepPlan | None = None,
        placement: Placement | None = None,
    ) -> _State:
        """One step of this layer; arguments as ``MLA`` takes them."""
        shared = {"backend": backend, "placement": placement}
        (h, x), cache = self.attn(
            state.x,
            meta,
            state.cache,
            then=self.before_feed(state.h),
            layer=layer,
            absorbed=derived.absorbed,
            plan=plan,
            **shared,
        )
        h, x = self.feed_forward(h, x, meta.real, after=derived.after, **shared)
        return _State(h, x, cache)

    def full(
        self, h: Float[Array, "sequences tokens hidden"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """The block over whole sequences of one length, expanded attention, no cache."""
        h = h + jax.vmap(self.attn.full)(self.attn_norm(h))
        return self.feed_whole(h)


class DeepseekV3(Decoder[Block]):
    """Token ids to hidden states to float32 logits."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        def block(kind: LayerKind, rngs: nnx.Rngs) -> Block:
            return Block(config, kind=kind, dtype=dtype, rngs=rngs, fp8=fp8)

        super().__init__(config, block, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        token_ids: Int[Array, "tokens"],
        meta: MLAMetadata,
        caches: Mapping[str, LatentCache],
        *,
        derived: Sequence[Sequence[Derived]] | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], dict[str, LatentCache]]:
        """One step over the paged cache of all layers: final hidden states, and the caches.

        ``caches`` has one group, ``latent``. ``derived`` is ``self.derive()``; without it the
        step derives it again.
        """
        h, cache = self.embed(token_ids), caches["latent"]
        dims, rope = self.config.dims, self.config.rope
        facts = {"dtype": h.dtype, "backend": backend, "placement": placement}
        plan = plan_step(dims, rope, meta, cache, **facts)

        def layer(
            block: Block, of_block: Derived, number: Int[Array, ""] | int, state: _State
        ) -> _State:
            return block(
                state,
                meta,
                derived=of_block,
                layer=number,
                backend=backend,
                plan=plan,
                placement=placement,
            )

        state = _State(h, self.first_norm(h), cache)
        derived = self.derive() if derived is None else derived
        zero = computed_zero(token_ids)
        for stack, beside in zip(self.stacks, derived, strict=True):
            state = stack.run(state, layer, beside=beside, zero=zero)
        return state.x, {"latent": state.cache}

    def full(
        self, token_ids: Int[Array, "sequences tokens"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """Whole sequences without a cache: training, and the oracle of everything above.

        Shorter sequences are padded on the right: causality keeps padding out of the rest.
        """
        token_ids = checked_tokens(token_ids, self.config)
        h = self.embed(token_ids)
        if not token_ids.size:
            return h
        for stack in self.stacks:
            h = stack.run(h, lambda block, _, number, h: block.full(h))
        return self.final_norm(h)
