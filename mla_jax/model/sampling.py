"""From logits to tokens: greedy, temperature, top-k and top-p, each request with its own seed.

Every row draws with ``fold_in(key(seed), position)``, so a token depends on the request's own
logits, seed and position and on nothing else in the batch.
"""

from collections.abc import Callable, Iterable, Mapping
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
    above an edge, which is found bit by bit. Loops and branches are not nested: XLA's CUDA graphs
    hold them so, and the host need not wait for the device to know which way it goes.
    """
    logits = logits.astype(jnp.float32)
    top = logits.max(axis=-1)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = batch.temperature > 0
    rows = _Rows(logits, top, jnp.where(warm, batch.temperature, 1.0))
    edges = _edges(rows, jnp.where(warm, batch.top_k, 0), jnp.where(warm, batch.top_p, 1.0))
    seed, position = jnp.asarray(batch.seed), jnp.asarray(batch.position)
    token = jax.lax.cond(
        warm.any(),
        lambda: jnp.where(warm, _draw(rows, *edges, seed, position), best),
        lambda: best,
    )
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, chosen - top - jnp.log(jnp.exp(logits - top[:, None]).sum(axis=-1))


@dataclass(frozen=True)
class _Rows:
    """Logits, and what follows from them element by element: computed where it is read."""

    logits: Float[Array, "requests vocab"]
    top: Float[Array, "requests"]
    temperature: Float[Array, "requests"]

    def scaled(self, x: Float[Array, "requests vocab"]) -> Float[Array, "requests vocab"]:
        """Subtracted before the division, so that no temperature overflows."""
        return (x - self.top[:, None]) / self.temperature[:, None]

    def order(self) -> UInt[Array, "requests vocab"]:
        """Compare as the logits do; 0 is below all of them."""
        bits = jax.lax.bitcast_convert_type(jnp.where(self.logits == 0, 0, self.logits), jnp.uint32)
        return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def mass(self) -> Float[Array, "requests vocab"]:
        """Probabilities, times a constant of the row."""
        return jnp.exp(self.scaled(self.logits))

    def mass_at(self, order: UInt[Array, "requests"]) -> Float[Array, "requests"]:
        """Of one token with this place in the order; 0 if there is none."""
        bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(1 << 31), ~order)
        value = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(order > 0, jnp.exp(self.scaled(value[:, None]))[:, 0], 0)


def _draw(
    rows: _Rows,
    edge: UInt[Array, "requests"],
    last: UInt[Array, "requests"],
    seed: UInt[Array, "requests"],
    position: Int[Array, "requests"],
) -> Int[Array, "requests"]:
    """Gumbel-max over the tokens that the filters leave."""

    def noise(seed: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, "vocab"]:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, rows.logits.shape[1:], jnp.float32)

    order, edge, last = rows.order(), edge[:, None], last[:, None]
    kept = (order > edge) | ((order == edge) & (_lower_first(rows) >= last))
    z = jnp.where(kept, rows.scaled(rows.logits), -jnp.inf) + jax.vmap(noise)(seed, position)
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _edges(
    rows: _Rows, top_k: Int[Array, "requests"], top_p: Float[Array, "requests"]
) -> tuple[UInt[Array, "requests"], UInt[Array, "requests"]]:
    """``(edge, last)``: a token is left above the edge, and at it if its id comes first.

    Both are 0 where no filter cuts.
    """
    vocab = rows.logits.shape[1]
    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1
    cut = by_k | by_p

    def counted(least: UInt[Array, "requests one"]) -> tuple[Array, Array]:
        found = rows.order() >= least
        return found.astype(jnp.float32).sum(-1), jnp.where(found, rows.mass(), 0).sum(-1)

    def held(least: UInt[Array, "requests one"]) -> tuple[Array]:
        return (jnp.where(rows.order() >= least, rows.mass(), 0).sum(-1),)

    k = jnp.where(by_k, top_k.astype(jnp.float32), jnp.inf)
    edge, count, mass = _largest(counted, k, cut)
    ties = jnp.where(by_k, k - count, 0)
    need = jnp.where(by_p, top_p * (mass + ties * rows.mass_at(edge)), jnp.inf)
    inner, mass = _largest(held, need, by_p)
    some = jnp.maximum(jnp.ceil((need - mass) / rows.mass_at(inner)), 1)
    some = jnp.where(inner == edge, jnp.minimum(ties, some), some)
    edge, ties = jnp.where(by_p, inner, edge), jnp.where(by_p, some, ties)

    def equal(least: UInt[Array, "requests one"]) -> tuple[Array]:
        found = (rows.order() == edge[:, None]) & (_lower_first(rows) >= least)
        return (found.astype(jnp.float32).sum(-1),)

    bits = int(vocab).bit_length()
    return edge, _largest(equal, jnp.where(cut, ties, jnp.inf), cut, bits=bits)[0]


def _lower_first(rows: _Rows) -> UInt[Array, "one vocab"]:
    """Larger for lower ids; 1 or more."""
    return jnp.arange(rows.logits.shape[1], 0, -1, dtype=jnp.uint32)[None]


def _largest(
    sums: Callable[[UInt[Array, "requests one"]], tuple[Array, ...]],
    need: Float[Array, "requests"],
    wanted: Bool[Array, "requests"],
    *,
    bits: int = 32,
) -> tuple[Array, ...]:
    """The largest ``t`` whose first sum reaches ``need``, and all sums of ``t + 1``.

    Sums fall with ``t``. One pass for each bit, none if no row is wanted (then 0, and zeros).
    """

    def with_bit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        bit, t, *beyond = state
        more = t | (jnp.uint32(1) << bit.astype(jnp.uint32))
        found = sums(more[:, None])
        enough = found[0] >= need
        beyond = [jnp.where(enough, b, f) for b, f in zip(beyond, found, strict=True)]
        return bit - 1, jnp.where(enough, more, t), *beyond

    t, zero = jnp.zeros(need.shape, jnp.uint32), jnp.zeros(need.shape, jnp.float32)
    zeros = [zero for _ in jax.eval_shape(sums, t[:, None])]
    first = jnp.where(wanted.any(), bits - 1, -1)
    return jax.lax.while_loop(lambda state: state[0] >= 0, with_bit, (first, t, *zeros))[1:]
