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
from mla_jax.types import Array, Bool, Float, Int, UInt

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
    seed: UInt[Array | np.ndarray, "requests"]  # uint32
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
    logits are. Temperature divides first, then top-k cuts, then top-p cuts what top-k left; equal
    logits rank by id, the lower one first. Nothing is sorted: what a filter leaves are all tokens
    above a threshold, which is found bit by bit.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = batch.temperature > 0
    token = jax.lax.cond(
        warm.any(),
        lambda: jnp.where(warm, _draw(logits, batch), best),
        lambda: best,
    )
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    top = logits.max(axis=-1)
    return token, chosen - top - jnp.log(jnp.exp(logits - top[:, None]).sum(axis=-1))


def _draw(logits: Float[Array, "requests vocab"], batch: SamplingBatch) -> Int[Array, "requests"]:
    """Gumbel-max over the tokens that the filters leave."""
    # Subtracted before the division, so that no temperature overflows.
    z = logits - logits.max(axis=-1, keepdims=True)
    z = z / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    kept = _kept(_ordered(logits), jnp.exp(z), batch.top_k, batch.top_p)

    def noise(seed: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, "vocab"]:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, z.shape[1:], jnp.float32)

    z = jnp.where(kept, z, -jnp.inf) + jax.vmap(noise)(batch.seed, batch.position)
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _kept(
    order: UInt[Array, "requests vocab"],
    mass: Float[Array, "requests vocab"],
    top_k: Int[Array, "requests"],
    top_p: Float[Array, "requests"],
) -> Bool[Array, "requests vocab"]:
    """Whether top-k and then top-p leave a token: likelier ones are larger in ``order``.

    Either leaves all tokens above an edge, and of those equal to it the first ``ties``.
    """
    vocab = order.shape[1]

    def above(edge: UInt[Array, "requests"], of: Float[Array, "requests vocab"]) -> Array:
        return jnp.where(order > edge[:, None], of, 0).sum(-1)

    def at(edge: UInt[Array, "requests"]) -> Float[Array, "requests"]:
        return jnp.where(order == edge[:, None], mass, 0).max(-1)

    count, k = jnp.ones_like(mass), top_k.astype(jnp.float32)
    edge = _threshold(order, count, k, (top_k > 0) & (top_k < vocab))
    ties = k - above(edge, count)
    need = top_p * (above(edge, mass) + ties * at(edge))
    inner = _threshold(order, mass, need, top_p < 1)
    held = jnp.maximum(jnp.ceil((need - above(inner, mass)) / at(inner)), 1)
    held = jnp.where(inner == edge, jnp.minimum(ties, held), held)
    edge, ties = jnp.where(top_p < 1, inner, edge), jnp.where(top_p < 1, held, ties)
    equal = order == edge[:, None]
    first = jnp.arange(vocab, 0, -1, dtype=jnp.uint32)[None]  # of equal ones, the lower ids
    last = _threshold(
        first, equal.astype(jnp.float32), ties, equal.sum(-1) > ties.astype(jnp.int32)
    )
    return (order > edge[:, None]) | (equal & (first >= last[:, None]))


def _threshold(
    order: UInt[Array, "#requests vocab"],
    mass: Float[Array, "requests vocab"],
    need: Float[Array, "requests"],
    wanted: Bool[Array, "requests"],
) -> UInt[Array, "requests"]:
    """Largest ``t`` with ``sum(mass[order >= t]) >= need``, for wanted rows; else 0.

    One pass for each of the 32 bits, none if no row is wanted.
    """

    def with_bit(state: tuple[Array, Array]) -> tuple[Array, Array]:
        bit, t = state
        more = t | (jnp.uint32(1) << bit.astype(jnp.uint32))
        enough = jnp.where(order >= more[:, None], mass, 0).sum(-1) >= need
        return bit - 1, jnp.where(wanted & enough, more, t)

    first = jnp.where(wanted.any(), 31, -1)
    none = jnp.zeros(need.shape, jnp.uint32)
    return jax.lax.while_loop(lambda state: state[0] >= 0, with_bit, (first, none))[1]


def _ordered(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """uint32 that compare as the floats do; 0 is below all of them."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
