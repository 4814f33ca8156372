"""Token embedding and the output head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from mla_jax.errors import ArgumentError, described
from mla_jax.model.linear import precision_of
from mla_jax.types import Array, Float, Int

__all__ = ["Embed", "Head", "checked_tokens", "project_to_vocab"]


def checked_tokens(token_ids: Any, config: Any) -> Int[Array, "sequences tokens"]:
    """Token ids of whole sequences; their values are checked where they are known.

    Raises:
        ArgumentError: no integers in two axes, longer than the model's positions, or an id that
            is not in the vocabulary.
    """
    where, form = "full: token_ids", "integers [sequences, tokens]"
    try:
        ids = jnp.asarray(token_ids)
    except (TypeError, ValueError):
        raise ArgumentError(where, described(token_ids), form) from None
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        hint = "One sequence is token_ids[None]." if ids.ndim == 1 else ""
        raise ArgumentError(where, f"{ids.dtype}{list(ids.shape)}", form, hint)
    if ids.shape[1] > config.max_positions:
        allowed = f"at most {config.max_positions} (config.max_positions)"
        raise ArgumentError(f"{where}: tokens", ids.shape[1], allowed)
    if ids.size and not isinstance(ids, Tracer):
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= config.vocab:
            allowed = f"0 to {config.vocab - 1} (vocabulary)"
            raise ArgumentError(where, least if least < 0 else most, allowed)
    return ids


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
