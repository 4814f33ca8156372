"""The V2/V3 decoder: V2-Lite, V2, V3, R1, Kimi-K2, GLM-4.7-Flash and Youtu by config alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import LayerKind, ModelConfig
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.model.decoder import Decoder, DecoderBlock
from mla_jax.model.mla import MLA, Absorbed, StepPlan, plan_step
from mla_jax.placement import Placement
from mla_jax.types import Array, Float, Int

__all__ = ["Block", "DeepseekV3"]


class Block(DecoderBlock[MLA]):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))`` with dense attention."""

    @staticmethod
    def attention(config: ModelConfig, kind: LayerKind, **facts: Any) -> MLA:
        return MLA(config, **facts)

    def __call__(
        self,
        h: Float[Array, "tokens hidden"],
        meta: MLAMetadata,
        cache: LatentCache,
        *,
        layer: Int[Array, ""] | int | None = None,
        absorbed: Absorbed | None = None,
        backend: str | None = None,
        plan: StepPlan | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], LatentCache]:
        """One step of this layer; arguments as ``MLA`` takes them."""
        y, cache = self.attn(
            self.attn_norm(h),
            meta,
            cache,
            layer=layer,
            absorbed=absorbed,
            backend=backend,
            plan=plan,
            placement=placement,
        )
        return self.feed_forward(h + y, meta.real, backend=backend, placement=placement), cache

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
        derived: Sequence[Sequence[Absorbed]] | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], dict[str, LatentCache]]:
        """One step over the paged cache of all layers: final hidden states, and the caches.

        ``caches`` has one group, ``latent``. ``derived`` is ``self.derive()``; without it the
        step derives it again.
        """
        h, cache = self.embed(token_ids), caches["latent"]
        plan = plan_step(
            self.dims, self.rope, meta, cache, dtype=h.dtype, backend=backend, placement=placement
        )

        def layer(
            block: Block,
            absorbed: Absorbed | None,
            number: Int[Array, ""] | int,
            carry: tuple[Array, LatentCache],
        ) -> tuple[Array, LatentCache]:
            h, cache = carry
            return block(
                h,
                meta,
                cache,
                layer=number,
                absorbed=absorbed,
                backend=backend,
                plan=plan,
                placement=placement,
            )

        beside = [None] * len(self.stacks) if derived is None else derived
        for stack, absorbed in zip(self.stacks, beside, strict=True):
            h, cache = stack.run((h, cache), layer, beside=absorbed)
        return self.final_norm(h), {"latent": cache}

    def full(
        self, token_ids: Int[Array, "sequences tokens"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """Whole sequences without a cache: training, and the oracle of everything above.

        Shorter sequences are padded on the right: causality keeps padding out of the rest.
        """
        h = self.embed(token_ids)
        if not token_ids.size:
            return h
        for stack in self.stacks:
            h = stack.run(h, lambda block, _, number, h: block.full(h))
        return self.final_norm(h)
