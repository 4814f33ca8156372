"""Which requests run next, and how many tokens of each. Plain Python, no arrays.

Continuous batching: a step holds every decoding request (one token each) and then prompt
chunks in order of arrival under one token budget. A prompt gets all its pages when it is
admitted; a decode that finds no free page evicts the youngest running request, which later
recomputes its prompt and its own tokens. Running followed by waiting is always in order of
arrival, so the oldest request can evict every other and always advances: nobody starves.
"""

import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mla_jax.checks import checked_size
from mla_jax.errors import EngineError, shown
from mla_jax.inputs import checked_prompt
from mla_jax.model.sampling import SamplingParams
from mla_jax.pages import PagePool
from mla_jax.request_queue import Queue
from mla_jax.types import cdiv

__all__ = ["Completion", "Event", "Plan", "Request", "Scheduler", "Work", "checked_ids"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request that has ended, and why."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # a stop token is the last of them
    logprobs: tuple[float, ...]  # of each token under softmax(logits): unfiltered, temperature 1
    finish_reason: str  # stop | length | cancelled | error (the model gave logits not finite)
    logits: np.ndarray | None = None  # [tokens, vocab] float32 when the engine keeps them


@dataclass(frozen=True, kw_only=True)
class Event:
    """A request got a token, or ended, or both."""

    id: str
    token_id: int | None  # None when it ended without one
    logprob: float  # NaN without a token
    completion: Completion | None = None  # when it ended


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt on its way. Finished exactly when ``finish_reason`` is not ``None``."""

    id: str
    tokens: list[int]  # the prompt, then what was generated
    prompt_len: int
    params: SamplingParams
    stops: frozenset[int]  # tokens that end it
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens
    pages: array = field(default_factory=lambda: array("i"))  # int32, in token order
    computed: int = 0  # leading tokens whose rows are in the cache
    finish_reason: str | None = None  # stop | length | cancelled | error

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to be fed before the next one can be drawn."""
        return len(self.tokens) - self.computed

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
    is_decode: bool  # one token against cached ones
    samples: bool  # the last known token is among them, so a new one is drawn


@dataclass(frozen=True)
class Plan:
    """One step: decodes first, then prompt chunks; both in order of arrival."""

    work: tuple[Work, ...]
    num_decodes: int


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
    """Owns the queues and lends pages. ``schedule`` a plan, run it, ``commit`` its tokens."""

    def __init__(
        self,
        *,
        pool: PagePool,
        page: int,
        max_requests: int,
        max_prefill_tokens: int,
        max_model_len: int,
        vocab: int,
        eos: Sequence[int] = (),
    ):
        for name, value in (
            ("page", page),
            ("max_requests", max_requests),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_model_len", max_model_len),
        ):
            checked_size(f"Scheduler: {name}", value)
        self.pool = pool
        self.page = page
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

    def add(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            EngineError: it could never be served, even alone. Nothing is kept of it.
        """
        tokens = self._checked(id, prompt, params)
        stops = frozenset(params.stop_token_ids)
        request = Request(
            id=id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            stops=stops if params.ignore_eos else stops | self.eos,
        )
        self.waiting.append(request)
        self._live[id] = request
        return request

    def _checked(self, id: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as a list of its own, once it is known to be servable."""
        if id in self:
            raise EngineError("request id", repr(id), "an id that no live request has")
        checked_prompt(prompt, where=f"request {id}: prompt")
        if len(prompt) == 0:
            raise EngineError(f"request {id}: prompt", "no tokens", "1 token or more")
        tokens = checked_ids(prompt, vocab=self.vocab, where=f"request {id}: prompt")
        new = params.max_new_tokens
        if len(prompt) + new > self.max_model_len:
            raise EngineError(
                f"request {id}: prompt + max_new_tokens",
                f"{len(prompt)} + {new} = {len(prompt) + new} tokens",
                f"at most {self.max_model_len} (max_model_len)",
                "Shorten the prompt or ask for fewer tokens.",
            )
        need = cdiv(len(prompt) + new - 1, self.page)
        if need > self.pool.capacity:
            raise EngineError(
                f"request {id}: cache pages",
                f"{need} ({len(prompt)} + {new} - 1 rows, {self.page} to a page)",
                f"at most {self.pool.capacity}, the whole pool",
                f"Use {need + 1} pages or more (page 0 is never given).",
            )
        return tokens

    def cancel(self, id: str) -> Event | None:
        """End a live request now, in whatever state it is; ``None`` if no such request lives."""
        request = self._live.get(id)
        return None if request is None else self._finish(request, "cancelled")

    def schedule(self) -> Plan:
        """The next step; without work only when nothing lives."""
        decodes = self._decodes()
        return Plan((*decodes, *self._chunks()), len(decodes))

    def _decodes(self) -> list[Work]:
        work = []
        # Victims are younger than whoever needs a page, so they are never in ``work``.
        for request in tuple(self.running):
            if request.remaining != 1 or request.computed == 0:
                continue
            if not self._grow(request):
                break
            work.append(Work(request, request.computed, 1, is_decode=True, samples=True))
        return work

    def _grow(self, request: Request) -> bool:
        """Give it the page of its next token, if need be at the cost of younger requests."""
        need = cdiv(request.computed + 1, self.page) - len(request.pages)
        while self.pool.free < need:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if need > 0:
            request.pages.extend(self.pool.alloc(need))
        return True

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
                work.append(_chunk(request, budget))
                budget -= work[-1].length
        while budget and self.waiting and len(self.running) < self.max_requests:
            need = cdiv(len(self.waiting[0].tokens), self.page)
            if need + self._growing() > self.pool.free:
                break
            request = self.waiting.popleft()
            request.pages.extend(self.pool.alloc(need))
            self.running.append(request)
            work.append(_chunk(request, budget))
            budget -= work[-1].length
        return work

    def _growing(self) -> int:
        """Running requests that may yet need a page: one is kept free for each of them.

        Without it a newcomer takes the page that an older request needs at its next step, and
        is evicted with its prompt half done.
        """
        return sum(cdiv(r.rows_at_most, self.page) > len(r.pages) for r in self.running)

    def commit(self, plan: Plan, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Event]:
        """Record what a step drew: one token and log-probability per entry of the plan's work.

        Entries that do not sample and requests cancelled meanwhile are passed over. A
        log-probability that is not finite ends its request with ``error``.
        """
        events = []
        for work, token, logprob in zip(plan.work, tokens, logprobs, strict=True):
            request = work.request
            if request.finish_reason is not None:
                continue
            request.computed = work.start + work.length
            if not work.samples:
                continue
            if not math.isfinite(logprob):
                events.append(self._finish(request, "error"))
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.stops:
                events.append(self._finish(request, "stop", token, logprob))
            elif request.generated == request.params.max_new_tokens:
                events.append(self._finish(request, "length", token, logprob))
            else:
                events.append(Event(id=request.id, token_id=token, logprob=logprob))
        return events

    def _finish(
        self,
        request: Request,
        reason: str,
        token: int | None = None,
        logprob: float = math.nan,
    ) -> Event:
        request.finish_reason = reason
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._return_pages(request)
        del self._live[request.id]
        completion = Completion(
            id=request.id,
            prompt_ids=tuple(request.tokens[: request.prompt_len]),
            token_ids=tuple(request.tokens[request.prompt_len :]),
            logprobs=tuple(request.logprobs),
            finish_reason=reason,
        )
        return Event(id=request.id, token_id=token, logprob=logprob, completion=completion)

    def _return_pages(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = array("i")


def _chunk(request: Request, budget: int) -> Work:
    length = min(request.remaining, budget)
    return Work(
        request,
        request.computed,
        length,
        is_decode=False,
        samples=length == request.remaining,
    )
