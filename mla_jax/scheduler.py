"""Which requests run next, and how many tokens of each. Plain Python, no arrays.

Continuous batching: a step holds every decoding request (one token each) and then prompt
chunks in order of arrival under one token budget. A prompt gets all its pages when it is
admitted; a decode that finds no free page evicts the youngest running request, which later
recomputes its prompt and its own tokens. Running followed by waiting is always in order of
arrival, so the oldest request can evict every other and always advances: no request starves.

Of a cache group with a window a request holds the pages that its next query sees, and gets those
of a prompt chunk by chunk: older ones go back to the pool, and ``NULL_PAGE`` stands in their place.
A chunk is cut to the pages that are there.

A plan may be made while the step before it still runs. Tokens that this step draws are promised:
they have a place in their request, and the next plan feeds them, but their ids are not known. A
request that turns out to have ended leaves a step in flight that does nothing for it.
"""

import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mla_jax.checks import checked_size
from mla_jax.detokenize import TextSoFar
from mla_jax.errors import EngineError, shown
from mla_jax.inputs import Names, checked_prompt
from mla_jax.model.sampling import SamplingParams
from mla_jax.pages import NULL_PAGE, PageGroup
from mla_jax.request_queue import Queue

__all__ = [
    "Completion",
    "Event",
    "Outcome",
    "Plan",
    "Request",
    "Scheduler",
    "Work",
    "checked_ids",
]


type Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens in place of one: ids and log-probabilities, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request that has ended, and why."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # a stop token is the last of them
    logprobs: tuple[float, ...]  # of each token under softmax(logits): unfiltered, temperature 1
    finish_reason: str  # stop | length | cancelled | error: docs/serving.md says when
    logits: np.ndarray | None = None  # [tokens, vocab] float32 when the engine keeps them
    text: str | None = None  # without a stop string or token; None: no tokenizer, or it failed
    top_logprobs: tuple[Likeliest, ...] = ()  # of each token, if the request asks for some


@dataclass(frozen=True, kw_only=True)
class Event:
    """A request got a token, or ended, or both."""

    id: str
    token_id: int | None  # None when it ended without one
    logprob: float  # NaN without a token
    completion: Completion | None = None  # when it ended
    text: str = ""  # what is new of the text: whole characters that no stop string can take back
    top_logprobs: Likeliest = ()


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt on its way. Finished exactly when ``finish_reason`` is not ``None``."""

    id: str
    tokens: list[int]  # the prompt, then what was generated
    prompt_len: int
    params: SamplingParams
    stops: frozenset[int]  # tokens that end it
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens
    likeliest: list[Likeliest] = field(default_factory=list)  # in place of each
    pieces: list[str] = field(default_factory=list)  # of the text, told with each
    text: TextSoFar | None = None  # after the generated tokens; None: it has none
    pages: tuple[array, ...]  # of each cache group: int32, in token order; 0 = returned
    computed: int = 0  # leading tokens whose rows are in the cache, or will be: see ``launch``
    length: int = field(init=False)  # tokens, those that steps in flight draw included
    row: int = 0  # among the requests of the last launched step that draws for it
    finish_reason: str | None = None  # stop | length | cancelled | error

    def __post_init__(self):
        self.length = len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens drawn and known."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to be fed before the next one can be drawn; 0 if its last one is promised."""
        return self.length - self.computed if self.length <= self.rows_at_most else 0

    @property
    def rows_at_most(self) -> int:
        """Cache rows at its longest: the last token is never fed."""
        return self.prompt_len + self.params.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class Work:
    """Feed ``tokens[start : start + length]`` of a request."""

    request: Request
    start: int
    length: int
    samples: bool  # the last token is among them, so that a new one is drawn

    @property
    def is_decode(self) -> bool:
        """One new token, be it the first of a prompt: what metadata builders call a decode."""
        return self.length == 1

    @property
    def tokens(self) -> list[int]:
        """Those that are known: the last one may be promised."""
        return self.request.tokens[self.start : self.start + self.length]


@dataclass(frozen=True)
class Plan:
    """One step: decodes first, then prompt chunks; both in order of arrival."""

    work: tuple[Work, ...]

    @property
    def num_decodes(self) -> int:
        return sum(w.is_decode for w in self.work)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did to one request. Applying it twice is applying it once."""

    work: Work
    token: int | None  # None: none was drawn
    logprob: float
    reason: str | None  # why the request ends with this step; None: it goes on
    event: Event | None  # None: nothing to tell
    text: TextSoFar | None = None  # after the token


def checked_ids(ids: Sequence[Any], *, vocab: int, where: str) -> list[int]:
    """Token ids as a new list of Python integers.

    Raises:
        EngineError: one of them is no integer or not in the vocabulary.
    """
    tokens = list(ids)
    if set(map(type, tokens)) == {int} and 0 <= min(tokens) and max(tokens) < vocab:
        return tokens  # what nearly all prompts are: no loop over a long one
    tokens = []
    for i, token in enumerate(ids):
        try:
            tokens.append(-1 if isinstance(token, bool) else operator.index(token))
        except TypeError:
            tokens.append(-1)
        if not 0 <= tokens[-1] < vocab:
            allowed = f"integers from 0 to {vocab - 1} (vocabulary)"
            given = shown(token) if isinstance(token, int) else repr(token)
            raise EngineError(f"{where}: token {i}", given, allowed)
    return tokens


class Scheduler:
    """Owns the queues and lends pages.

    ``schedule`` a plan and ``launch`` it; when its tokens are known, ``apply`` its ``outcomes``.
    """

    def __init__(
        self,
        *,
        groups: Sequence[PageGroup],
        max_requests: int,
        max_prefill_tokens: int,
        max_model_len: int,
        vocab: int,
        eos: Sequence[int] = (),
    ):
        for name, value in (
            ("max_requests", max_requests),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_model_len", max_model_len),
        ):
            checked_size(f"Scheduler: {name}", value)
        self.groups = tuple(groups)
        self._windows = any(group.window is not None for group in self.groups)
        self.max_requests = max_requests
        self.max_prefill_tokens = max_prefill_tokens
        self.max_model_len = max_model_len
        self.vocab = vocab
        self.eos = frozenset(eos)
        self.preemptions = 0
        self.waiting: Queue[Request] = Queue()
        self.running: Queue[Request] = Queue()
        self._live: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def __contains__(self, id: str) -> bool:
        """Whether a request of this id lives."""
        return id in self._live

    def add(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextSoFar | None = None,
        names: Names | None = None,
    ) -> Request:
        """Queue a request; ``text`` is what is told of its text before its first token.

        Raises:
            EngineError: it could never be served, even alone. Nothing is kept of it.
        """
        if id in self:
            raise EngineError("request id", repr(id), "an id that no live request has")
        tokens = self._checked(prompt, params, names or Names.of(f"request {id}"))
        stops = frozenset(params.stop_token_ids)
        request = Request(
            id=id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            pages=self._no_pages(),
            stops=stops if params.ignore_eos else stops | self.eos,
            text=text,
        )
        self.waiting.append(request)
        self._live[id] = request
        return request

    def _checked(self, prompt: Sequence[int], params: SamplingParams, names: Names) -> list[int]:
        """The prompt as a list of its own, once it is known to be servable."""
        where, of_prompt = names
        checked_prompt(prompt, of_prompt)
        if len(prompt) == 0:
            raise EngineError(of_prompt, "no tokens", "1 token or more")
        tokens = checked_ids(prompt, vocab=self.vocab, where=of_prompt)
        if params.logit_bias and params.logit_bias[-1][0] >= self.vocab:
            given = params.logit_bias[-1][0]
            raise EngineError(f"{where}: logit_bias", given, f"tokens below {self.vocab}")
        if beyond := [token for token in params.stop_token_ids if token >= self.vocab]:
            allowed = f"tokens below {self.vocab}"
            raise EngineError(f"{where}: stop_token_ids", beyond[0], allowed)
        if params.logprobs > self.vocab:
            allowed = f"at most {self.vocab}, the tokens that there are"
            raise EngineError(f"{where}: logprobs", params.logprobs, allowed)
        new = params.max_new_tokens
        if len(prompt) + new > self.max_model_len:
            raise EngineError(
                f"{where}: prompt + max_new_tokens",
                f"{len(prompt)} + {new} = {len(prompt) + new} tokens",
                f"at most {self.max_model_len} (max_model_len)",
                "Shorten the prompt or ask for fewer tokens.",
            )
        for group in self.groups:
            need = group.least(len(prompt) + new - 1)
            if need > group.pool.capacity:
                raise EngineError(
                    f"{where}: cache pages",
                    f"{need} ({len(prompt)} + {new} - 1 rows, {group.tokens} to a page)",
                    f"at most {group.pool.capacity}, the whole pool",
                    f"Use {need + 1} pages or more (page 0 is never given).",
                )
        return tokens

    def cancel(self, id: str) -> Event | None:
        """End a live request now, in whatever state it is; ``None`` if no such request lives."""
        outcome = self.cancellation(id)
        if outcome is None:
            return None
        self.apply(outcome)
        return outcome.event

    def cancellation(self, id: str) -> Outcome | None:
        """What ``cancel`` does, nothing changed yet."""
        request = self._live.get(id)
        if request is None:
            return None
        work = Work(request, request.computed, 0, samples=False)
        return Outcome(work, None, math.nan, "cancelled", _last_event(request, "cancelled"))

    def schedule(self) -> Plan:
        """The next step; without work only when nothing lives but what ends with steps in flight.

        One step may be in flight, launched and its tokens not known.
        """
        if self._windows:
            for request in self.running:
                self._return_unseen(request)
        work, chunks = self._decodes(), self._chunks()
        while not (work or chunks) and self._stuck():
            self._preempt(self.running[-1])
            work, chunks = self._decodes(), self._chunks()
        work += [w for w in chunks if w.is_decode]
        return Plan((*work, *(w for w in chunks if not w.is_decode)))

    def _stuck(self) -> bool:
        """Whether prompts hold the pages of windows that each of them waits for."""
        return len(self.running) > 1 and all(request.remaining for request in self.running)

    def _decodes(self) -> list[Work]:
        work = []
        # Victims are younger than the request that needs a page, so they are never in ``work``.
        for request in tuple(self.running):
            if request.remaining != 1 or request.computed == 0:
                continue
            if not (self._has_room(request) or self._grow(request)):
                break
            work.append(_chunk(request, 1))
        return work

    def _has_room(self, request: Request) -> bool:
        """Whether its next token fits its last pages: so in most steps."""
        for group, pages in zip(self.groups, request.pages, strict=True):
            if request.computed >= len(pages) * group.tokens:
                return False
        return True

    def _grow(self, request: Request) -> bool:
        """Give it the pages of its next token, if need be at the cost of younger requests."""
        while not self._can_hold(request, request.computed + 1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._lend(request, request.computed + 1)
        return True

    def _can_hold(
        self, request: Request, tokens: int, soon: int | None = None, spare: Sequence[int] = ()
    ) -> bool:
        """Whether every group has the pages that ``tokens`` of a request take, and some spare.

        Groups with a window need those of the first ``soon`` tokens only.
        """
        spare = spare or (0,) * len(self.groups)
        soon = tokens if soon is None else soon
        return all(
            group.missing(len(pages), tokens, soon) + kept <= group.pool.free
            for group, pages, kept in zip(self.groups, request.pages, spare, strict=True)
        )

    def _lend(self, request: Request, tokens: int, soon: int | None = None) -> None:
        """Give a request the pages that it lacks for so many tokens; ``soon`` as above."""
        soon = tokens if soon is None else soon
        for group, pages in zip(self.groups, request.pages, strict=True):
            need = group.missing(len(pages), tokens, soon)
            if need > 0:
                pages.extend(group.pool.alloc(need))

    def _return_unseen(self, request: Request) -> None:
        """Give back the pages of windows that its next token does not see.

        A step in flight may still read them: their next owner writes them in a later step.
        """
        for group, pages in zip(self.groups, request.pages, strict=True):
            last = min(group.unseen(request.computed), len(pages))
            while last and pages[last - 1] != NULL_PAGE:
                last -= 1
                group.pool.release([pages[last]])
                pages[last] = NULL_PAGE

    def _fitting(self, request: Request, length: int, spare: Sequence[int] = ()) -> int:
        """So many of the next ``length`` tokens of a prompt as there are pages of windows for."""
        spare = spare or (0,) * len(self.groups)
        for group, pages, kept in zip(self.groups, request.pages, spare, strict=True):
            if group.window is not None:
                most = (len(pages) + group.pool.free - kept) * group.tokens
                length = min(length, most - request.computed)
        return max(length, 0)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._return_pages(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _chunks(self) -> list[Work]:
        work = []
        budget = self.max_prefill_tokens
        for request in self.running:
            if budget and request.remaining and (request.remaining > 1 or not request.computed):
                length = self._fitting(request, min(request.remaining, budget))
                if not length:
                    continue
                self._lend(request, request.computed + length)
                work.append(_chunk(request, length))
                budget -= length
        while budget and self.waiting and len(self.running) < self.max_requests:
            request, tokens = self.waiting[0], self.waiting[0].length
            if not request.remaining:  # it was evicted while its last token is drawn
                break
            spare = self._growing()
            length = self._fitting(request, min(request.remaining, budget), spare)
            if not (length and self._can_hold(request, tokens, length, spare)):
                break
            self.waiting.popleft()
            self._lend(request, tokens, length)
            self.running.append(request)
            work.append(_chunk(request, length))
            budget -= length
        return work

    def _growing(self) -> list[int]:
        """Of each group, running requests that may yet need a page: one is kept free for each.

        Without it a newcomer takes the page that an older request needs at its next step, and
        is evicted with its prompt half done.
        """
        return [
            sum(group.pages_of(r.rows_at_most) > len(r.pages[i]) for r in self.running)
            for i, group in enumerate(self.groups)
        ]

    def launch(self, plan: Plan) -> None:
        """The plan is on its way: its rows will be in the cache, its tokens are promised."""
        for row, work in enumerate(plan.work):
            request = work.request
            request.computed = work.start + work.length
            if work.samples:
                request.length, request.row = request.computed + 1, row

    def commit(self, plan: Plan, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Event]:
        """Launch a plan and record what it drew: a token and log-probability for each work."""
        self.launch(plan)
        outcomes = self.outcomes(plan, tokens, logprobs)
        for outcome in outcomes:
            self.apply(outcome)
        return [o.event for o in outcomes if o.event is not None]

    def outcomes(
        self,
        plan: Plan,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        likeliest: Sequence[Likeliest] | None = None,
    ) -> list[Outcome]:
        """What a launched step did to each request, nothing changed yet.

        Requests cancelled meanwhile are passed over. A log-probability that is not finite ends
        its request with ``error``. ``likeliest``: of each work, if any asks for them.
        """
        told = [()] * len(plan.work) if likeliest is None else likeliest
        return [
            _outcome(work, token, logprob, best)
            for work, token, logprob, best in zip(plan.work, tokens, logprobs, told, strict=True)
            if work.request.finish_reason is None
        ]

    def apply(self, outcome: Outcome) -> None:
        """Let a request have its token, and end it if it ends."""
        _record(outcome)
        if outcome.reason is not None:
            self._end(outcome.work.request, outcome.reason)

    def recover(self, outcomes: Sequence[Outcome] = ()) -> None:
        """After an interruption anywhere: all pages are free, live requests wait, nothing is lost.

        Steps in flight are forgotten: what they draw is drawn again. ``outcomes`` are those of a
        step that were applied in part, or not at all.
        """
        for outcome in outcomes:
            _record(outcome)
            if outcome.reason is not None:
                outcome.work.request.finish_reason = outcome.reason
                self._live.pop(outcome.work.request.id, None)
        for group in self.groups:
            group.pool.reset()
        self.running, self.waiting = Queue(), Queue()
        for request in self._live.values():  # in order of arrival
            request.pages, request.computed = self._no_pages(), 0
            request.length = len(request.tokens)
            self.waiting.append(request)

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._return_pages(request)
        del self._live[request.id]

    def _return_pages(self, request: Request) -> None:
        for group, pages in zip(self.groups, request.pages, strict=True):
            group.pool.release(page for page in pages if page != NULL_PAGE)
        request.pages = self._no_pages()

    def _no_pages(self) -> tuple[array, ...]:
        return tuple(array("i") for _ in self.groups)


def _record(outcome: Outcome) -> None:
    """The token and what is told of it at their places."""
    if outcome.token is not None:
        assert outcome.event is not None, "a token is told"
        work, request = outcome.work, outcome.work.request
        at = work.start + work.length - request.prompt_len
        request.tokens[request.prompt_len + at :] = [outcome.token]
        request.logprobs[at:] = [outcome.logprob]
        request.likeliest[at:] = [outcome.event.top_logprobs]
        request.pieces[at:] = [outcome.event.text]
        request.text = outcome.text


def _outcome(work: Work, token: int, logprob: float, likeliest: Likeliest) -> Outcome:
    request = work.request
    if not work.samples:
        return Outcome(work, None, math.nan, None, None)
    if not math.isfinite(logprob):
        return Outcome(work, None, math.nan, "error", _last_event(request, "error"))
    text, piece, reason = request.text, "", None
    if token in request.stops:
        reason = "stop"
    elif request.generated + 1 == request.params.max_new_tokens:
        reason = "length"
    if text is not None and token not in request.stops:  # a stop token is no text
        text, piece, found = text.push(token)
        if found:
            reason = "stop"
        elif text.broken and text.stops:  # it cannot be seen where it ends
            reason = "error"
        elif reason == "length" and text.rest()[1]:  # behind it half a character is left
            reason = "stop"
    told = Event(id=request.id, token_id=token, logprob=logprob, text=piece, top_logprobs=likeliest)
    if reason is not None:
        told = _last_event(request, reason, told, text)
    return Outcome(work, token, logprob, reason, told, text)


def _last_event(
    request: Request, reason: str, token: Event | None = None, text: TextSoFar | None = None
) -> Event:
    """The event that carries the completion; ``token``: what the step that ends it drew."""
    text = request.text if token is None else text
    told = token or Event(id=request.id, token_id=None, logprob=math.nan)
    if text is not None:
        told = replace(told, text=told.text + text.rest()[0])
    ids = () if told.token_id is None else (told.token_id,)
    asked = request.params.logprobs > 0
    completion = Completion(
        id=request.id,
        prompt_ids=tuple(request.tokens[: request.prompt_len]),
        token_ids=(*request.tokens[request.prompt_len :], *ids),
        logprobs=(*request.logprobs, *([told.logprob] if ids else [])),
        finish_reason=reason,
        text=None if text is None or text.broken else "".join((*request.pieces, told.text)),
        top_logprobs=(*request.likeliest, *([told.top_logprobs] if ids else [])) if asked else (),
    )
    return replace(told, completion=completion)


def _chunk(request: Request, length: int) -> Work:
    start = request.computed
    return Work(request, start, length, samples=start + length == request.length)
