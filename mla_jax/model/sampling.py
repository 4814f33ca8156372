"""From logits to tokens: greedy, temperature, top-k and top-p, each request with its own seed.

Every row draws with ``fold_in(key(seed), position)``, so a token depends on the request's own
logits, seed and position and on nothing else in the batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.checks import is_int, is_real
from mla_jax.errors import EngineError
from mla_jax.types import Array, Float, Int

__all__ = ["SamplingBatch", "SamplingParams", "sample"]

_COLDEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of its tokens. Checks itself.

    Raises:
        EngineError: a value outside its range, named.
    """

    temperature: float = 0.0  # 0 = the likeliest token
    top_k: int = 0  # draw among the k likeliest; 0 = all
    top_p: float = 1.0  # … and among the fewest that hold this mass; 1 = all
    seed: int = 0  # 32 bits
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()  # end the request, and are its last token
    ignore_eos: bool = False  # the model's own end tokens do not stop; stop_token_ids still do

    def __post_init__(self):
        t, p = self.temperature, self.top_p
        _require(is_real(t) and (t == 0 or t >= _COLDEST), "temperature", t,
                 f"0 (greedy) or at least {_COLDEST}")  # fmt: skip
        _require(is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k, "0 or more")
        _require(is_real(p) and 0 < p <= 1, "top_p", p, "above 0, at most 1")
        _require(is_int(self.seed) and 0 <= self.seed < 2**32, "seed", self.seed, "0 to 2**32 - 1")
        n = self.max_new_tokens
        _require(is_int(n) and n >= 1, "max_new_tokens", n, "1 or more")
        stops = self.stop_token_ids
        listed = isinstance(stops, Iterable) and not isinstance(stops, str | bytes | Mapping)
        _require(listed, "stop_token_ids", stops, "token ids in a tuple")
        object.__setattr__(self, "stop_token_ids", tuple(stops))  # of a generator too: read once
        for token in self.stop_token_ids:
            _require(is_int(token) and token >= 0, "stop_token_ids", token, "0 or more")
        _require(isinstance(self.ignore_eos, bool | np.bool_), "ignore_eos", self.ignore_eos,
                 "True or False")  # fmt: skip


def _require(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        given = given if is_int(given) else repr(given)
        raise EngineError(f"SamplingParams: {name}", given, allowed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """``SamplingParams`` of a step's requests; all zeros (greedy) on padding."""

    temperature: Float[Array | np.ndarray, "requests"]  # float32; 0 = greedy
    top_k: Int[Array | np.ndarray, "requests"]  # 0 = off
    top_p: Float[Array | np.ndarray, "requests"]  # float32; 1 = off
    seed: Int[Array | np.ndarray, "requests"]  # uint32
    position: Int[Array | np.ndarray, "requests"]  # absolute position of the token to be drawn

    @classmethod
    def nothing(cls, requests: int) -> "SamplingBatch":
        """Padding only, in numpy."""
        return cls(
            temperature=np.zeros(requests, np.float32),
            top_k=np.zeros(requests, np.int32),
            top_p=np.ones(requests, np.float32),
            seed=np.zeros(requests, np.uint32),
            position=np.zeros(requests, np.int32),
        )


def sample(
    logits: Float[Array, "requests vocab"], batch: SamplingBatch
) -> tuple[Int[Array, "requests"], Float[Array, "requests"]]:
    """``(token, log softmax(logits)[token])`` of each request, int32 and float32.

    The log-probability is the model's own: no temperature, no filter. It is NaN when the
    logits are. Temperature divides first, then top-k cuts, then top-p cuts what top-k left.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = batch.temperature > 0
    token = jax.lax.cond(
        warm.any(),
        lambda: jnp.where(warm, jax.vmap(_draw)(logits, batch), best),
        lambda: best,
    )
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def _draw(logits: Float[Array, "vocab"], row: SamplingBatch) -> Int[Array, ""]:
    """Gumbel-max over the tokens that the filters leave; ties in a filter go to the lower id."""
    order = jnp.argsort(logits, descending=True, stable=True).astype(jnp.int32)
    z = logits[order]
    # Subtracted before the division, so that no temperature overflows.
    z = (z - z[0]) / jnp.where(row.temperature > 0, row.temperature, 1.0)
    rank = jnp.arange(z.shape[0], dtype=jnp.int32)
    z = jnp.where((row.top_k == 0) | (rank < row.top_k), z, -jnp.inf)
    p = jax.nn.softmax(z)
    before = jnp.cumsum(p) - p  # mass of the likelier tokens
    z = jnp.where((row.top_p >= 1) | (before < row.top_p) | (rank == 0), z, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(row.seed), row.position)
    return order[jnp.argmax(z + jax.random.gumbel(key, z.shape, jnp.float32)[order])]
