"""The V2/V3 decoder: V2-Lite, V2, V3, R1, Kimi-K2, GLM-4.7-Flash and Youtu by config alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import ModelConfig
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.model.embed import Embed, Head, project_to_vocab
from mla_jax.model.mla import MLA
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.moe import MoE
from mla_jax.model.norm import RMSNorm
from mla_jax.types import Array, Bool, Float, Int

__all__ = ["Block", "DeepseekV3"]


class Block(nnx.Module):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))``."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.attn = MLA(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        if config.sparse_layers[layer]:
            self.moe = MoE(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SwiGLU(
                config.hidden, config.mlp, bias=config.mlp_bias, dtype=dtype, rngs=rngs
            )
        self.sparse = config.sparse_layers[layer]

    def __call__(
        self,
        h: Float[Array, "tokens hidden"],
        meta: MLAMetadata,
        cache: LatentCache,
        *,
        backend: str | None = None,
        plan: object = None,
    ) -> tuple[Float[Array, "tokens hidden"], LatentCache]:
        y, cache = self.attn(self.attn_norm(h), meta, cache, backend=backend, plan=plan)
        return self.feed_forward(h + y, meta.real), cache

    def full(
        self, h: Float[Array, "sequences tokens hidden"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """The block over whole sequences of one length, expanded attention, no cache."""
        h = h + jax.vmap(self.attn.full)(self.attn_norm(h))
        flat = h.reshape(-1, h.shape[-1])
        return self.feed_forward(flat, jnp.ones(flat.shape[:1], jnp.bool_)).reshape(h.shape)

    def feed_forward(
        self, h: Float[Array, "tokens hidden"], real: Bool[Array, "tokens"]
    ) -> Float[Array, "tokens hidden"]:
        x = self.mlp_norm(h)
        return h + (self.moe(x, real) if self.sparse else self.mlp(x))


class DeepseekV3(nnx.Module):
    """Token ids to hidden states to float32 logits. Call ``absorb()`` once weights are in."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed = Embed(config.vocab, config.hidden, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            Block(config, i, dtype=dtype, rngs=rngs) for i in range(config.layers)
        )
        self.final_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        if not config.tied:
            self.lm_head = Head(config.hidden, config.vocab, dtype=dtype, rngs=rngs)
        self.tied = config.tied

    def absorb(self) -> None:
        """Derive every layer's decode weights from its up-projection."""
        for layer in self.layers:
            layer.attn.absorb()

    def __call__(
        self,
        token_ids: Int[Array, "tokens"],
        meta: MLAMetadata,
        caches: Sequence[LatentCache],
        *,
        backend: str | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], list[LatentCache]]:
        """One step over paged caches: final hidden states and the caches with new rows."""
        h = self.embed(token_ids)
        plan = self.layers[0].attn.plan(meta, caches[0], dtype=h.dtype, backend=backend)
        after = []
        for layer, cache in zip(self.layers, caches, strict=True):
            h, cache = layer(h, meta, cache, backend=backend, plan=plan)
            after.append(cache)
        return self.final_norm(h), after

    def full(
        self, token_ids: Int[Array, "sequences tokens"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """Whole sequences without a cache: training, and the oracle of everything above.

        Shorter sequences are padded on the right: causality keeps padding out of the rest.
        """
        h = self.embed(token_ids)
        for layer in self.layers:
            h = layer.full(h)
        return self.final_norm(h)

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """float32 logits of some hidden states."""
        kernel = self.embed.embedding[...] if self.tied else self.lm_head.kernel[...]
        return project_to_vocab(hidden, kernel, tied=self.tied)
