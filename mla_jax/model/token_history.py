"""Penalties and logit bias: what a request has said so far, kept on the device.

A penalty needs to know which tokens a request has. The engine sends a step before it has read the
tokens of the step before, so the host does not know; but every token is fed to the model before
the next one is drawn, and a step sees what it is fed. So each step counts the tokens that it
feeds, in one row for each request that asks for a penalty or a bias. A request that is computed
again from its first token (after it was evicted, or after an interruption) is counted again.

A step without such requests skips all of this, and leaves the arrays where they are.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from mla_jax.placement import Placement, put
from mla_jax.types import Array, Bool, Float, Int

__all__ = [
    "Adjustments",
    "Fed",
    "HistoryStore",
    "Scores",
    "TokenHistory",
    "adjusted",
    "raw_logits",
    "history_specs",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """What a step's requests ask of their logits; nothing on padding."""

    row: Int[Array | np.ndarray, "requests"]  # of the history; -1 = no penalty, no bias
    prompt_len: Int[Array | np.ndarray, "requests"]  # this and the others count where there is one
    repetition: Float[Array | np.ndarray, "requests"]  # float32; 1 = off
    presence: Float[Array | np.ndarray, "requests"]  # float32; 0 = off
    frequency: Float[Array | np.ndarray, "requests"]  # float32; 0 = off

    @classmethod
    def nothing(cls, requests: int) -> "Adjustments":
        """Padding only, in numpy."""
        return cls(
            row=np.full(requests, -1, np.int32),
            prompt_len=np.zeros(requests, np.int32),
            repetition=np.ones(requests, np.float32),
            presence=np.zeros(requests, np.float32),
            frequency=np.zeros(requests, np.float32),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """One row for each request with a penalty or a bias; other requests have none."""

    counts: Int[Array, "rows vocab"]  # 2 x how often it was drawn, + 1 if it is in the prompt
    bias: Float[Array, "rows vocab"]  # float32, added to the logits
    raw: Float[Array, "rows vocab"]  # float32 logits of the last step, before anything was added

    @classmethod
    def zeros(cls, rows: int, vocab: int) -> "TokenHistory":
        """Nothing said, no bias; in numpy."""
        return cls(
            counts=np.zeros((rows, vocab), np.int32),  # pyright: ignore[reportArgumentType]
            bias=np.zeros((rows, vocab), np.float32),  # pyright: ignore[reportArgumentType]
            raw=np.zeros((rows, vocab), np.float32),  # pyright: ignore[reportArgumentType]
        )

    @classmethod
    def row_bytes(cls, vocab: int) -> int:
        """Bytes of one row."""
        return sum(x.nbytes for x in jax.tree.leaves(cls.zeros(1, vocab)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Fed:
    """The tokens that a step feeds."""

    ids: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    requests: Int[Array, "tokens"]  # of each token
    real: Bool[Array, "tokens"]  # not padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Logits that tokens are drawn from."""

    logits: Float[Array, "requests vocab"]  # float32
    top: Float[Array, "requests"]  # the largest
    best: Int[Array, "requests"]  # its token

    @classmethod
    def of(cls, logits: Float[Array, "requests vocab"]) -> "Scores":
        """With the largest of each row."""
        return cls(logits, logits.max(axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32))


class HistoryStore:
    """The history of an engine's requests, which each step takes and gives back.

    Every device has all of it, as each draws all tokens.
    """

    def __init__(self, rows: int, vocab: int, placement: Placement):
        self.rows, self.vocab, self._placement = rows, vocab, placement
        self._sharding = placement.everywhere
        self.reset()

    def reset(self) -> None:
        """Forget everything: also what an interrupted step took and did not give back."""
        zeros = TokenHistory.zeros(self.rows, self.vocab)
        self.now: TokenHistory = put(zeros, self._sharding)

    def begin(self, row: int, bias: tuple[tuple[int, float], ...]) -> None:
        """A request begins at its first token; row ``rows`` is of no request."""
        dense = np.zeros(self.vocab, np.float32)
        for token, value in bias:
            dense[token] = value
        given = put((np.asarray(row, np.int32), dense), self._sharding)
        with self._placement.working():
            self.now = _beginning(self._sharding)(self.now, *given)


def history_specs(rows: int, vocab: int, placement: Placement) -> TokenHistory:
    """``HistoryStore.now`` without memory: shapes, dtypes and places."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.everywhere),
        TokenHistory.zeros(rows, vocab),
    )


@cache
def _beginning(sharding: Sharding) -> Any:
    return jax.jit(_begun, donate_argnums=(0,), out_shardings=sharding)


def _begun(history: TokenHistory, row: Int[Array, ""], bias: Float[Array, "vocab"]) -> TokenHistory:
    return replace(
        history,
        counts=history.counts.at[row].set(0, mode="drop"),
        bias=history.bias.at[row].set(bias, mode="drop"),
    )


def adjusted(
    scores: Scores, asked: Adjustments, history: TokenHistory, fed: Fed
) -> tuple[Scores, TokenHistory]:
    """Scores with bias and penalties, and the history with the tokens that this step feeds.

    In this order, of a token that was drawn ``n`` times: the bias is added; if it was drawn or is
    in the prompt, a positive logit is divided by ``repetition`` and a negative one multiplied with
    it (Hugging Face, vLLM); ``frequency * n`` is subtracted, and ``presence`` if ``n > 0`` (OpenAI,
    vLLM). Requests without a row keep their logits bit for bit.
    """
    row = jnp.asarray(asked.row)

    def change(scores: Scores, history: TokenHistory) -> tuple[Scores, TokenHistory]:
        counts = _counted(history.counts, asked, fed)
        mine, some = jnp.maximum(row, 0), (row >= 0)[:, None]
        raw = scores.logits
        x = raw + history.bias[mine]
        drawn, seen = counts[mine] >> 1, counts[mine] > 0
        by = jnp.asarray(asked.repetition)[:, None]
        x = jnp.where(seen, jnp.where(x > 0, x / by, x * by), x)
        x = x - jnp.asarray(asked.frequency)[:, None] * drawn.astype(jnp.float32)
        x = x - jnp.where(drawn > 0, jnp.asarray(asked.presence)[:, None], 0)
        kept = history.raw.at[jnp.where(row < 0, len(counts), row)].set(raw, mode="drop")
        return Scores.of(jnp.where(some, x, raw)), replace(history, counts=counts, raw=kept)

    def changed(state: tuple[Array, Scores, TokenHistory]) -> tuple[Array, Scores, TokenHistory]:
        return state[0] - 1, *change(*state[1:])

    # A loop of one turn or none: unlike a branch, it leaves in place what it does not change.
    # Turns are counted because a condition must be computed: one that is merely carried has no
    # kernel, and XLA's CUDA graphs then read it before anything has written it (JAX 0.11.2).
    state = (row >= 0).any().astype(jnp.int32), scores, history
    return jax.lax.while_loop(lambda state: state[0] > 0, changed, state)[1:]


def raw_logits(
    scores: Scores, asked: Adjustments, history: TokenHistory, tokens: Int[Array, "requests"]
) -> Float[Array, "requests"]:
    """Logits of one token of each request, as they were before ``adjusted``."""
    row = jnp.asarray(asked.row)
    here = jnp.take_along_axis(scores.logits, tokens[:, None], axis=-1)[:, 0]
    return jnp.where(row >= 0, history.raw[jnp.maximum(row, 0), tokens], here)


def _counted(
    counts: Int[Array, "rows vocab"], asked: Adjustments, fed: Fed
) -> Int[Array, "rows vocab"]:
    """With the fed tokens; those of a prompt come before those that were drawn."""
    row = jnp.asarray(asked.row)[fed.requests]
    mine = fed.real & (row >= 0)
    given = fed.positions < jnp.asarray(asked.prompt_len)[fed.requests]
    prompt = jnp.where(mine & given, row, len(counts))
    drawn = jnp.where(mine & ~given, row, len(counts))
    counts = counts.at[prompt, fed.ids].max(1, mode="drop")
    return counts.at[drawn, fed.ids].add(2, mode="drop")
