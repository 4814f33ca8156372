"""What the decoders of all families share: embedding, stacks of blocks, final norm, head.

With ``fp8`` a block's products have block-scaled e4m3 weights, zeros until they are loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import AddNorm, RowNorm
from mla_jax.placement import Placement
from mla_jax.types import Array, Bool, Float

__all__ = ["Decoder", "DecoderBlock", "Derived"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Derived:
    """Of one block, beside its weights."""

    absorbed: Absorbed
    after: Float[Array, "*layers hidden"]
    """Gain of the norm that follows the block: the next block's first, or the decoder's last."""


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

    def before_feed(self, h: Float[Array, "tokens hidden"]) -> AddNorm:
        """What attention's result is added to, and the norm of that, which the MLP reads."""
        return AddNorm(residual=h, gain=self.mlp_norm.scale[...], eps=self.mlp_norm.eps)

    def feed_forward(
        self,
        h: Float[Array, "tokens hidden"],
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        *,
        after: Float[Array, "hidden"],
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """``h + mlp_or_moe(x)`` of ``x = norm(h)``, and what the next block reads of it.

        That is normalised with the gain ``after``. Rows that are not real reach no expert.
        """
        facts = {"backend": backend, "placement": placement}
        then = AddNorm(residual=h, gain=after, eps=self.mlp_norm.eps)
        if not self.sparse:
            return self.mlp.onto(then, x, **facts)
        norm = RowNorm(gain=self.mlp_norm.scale[...], eps=self.mlp_norm.eps)
        return self.moe.onto(then, x, real, norm=norm, **facts)

    def feed_whole(
        self, h: Float[Array, "sequences tokens hidden"]
    ) -> Float[Array, "sequences tokens hidden"]:
        """``h + mlp_or_moe(norm(h))`` of whole sequences, all rows real; differentiable."""
        flat = h.reshape(-1, h.shape[-1])
        real = jnp.ones(flat.shape[:1], jnp.bool_)
        unread = jnp.zeros(h.shape[-1:], h.dtype)
        facts = {"after": unread, "backend": "xla"}
        return self.feed_forward(flat, self.mlp_norm(flat), real, **facts)[0].reshape(h.shape)


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
        self.config = config

    @property
    def layers(self) -> Layers[Block]:
        """The decoder's layers in order, each with copies of its weights."""
        return Layers(self.stacks)

    def first_norm(self, h: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """What the first block reads of the embeddings; each block makes the next one's."""
        gain = self.stacks[0].blocks[0].attn_norm.scale[...][0]
        return rms_norm(h, gain, eps=self.final_norm.eps)

    def derive(self) -> list[list[Derived]]:
        """What serving needs beside the weights, of each block of each stack.

        Follows from the weights as they are now; a server derives it when it takes the weights.
        """
        firsts = [stack.blocks[0].attn_norm.scale[...][:1] for stack in self.stacks]
        ends = [*firsts[1:], self.final_norm.scale[...][None]]
        found = []
        for stack, end in zip(self.stacks, ends, strict=True):
            gains = [block.attn_norm.scale[...] for block in stack.blocks]
            after = [*gains[1:], jnp.concatenate([gains[0][1:], end])]
            absorbed = [jax.vmap(lambda block: block.attn.absorbed())(b) for b in stack.blocks]
            pairs = zip(absorbed, after, strict=True)
            found.append([Derived(absorbed=a, after=gain) for a, gain in pairs])
        return found

    def absorb(self) -> None:
        """Nothing: the engine derives the absorbed weights (``derive``), so none go stale.

        Called before serving or not, tokens are the same.
        """

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """float32 logits of some hidden states."""
        tied = self.config.tied
        kernel = self.embed.embedding[...] if tied else self.lm_head.kernel[...]
        return project_to_vocab(hidden, kernel, tied=tied)
