"""What the decoders of all families share: embedding, stacks of blocks, final norm, head.

With ``fp8`` a block's products have block-scaled e4m3 weights, zeros until they are loaded.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.config import LayerKind, ModelConfig
from mla_jax.errors import ArgumentError
from mla_jax.model.embed import Embed, Head, project_to_vocab
from mla_jax.model.mla import MLA, Absorbed
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.moe import MoE
from mla_jax.model.norm import RMSNorm
from mla_jax.model.stack import Layers, Stack, periods_of
from mla_jax.placement import Placement
from mla_jax.types import Array, Bool, Float

__all__ = ["Decoder", "DecoderBlock"]


class DecoderBlock[Attention: MLA](nnx.Module):
    """``h += attn(norm(h)); h += mlp_or_moe(norm(h))``; attention is the family's."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        kind: LayerKind,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}
        self.attn_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.attn = self.attention(config, kind, **facts)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.eps, dtype=dtype)
        if kind.sparse:
            self.moe = MoE(config, **facts)
        else:
            self.mlp = SwiGLU(config.hidden, config.mlp, bias=config.mlp_bias, **facts)
        self.sparse = kind.sparse

    @staticmethod
    def attention(
        config: ModelConfig, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool
    ) -> Attention:
        """The attention of a layer of this kind."""
        raise ArgumentError("DecoderBlock.attention", "the base class", "a family's own block")

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

    def feed_whole(
        self, h: Float[Array, "sequences tokens hidden"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """``feed_forward`` of whole sequences, all rows real; differentiable."""
        flat = h.reshape(-1, h.shape[-1])
        real = jnp.ones(flat.shape[:1], jnp.bool_)
        return self.feed_forward(flat, real, backend="xla").reshape(h.shape)


class Decoder[Block: DecoderBlock](nnx.Module):
    """Weights of a decoder; equal layers are stacked (``stack.Stack``)."""

    def __init__(
        self,
        config: ModelConfig,
        block: Callable[[LayerKind, nnx.Rngs], Block],
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """``block(kind, rngs)`` makes one layer."""
        self.embed = Embed(config.vocab, config.hidden, dtype=dtype, rngs=rngs)
        periods = periods_of(config.kinds)
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
        """Nothing: the engine derives the absorbed weights (``derive``), so none go stale.

        Called before serving or not, tokens are the same.
        """

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """float32 logits of some hidden states."""
        kernel = self.embed.embedding[...] if self.tied else self.lm_head.kernel[...]
        return project_to_vocab(hidden, kernel, tied=self.tied)
