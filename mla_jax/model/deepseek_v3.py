"""The V2/V3 decoder: V2-Lite, V2, V3, R1, Kimi-K2, GLM-4.7-Flash and Youtu by config alone."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import ModelConfig
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.model.embed import Embed, Head, project_to_vocab
from mla_jax.model.mla import MLA, Absorbed, StepPlan, plan_step
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.moe import MoE
from mla_jax.model.norm import RMSNorm
from mla_jax.model.stack import Layers, Stack, periods_of
from mla_jax.placement import Placement
from mla_jax.types import Array, Bool, Float, Int

__all__ = ["Block", "DeepseekV3"]


class Block(nnx.Module):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sparse: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}
        self.attn_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.attn = MLA(config, **facts)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        if sparse:
            self.moe = MoE(config, **facts)
        else:
            self.mlp = SwiGLU(config.hidden, config.mlp, bias=config.mlp_bias, **facts)
        self.sparse = sparse

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
        flat = h.reshape(-1, h.shape[-1])
        real = jnp.ones(flat.shape[:1], jnp.bool_)
        return self.feed_forward(flat, real, backend="xla").reshape(h.shape)  # has a derivative

    def feed_forward(
        self,
        h: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """``h + mlp_or_moe(norm(h))``; rows that are not real reach no expert."""
        x = self.mlp_norm(h)
        if not self.sparse:
            return h + self.mlp(x, backend=backend)
        return self.moe(x, real, onto=h, backend=backend, placement=placement)


class DeepseekV3(nnx.Module):
    """Token ids to hidden states to float32 logits; equal layers are stacked (``stack.Stack``).

    With ``fp8`` the layers' products have block-scaled e4m3 weights, zeros until they are loaded.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        def block(sparse: bool, rngs: nnx.Rngs) -> Block:
            return Block(config, sparse=sparse, dtype=dtype, rngs=rngs, fp8=fp8)

        self.embed = Embed(config.vocab, config.hidden, dtype=dtype, rngs=rngs)
        periods = periods_of(config.sparse_layers)
        self.stacks: Sequence[Stack[Block]] = nnx.List(
            Stack(period, block, rngs) for period in periods
        )
        self.final_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        if not config.tied:
            self.lm_head = Head(config.hidden, config.vocab, dtype=dtype, rngs=rngs)
        self.tied, self.dims, self.rope = config.tied, config.dims, config.rope

    @property
    def layers(self) -> Layers[Block]:
        """The decoder's layers in order, each with copies of its weights."""
        return Layers(self.stacks)

    def derive(self) -> list[list[Absorbed]]:
        """What serving needs beside the weights: of each stack, each block's absorbed ones.

        Follows from the weights as they are now; a server derives it when it takes the weights.
        """
        return [
            [jax.vmap(lambda block: block.attn.absorbed())(block) for block in stack.blocks]
            for stack in self.stacks
        ]

    def absorb(self) -> None:
        """Nothing: whoever serves derives the absorbed weights (``derive``), so none go stale.

        Called before serving or not, tokens are the same.
        """

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

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """float32 logits of some hidden states."""
        kernel = self.embed.embedding[...] if self.tied else self.lm_head.kernel[...]
        return project_to_vocab(hidden, kernel, tied=self.tied)
