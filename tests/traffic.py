"""Random traffic through an engine, and the same requests one at a time.

Of a tiny DeepSeek V3 by default, or of a tiny V4 (``V4``), whose cache has groups of several kinds.

A mix is a few requests that come when they like and of which some are cancelled, in a pool that
may be too small for all. Every completed one must have the tokens that it has alone.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig
from mla_jax.engine import Engine
from mla_jax.history_rows import HistoryRows
from mla_jax.metadata.buckets import Ladder, MLALadder, default_steps
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sampling import SamplingParams
from mla_jax.scheduler import Completion, Likeliest
from tests.model import tiny, v4

CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab=64,
    hidden=32,
    layers=2,
    dims=MLADims(heads=8, rank=16, nope=8, rope=8, v=8, q_rank=None),
    rope=RopeConfig(dim=8, theta=10000.0),
    mlp=32,
    moe=MoEConfig(experts=8, topk=2, width=16, shared=1, method="noaux_tc", normalise=True),
    sparse_layers=(False, True),
    eps=1e-6,
    max_positions=64,
    eos=(0,),
)
"""Heads, experts, vocabulary and widths that eight devices divide."""

LADDER = MLALadder(
    decodes=Ladder("decodes", (6,)),
    prefills=Ladder("prefills", (6,)),
    prefill_tokens=Ladder("prefill tokens", (16,)),
    pages=Ladder("pages", (16,)),
    context_rows=24,
    mixed=((6, 16), (0, 16)),
)
"""Three programs: decodes, prefills, both."""

PAGE, PAGES = 4, 65
MOST = 6
"""Requests running at once."""

LONGEST = 28 + 24 - 1
"""Rows of the longest request of ``asks``."""


@dataclass(frozen=True)
class Kind:
    """A tiny model and an engine of three programs for it: decodes, prefills, both."""

    config: Any
    model: Callable[[], Any]
    ladder: Any

    def engine(self, module: Any, **more: Any) -> Engine:
        """An engine for ``MOST`` requests."""
        settings = {
            "num_pages": PAGES,
            "page": PAGE,
            "max_requests": MOST,
            "prefill_chunk": 16,
            "max_model_len": 64,
            "cache_format": "fp32",
            "ladder": self.ladder,
        }
        return Engine(module, self.config, **(settings | more))


V3 = Kind(CONFIG, lambda: tiny.model(CONFIG, 0), LADDER)
V4 = Kind(
    v4.config(),
    lambda: v4.model(v4.config()),
    default_steps(max_requests=MOST, max_prefill_tokens=16, max_pages=16),
)
KINDS = {"v3": V3, "v4": V4}


def model(seed: int = 0) -> DeepseekV3:
    """A tiny decoder of a dense layer and one of experts, in float32."""
    return tiny.model(CONFIG, seed)


def engine(module: Any, **more: Any) -> Engine:
    """An engine of three programs."""
    return V3.engine(module, **more)


def sharing(other: Engine, module: Any, kind: Kind = V3, **more: Any) -> Engine:
    """An engine of other settings that runs the programs of ``other``."""
    return with_programs_of(other, kind.engine(module, **more))


def with_programs_of(other: Engine, made: Engine) -> Engine:
    """``made``, which runs the programs of ``other`` from now on."""
    made._step = other._step
    made._history = other._step.new_history()  # of as many rows as the programs take
    made._history_rows = HistoryRows(made._history.rows)
    return made


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams


def asks(count: int, *, seed: int) -> list[Ask]:
    """Random ones: one token or many, greedy or drawn, with stop tokens or without.

    One in three changes its logits by what it has said, and is told the likeliest tokens.
    """
    rng, extra = random.Random(seed), random.Random(-1 - seed)

    def changes() -> dict[str, Any]:
        if extra.random() < 2 / 3:
            return {}
        return {
            "min_p": extra.choice([0.0, 0.1]),
            "repetition_penalty": extra.choice([1.0, 1.3]),
            "presence_penalty": extra.choice([0.0, 0.5]),
            "frequency_penalty": extra.choice([0.0, 0.7]),
            "logit_bias": {extra.randrange(64): extra.uniform(-3, 3) for _ in range(3)},
            "logprobs": extra.choice([0, 2, 5]),
        }

    def ask() -> Ask:
        length = rng.choice([1, 2, 3, 4, 5, 8, 9, rng.randint(1, 16), rng.randint(1, 28)])
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 2, 24, rng.randint(1, 24)]),
            temperature=rng.choice([0.0, 1.5]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(2**32),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=tuple(rng.sample(range(64), rng.choice([0, 0, 3]))),
            **changes(),
        )
        return Ask(tuple(rng.randrange(64) for _ in range(length)), params)

    return [ask() for _ in range(count)]


def alone(server: Engine) -> Callable[[Ask], Completion]:
    """What each request gets by itself; computed once."""
    return cache(lambda ask: server.generate([ask.prompt], ask.params)[0])


class Compilations:
    """Programs that JAX compiled in this process since this was made."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: object) -> None:
        self.count += event == self.EVENT


@dataclass
class Tally:
    """What the mixes were, and what was wrong with them."""

    mixes: int = 0
    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    preemptions: int = 0
    steps: int = 0
    lost_pages: int = 0
    wrong: int = 0  # completed, and not the tokens that it has alone
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.mixes} mixes, {self.requests} requests: {self.completed} completed, "
            f"{self.cancelled} cancelled, {self.preemptions} preemptions, {self.steps} steps; "
            f"{self.wrong} wrong, {self.lost_pages} pages lost, {self.seconds:.0f} s"
        )


def run(
    server: Engine,
    single: Callable[[Ask], Completion],
    *,
    mixes: int,
    kinds: int,
    seed: int = 0,
    each: Callable[[Tally], None] | None = None,
) -> Tally:
    """Serve ``mixes`` random mixes of ``kinds`` different requests, and compare."""
    rng, start = random.Random(seed), time.perf_counter()
    known, tally, before = asks(kinds, seed=seed), Tally(), server.stats()
    for n in range(mixes):
        _mix(server, single, rng, known, tally, name=f"mix-{n}")
        tally.mixes += 1
        tally.seconds = time.perf_counter() - start
        if each is not None:
            each(tally)
    after = server.stats()
    tally.preemptions = after.preemptions - before.preemptions
    tally.steps = after.steps - before.steps
    return tally


def _mix(
    server: Engine,
    single: Callable[[Ask], Completion],
    rng: random.Random,
    known: list[Ask],
    tally: Tally,
    *,
    name: str,
) -> None:
    """One mix, from an idle engine to an idle engine."""
    free = [pool_of.pool.free for pool_of in server.scheduler.groups]
    group = rng.choice([g for g in server.scheduler.groups if g.least(LONGEST) > 1])
    pool, least = group.pool, group.least(LONGEST)
    most = (least + more for more in (0, 1, 3, pool.free))
    held = pool.alloc(pool.free - min(rng.choice(list(most)), pool.free))
    waiting = [rng.choice(known) for _ in range(rng.randint(1, 8))]
    asked: dict[str, Ask] = {}
    ended: dict[str, Completion] = {}
    given: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    while waiting or server.stats().live:
        while waiting and rng.random() < 0.6:
            ask = waiting.pop()
            id = server.add(ask.prompt, ask.params, id=f"{name}-{len(waiting)}")
            asked[id], given[id] = ask, []
        if rng.random() < 0.05 and (live := sorted(asked.keys() - ended.keys())):
            cancelled.update(id for id in [rng.choice(live)] if server.cancel(id))
        for event in server.step():
            assert event.id not in ended, f"{event.id} goes on after its end"
            given[event.id] += [event.token_id] if event.token_id is not None else []
            if event.completion is not None:
                ended[event.id] = event.completion
    for event in server.step():  # of a request that was cancelled after the last step
        ended[event.id] = event.completion
    pool.release(held)
    left = [pool_of.pool.free for pool_of in server.scheduler.groups]
    tally.lost_pages += sum(before - after for before, after in zip(free, left, strict=True))
    tally.requests += len(asked)
    for id, ask in asked.items():
        tally.wrong += not _right(ended.get(id), single(ask), given[id], id in cancelled)
        if id in ended:
            tally.cancelled += ended[id].finish_reason == "cancelled"
            tally.completed += ended[id].finish_reason != "cancelled"


def _right(got: Completion | None, want: Completion, given: list[int], cancelled: bool) -> bool:
    """Its own tokens, all of them told; a cancelled one has the first of them."""
    if got is None or list(got.token_ids) != given:
        return False
    if got.finish_reason == "cancelled":
        return cancelled and got.token_ids == want.token_ids[: len(got.token_ids)]
    same = got.finish_reason == want.finish_reason and got.token_ids == want.token_ids
    same &= _ids(got.top_logprobs) == _ids(want.top_logprobs)
    return same and got.prompt_ids == want.prompt_ids


def _ids(likeliest: tuple[Likeliest, ...]) -> list[list[int]]:
    return [[id for id, _ in one] for one in likeliest]
