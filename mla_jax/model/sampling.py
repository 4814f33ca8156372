"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, each request with its own seed.

Penalties and logit bias come first (``token_history``).

Every row draws with ``fold_in(key(seed), position)``, so a token depends on the request's own
logits, seed and position and on nothing else in the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.checks import is_int, is_real
from mla_jax.errors import EngineError
from mla_jax.model.token_history import Adjustments, Fed, Scores, TokenHistory, adjusted, raw_logits
from mla_jax.types import Array, Bool, Float, Int, UInt

__all__ = ["MOST_LOGPROBS", "Sampled", "SamplingBatch", "SamplingParams", "sample"]

_COLDEST, _HOTTEST = 1e-4, 1e30

_LEAST_MASS = 1e-30
"""Of top-p: smaller numbers are 0 in float32, and then no token would be kept."""

_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Parameters that become Python floats, so that ``SamplingParams`` can be hashed and compared."""

MOST_LOGPROBS = 20
"""Likeliest tokens that a request may ask to be told at each of its tokens (OpenAI's limit)."""


_OTHERS_WORDS = {
    "max_tokens": "here max_new_tokens",
    "max_completion_tokens": "here max_new_tokens",
    "n": "give the prompt n times, each with a seed of its own (seed=None)",
    "best_of": "give the prompt several times, each with a seed of its own (seed=None)",
    "eos_token_id": "here stop_token_ids",
    "do_sample": "temperature=0 takes the likeliest token",
}
"""Names of vLLM, OpenAI and transformers for what is here, or is not."""


def _refused_in_words[T](cls: type[T]) -> type[T]:
    """The dataclass, whose unknown parameters are no ``TypeError``."""
    make = cls.__init__
    names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]

    @wraps(make)
    def __init__(self: T, *values: Any, **given: Any) -> None:
        unknown = [repr(value) for value in values] + [n for n in given if n not in names]
        if unknown:
            hint = " ".join(f"{n}: {_OTHERS_WORDS[n]}." for n in unknown if n in _OTHERS_WORDS)
            allowed = f"by name: {', '.join(names)}"
            raise EngineError(f"{cls.__name__}: parameters", ", ".join(unknown), allowed, hint)
        make(self, **given)

    cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
    return cls


@_refused_in_words
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of its tokens. Checks itself.

    In the order in which they work: ``logit_bias`` is added; ``repetition_penalty`` divides
    positive logits and multiplies negative ones of tokens in the prompt or the answer (Hugging
    Face, vLLM); ``frequency_penalty`` is subtracted once for each time that a token was drawn,
    ``presence_penalty`` once if it was (OpenAI, vLLM); ``temperature``, ``top_k``, ``top_p`` and
    ``min_p`` (Hugging Face's order) leave those to draw from. Log-probabilities are of the model's
    own logits, before all of this.

    Raises:
        EngineError: a value outside its range, named.
    """

    temperature: float = 0.0  # 0 = the likeliest token
    top_k: int = 0  # draw among the k likeliest; 0 = all
    top_p: float = 1.0  # … and among the fewest that hold this mass; 1 = all
    min_p: float = 0.0  # … and those at least this times as likely as the likeliest; 0 = all
    repetition_penalty: float = 1.0  # above 0; 1 = none
    presence_penalty: float = 0.0  # -2 to 2; 0 = none
    frequency_penalty: float = 0.0  # -2 to 2; 0 = none
    logit_bias: tuple[tuple[int, float], ...] = ()  # or {token id: -100 to 100}
    seed: int | None = 0  # 32 bits: equal requests draw equal tokens; None = another each time
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()  # end the request, and are its last token
    ignore_eos: bool = False  # the model's own end tokens do not stop; stop_token_ids still do
    stop: tuple[str, ...] = ()  # or one string: end the request, whose text ends before it
    logprobs: int = 0  # so many likeliest tokens are told beside each token; at most 20

    def __post_init__(self):
        if is_int(self.top_k) and self.top_k == -1:  # vLLM's word for all
            object.__setattr__(self, "top_k", 0)
        for name, nothing in (("stop", ()), ("stop_token_ids", ()), ("logprobs", 0)):
            if getattr(self, name) is None:  # as OpenAI's and vLLM's requests say it
                object.__setattr__(self, name, nothing)
        for name in ("top_k", "seed", "max_new_tokens", "logprobs"):
            value = getattr(self, name)
            if is_int(value):  # of JAX too, which cannot compare with 2**32
                object.__setattr__(self, name, int(value))
        for name in _FLOATS:
            value = getattr(self, name)
            if not isinstance(value, int | float) and is_real(value):
                object.__setattr__(self, name, float(value))
        t, p = self.temperature, self.top_p
        _require(is_real(t) and (t == 0 or _COLDEST <= t <= _HOTTEST), "temperature", t,
                 f"0 (greedy) or {_COLDEST} to {_HOTTEST}")  # fmt: skip
        _require(is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k,
                 "0 to 2**31 - 1")  # fmt: skip
        _require(is_real(p) and 0 < p <= 1, "top_p", p, "above 0, at most 1")
        seed = self.seed
        _require(seed is None or (is_int(seed) and 0 <= seed < 2**32), "seed", seed,
                 "0 to 2**32 - 1, or None: another one for each request")  # fmt: skip
        n = self.max_new_tokens
        _require(is_int(n) and 1 <= n < 2**31, "max_new_tokens", n, "1 to 2**31 - 1")
        stops = self.stop_token_ids
        listed = isinstance(stops, Iterable) and not isinstance(stops, str | bytes | Mapping)
        _require(listed, "stop_token_ids", stops, "token ids in a tuple")
        stops = tuple(stops)  # of a generator too: read once
        for token in stops:
            _require(is_int(token) and token >= 0, "stop_token_ids", token, "0 or more")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stops)))
        _require(isinstance(self.ignore_eos, bool | np.bool_), "ignore_eos", self.ignore_eos,
                 "True or False")  # fmt: skip
        m, r = self.min_p, self.repetition_penalty
        _require(is_real(m) and 0 <= m <= 1, "min_p", m, "0 to 1")
        _require(is_real(r) and 1e-6 <= r <= 1e6, "repetition_penalty", r,
                 "1e-6 to 1e6 (1 = none)")  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(is_real(value) and -2 <= value <= 2, name, value, "-2 to 2")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        n = self.logprobs
        _require(is_int(n) and 0 <= n <= MOST_LOGPROBS, "logprobs", n, f"0 to {MOST_LOGPROBS}")

    @property
    def needs_history(self) -> bool:
        """Whether logits are changed before anything else (``token_history``)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or len(self.logit_bias) > 0
        )


def _checked_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in the order of their ids, from a mapping or from pairs."""
    allowed = "{token id: a number from -100 to 100}"
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise EngineError("SamplingParams: logit_bias", repr(bias), allowed) from None
    for token, value in pairs.items():
        ok = is_int(token) and 0 <= token < 2**31 and is_real(value) and -100 <= value <= 100
        _require(ok, "logit_bias", f"{token!r}: {value!r}", allowed)
    return tuple(sorted((int(token), float(value)) for token, value in pairs.items()))


def _checked_stop(stop: Any) -> tuple[str, ...]:
    """Strings in a tuple, from one string or several."""
    listed = isinstance(stop, Iterable) and not isinstance(stop, bytes | Mapping)
    _require(listed, "stop", stop, "a string, or strings in a tuple")
    stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        _require(isinstance(text, str) and text != "", "stop", text, "a string that is not empty")
    return stops


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
    min_p: Float[Array | np.ndarray, "requests"]  # float32; 0 = off
    adjust: Adjustments
    logprobs: Int[Array | np.ndarray, "requests"]  # likeliest tokens to be told

    @classmethod
    def nothing(cls, requests: int) -> "SamplingBatch":
        """Padding only, in numpy."""
        return cls(
            temperature=np.zeros(requests, np.float32),
            top_k=np.zeros(requests, np.int32),
            top_p=np.ones(requests, np.float32),
            seed=np.zeros(requests, np.uint32),
            position=np.zeros(requests, np.int32),
            min_p=np.zeros(requests, np.float32),
            adjust=Adjustments.nothing(requests),
            logprobs=np.zeros(requests, np.int32),
        )

    def fill(self, params: Sequence[SamplingParams]) -> None:
        """Write what the first requests ask for into arrays of ``nothing``.

        All but ``adjust.row`` and ``adjust.prompt_len``.
        """
        n = len(params)
        self.temperature[:n] = [one.temperature for one in params]
        self.top_k[:n] = [one.top_k for one in params]
        self.top_p[:n] = [one.top_p for one in params]
        self.seed[:n] = [one.seed for one in params]
        for i, one in enumerate(params):
            if one.min_p or one.logprobs:
                self.min_p[i], self.logprobs[i] = one.min_p, one.logprobs
            if one.needs_history:
                self.adjust.repetition[i] = one.repetition_penalty
                self.adjust.presence[i] = one.presence_penalty
                self.adjust.frequency[i] = one.frequency_penalty


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a step draws for each request."""

    token: Int[Array, "requests"]
    logprob: Float[Array, "requests"]  # of the token; NaN when the logits are
    best: Int[Array, "ranks requests"]  # MOST_LOGPROBS tokens, the likeliest first; 0 if not asked
    best_logprob: Float[Array, "ranks requests"]
    history: TokenHistory | None


def sample(
    logits: Float[Array, "requests vocab"],
    batch: SamplingBatch,
    history: TokenHistory | None = None,
    fed: Fed | None = None,
) -> Sampled:
    """A token of each request, its log-probability and those of the likeliest.

    ``token = argmax_i(z_i + g_i)``: ``z`` is ``(logits - max) / temperature``, minus infinity where
    a filter cuts, and ``g`` Gumbel noise of ``fold_in(key(seed), position)``. At temperature 0 it
    is ``argmax(logits)``.

    Log-probabilities are the model's own, ``log softmax(logits)``: no temperature, penalty or
    filter. ``history`` and ``fed`` serve penalties and bias (``token_history``); without them every
    ``batch.adjust.row`` must be -1. Temperature divides first, then top-k cuts, then top-p cuts
    what top-k left, then min-p; equal logits rank by id, the lower one first. Nothing is sorted:
    what a filter leaves are all tokens above an edge, which is found bit by bit.

    One loop holds all that a greedy request does not need. It makes one turn if any request needs
    some of it, and else none. There is one because each loop or branch costs 10 us on a GPU, even
    if it is not taken. XLA's CUDA graphs hold loops, so the host need not wait for the device.
    """
    scores = Scores.of(logits.astype(jnp.float32))
    top = scores.top
    total = top + jnp.log(jnp.exp(scores.logits - top[:, None]).sum(axis=-1))
    wanted = jnp.asarray(batch.logprobs)

    def asked(state: "_Asked") -> "_Asked":
        scores, history = Scores(state.logits, top, state.found.token), state.found.history
        best, best_logits = _likeliest(scores.logits, wanted)
        if history is not None and fed is not None:
            # What needs the logits unchanged reads them before they are changed in place.
            scores, best_logits = jax.lax.optimization_barrier((scores, best_logits))
            scores, history = adjusted(scores, batch.adjust, history, fed)
        token = _drawn(scores, batch)
        if history is not None:
            chosen = raw_logits(scores, batch.adjust, history, token)
        else:
            chosen = jnp.take_along_axis(scores.logits, token[:, None], axis=-1)[:, 0]
        found = Sampled(
            token=token,
            logprob=chosen - total,
            best=best,
            best_logprob=best_logits - total,
            history=history,
        )
        return _Asked(state.turns - 1, scores.logits, found)

    nothing = (MOST_LOGPROBS, len(logits))
    greedy = Sampled(
        token=scores.best,
        logprob=top - total,
        best=jnp.zeros(nothing, jnp.int32),
        best_logprob=jnp.zeros(nothing, jnp.float32),
        history=history,
    )
    more = jnp.asarray(batch.temperature > 0) | (wanted > 0) | (jnp.asarray(batch.adjust.row) >= 0)
    # Turns are counted, not carried as a flag: ``token_history.adjusted`` says why.
    state = _Asked(more.any().astype(jnp.int32), scores.logits, greedy)
    return jax.lax.while_loop(lambda state: state.turns > 0, asked, state).found


class _Asked(NamedTuple):
    """What the loop of one turn carries."""

    turns: Int[Array, ""]
    logits: Float[Array, "requests vocab"]  # float32
    found: Sampled


def _drawn(scores: Scores, batch: SamplingBatch) -> Int[Array, "requests"]:
    warm = batch.temperature > 0

    def drawn() -> Int[Array, "requests"]:
        seed, position = jnp.asarray(batch.seed), jnp.asarray(batch.position)
        min_p = jnp.asarray(batch.min_p)
        rows = _Rows(scores.logits, scores.top, jnp.where(warm, batch.temperature, 1.0))
        edges = _edges(rows, jnp.where(warm, batch.top_k, 0), jnp.where(warm, batch.top_p, 1.0))
        return jnp.where(warm, _draw(rows, *edges, min_p, seed, position), scores.best)

    return jax.lax.cond(warm.any(), drawn, lambda: scores.best)


def _likeliest(
    logits: Float[Array, "requests vocab"], wanted: Int[Array, "requests"]
) -> tuple[Int[Array, "most requests"], Float[Array, "most requests"]]:
    """Tokens of the largest logits, and these: as many as any row wants, a pass for each."""
    n = len(logits)
    rows = _Rows(logits, jnp.zeros(n, jnp.float32), jnp.ones(n, jnp.float32))
    state = (
        jnp.zeros((), jnp.int32),
        jnp.full(n, 2**32 - 1, jnp.uint32),  # place in the order of the last one that was found
        jnp.full(n, -1, jnp.int32),  # and its id
        jnp.zeros((MOST_LOGPROBS, n), jnp.int32),
        jnp.zeros((MOST_LOGPROBS, n), jnp.float32),
    )

    def find(state: tuple[Array, ...]) -> tuple[Array, ...]:
        i, order, id, found, values = state
        here, ids = rows.order(), jnp.arange(logits.shape[1], dtype=jnp.int32)
        order, id = order[:, None], id[:, None]
        behind = (here < order) | ((here == order) & (ids > id))
        here = jnp.where(behind, here, 0)
        best = jnp.argmax(here, axis=-1).astype(jnp.int32)
        value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
        place = jnp.take_along_axis(here, best[:, None], axis=-1)[:, 0]
        return i + 1, place, best, found.at[i].set(best), values.at[i].set(value)

    most = wanted.max()
    return jax.lax.while_loop(lambda state: state[0] < most, find, state)[3:]  # pyright: ignore


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
    min_p: Float[Array, "requests"],
    seed: UInt[Array, "requests"],
    position: Int[Array, "requests"],
) -> Int[Array, "requests"]:
    """Gumbel-max over the tokens that the filters leave."""

    def noise(seed: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, "vocab"]:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, rows.logits.shape[1:], jnp.float32)

    order, edge, last = rows.order(), edge[:, None], last[:, None]
    kept = (order > edge) | ((order == edge) & (_lower_first(rows) >= last))
    kept &= rows.mass() >= min_p[:, None]  # the likeliest has mass 1
    z = jnp.where(kept, rows.scaled(rows.logits), -jnp.inf) + jax.vmap(noise)(seed, position)
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _edges(
    rows: _Rows, top_k: Int[Array, "requests"], top_p: Float[Array, "requests"]
) -> tuple[UInt[Array, "requests"], UInt[Array, "requests"]]:
    """``(edge, last)``: a token is left above the edge, and at it if its id comes first.

    Both are 0 where no filter cuts.
    """
    vocab = rows.logits.shape[1]
    top_p = jnp.maximum(top_p, _LEAST_MASS)
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
