"""Token embedding and the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.model.linear import precision_of
from mla_jax.types import Array, Float, Int

__all__ = ["Embed", "Head", "project_to_vocab"]


class Embed(nnx.Module):
    """``embedding[token]``."""

    def __init__(self, vocab: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, hidden), jnp.float32)
        self.embedding = nnx.Param(table.astype(dtype))

    def __call__(self, token_ids: Int[Array, "*tokens"]) -> Float[Array, "*tokens hidden"]:
        return self.embedding[...][token_ids]


class Head(nnx.Module):
    """Untied output projection, ``kernel [hidden, vocab]``."""

    def __init__(self, hidden: int, vocab: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (hidden, vocab), jnp.float32)
        self.kernel = nnx.Param((kernel * hidden**-0.5).astype(dtype))


def project_to_vocab(
    hidden: Float[Array, "... hidden"], kernel: Float[Array, "a b"], *, tied: bool
) -> Float[Array, "... vocab"]:
    """float32 logits; a tied kernel is the embedding ``[vocab, hidden]``."""
    return lax.dot_general(
        hidden,
        kernel,
        (((hidden.ndim - 1,), (1 if tied else 0,)), ((), ())),
        precision=precision_of(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
