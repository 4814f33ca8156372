"""Interrupts and exceptions anywhere inside the engine: it goes on, and nobody misses a token."""

import contextlib
import dataclasses
import gc
import random
import signal
from types import FrameType

import jax
import numpy as np
import pytest

from mla_jax import engine as engine_module
from mla_jax.engine import Engine
from mla_jax.metadata.builder import MLAMetadataBuilder
from mla_jax.model import step as step_module
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import Step, StepOutput
from mla_jax.pages import PagePool
from mla_jax.request_queue import Queue
from mla_jax.scheduler import Scheduler
from tests import traffic

KINDS = traffic.asks(24, seed=5)
STAGES = (
    *((Scheduler, name) for name in ("schedule", "launch", "_lend", "_preempt", "outcomes")),
    *(
        (Scheduler, name)
        for name in ("apply", "add", "cancellation", "recover", "_end", "_return_pages")
    ),
    *((PagePool, name) for name in ("alloc", "release", "reset")),
    *((Queue, name) for name in ("append", "popleft", "remove")),
    *(
        (Engine, name)
        for name in ("_advance", "_launch", "_land", "_batch", "_keep_logits", "_conclude", "_tell")
    ),
    *((Engine, name) for name in ("_claim", "_with_logits", "_drop", "_alloc", "_recover")),
    *((Engine, name) for name in ("add", "_queue", "cancel")),
    (MLAMetadataBuilder, "decide"),
    (step_module, "pack"),
    (Step, "run"),
    (StepOutput, "read"),
)
"""Functions that are interrupted, before or after they did what they do."""


class Fault(RuntimeError):
    """What a device or a bug may raise."""


FAULTS = (KeyboardInterrupt, RuntimeError)


class Chaos:
    """Raises at calls of stages; ``missed`` has the stages and moments where it never did."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int):
        self.rng, self.left, self.target, self.count = random.Random(seed), 0, "", 0
        self.missed: set[str] = set()
        for owner, name in STAGES:
            stage = f"{owner.__name__}.{name}"
            self.missed |= {f"{stage} before", f"{stage} after"}
            patch.setattr(owner, name, self._stage(stage, getattr(owner, name)))

    def arm(self, calls: int) -> None:
        """Raise at one of so many calls, or sooner: where it never did."""
        self.left = self.rng.randint(1, calls)
        self.target = self.rng.choice([*sorted(self.missed), ""])

    def disarm(self) -> None:
        self.left, self.target = 0, ""

    def _pass(self, where: str) -> None:
        self.left -= 1
        if self.left == 0 or where == self.target:
            self.disarm()
            self.count += 1
            self.missed.discard(where)
            raise self.rng.choice([KeyboardInterrupt, Fault])(where)

    def _stage(self, name: str, inner):
        def run(*args, **kwargs):
            self._pass(f"{name} before")
            found = inner(*args, **kwargs)
            self._pass(f"{name} after")
            return found

        return run


@pytest.fixture(scope="module")
def model():
    return traffic.model()


@pytest.fixture(scope="module")
def first(model):
    """The engine whose programs the others run."""
    ladder = dataclasses.replace(traffic.LADDER, mixed=((traffic.MOST, 16),))  # two programs
    engine = traffic.engine(model, want_logits=True, ladder=ladder)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def single(first, model):
    return traffic.alone(sharing(first, model))


@pytest.fixture
def engine(first, model):
    return sharing(first, model)


def sharing(first: Engine, model) -> Engine:
    return traffic.sharing(first, model, want_logits=True, ladder=first.builder.ladder)


def pool_of(engine: Engine) -> PagePool:
    return engine.scheduler.groups[0].pool


def assert_settled(engine: Engine) -> None:
    """Nothing lives, nothing is kept, and every page can be given."""
    assert len(engine.scheduler) == 0
    assert (engine._claimed, engine._abandoned, engine._logits, engine._unread) == (
        {},
        set(),
        {},
        [],
    )
    pool = pool_of(engine)
    assert pool.used == 0
    pages = pool.alloc(pool.capacity)
    assert sorted(pages) == list(range(1, pool.capacity + 1))
    pool.release(pages)


def right(completion, ask, single) -> None:
    """Tokens and logits are those of the request alone, or the first of them."""
    want = single(ask)
    n = len(completion.token_ids)
    assert completion.token_ids == want.token_ids[:n]
    if completion.finish_reason != "cancelled":
        assert completion.finish_reason == want.finish_reason
        assert n == len(want.token_ids)
    assert completion.logits.shape[0] == n
    np.testing.assert_allclose(completion.logits, want.logits[:n], atol=2e-5)


class Users:
    """Requests by ``add``, streams that stay open, and whole calls of ``generate``."""

    def __init__(self, engine: Engine, single, rng: random.Random):
        self.engine, self.single, self.rng = engine, single, rng
        self.asked: dict[str, traffic.Ask] = {}
        self.told: dict[str, list] = {}  # events of requests by ``add``
        self.cancelled: set[str] = set()
        self.streams: list[tuple[traffic.Ask, list, object]] = []
        self.served = 0

    def act(self) -> None:
        """Do something; it may be interrupted anywhere."""
        acts = [self.step] * 6 + [self.add] * 2 + [self.open, self.read, self.read]
        self.rng.choice([*acts, self.generate, self.cancel, self.close])()

    def add(self) -> None:
        if len(self.engine.scheduler) >= 6:
            return
        id, ask = f"own-{len(self.asked)}", self.rng.choice(KINDS)
        self.asked[id], self.told[id] = ask, []
        try:
            self.engine.add(ask.prompt, ask.params, id=id)
        except FAULTS:
            if id not in self.engine.scheduler:  # refused as a whole
                del self.asked[id], self.told[id]
            raise

    def step(self) -> None:
        for event in self.engine.step():
            self.told[event.id].append(event)

    def cancel(self) -> None:
        live = [id for id in self.asked if id in self.engine.scheduler]
        if live:
            id = self.rng.choice(live)
            self.cancelled.add(id)
            self.engine.cancel(id)

    def open(self) -> None:
        if len(self.streams) < 2:
            ask = self.rng.choice(KINDS)
            self.streams.append((ask, [], self.engine.stream(ask.prompt, ask.params)))

    def read(self) -> None:
        """Some events of a stream; an interrupted one is at its end."""
        if not self.streams:
            return
        one = self.rng.choice(self.streams)
        ask, events, stream = one
        try:
            for _ in range(self.rng.randint(1, 3)):
                events.append(next(stream))
        except StopIteration:
            self.streams.remove(one)
            assert events[-1].completion is not None
            right(events[-1].completion, ask, self.single)
            self.served += 1
        except FAULTS:
            self.streams.remove(one)
            raise
        finally:
            tokens = tuple(e.token_id for e in events if e.token_id is not None)
            assert tokens == self.single(ask).token_ids[: len(tokens)]

    def close(self) -> None:
        if self.streams:
            self.streams.pop(self.rng.randrange(len(self.streams)))[2].close()

    def generate(self) -> None:
        asks = self.rng.sample(KINDS, 2)
        found = self.engine.generate([a.prompt for a in asks], [a.params for a in asks])
        for completion, ask in zip(found, asks, strict=True):
            right(completion, ask, self.single)
        self.served += len(asks)

    def finish(self) -> None:
        """Serve what is left, and look at everything that was told."""
        while self.streams:
            self.read()
        while len(self.engine.scheduler) or self.engine._unread:
            self.step()
        self.step()
        for id, ask in self.asked.items():
            *before, last = self.told[id]
            assert not [e for e in before if e.completion]
            tokens = tuple(e.token_id for e in self.told[id] if e.token_id is not None)
            assert tokens == last.completion.token_ids
            right(last.completion, ask, self.single)
            assert last.completion.finish_reason != "cancelled" or id in self.cancelled
        self.served += len(self.asked)


@pytest.mark.slow
def test_two_hundred_faults_at_every_stage(engine, single, monkeypatch):
    """The engine goes on after each; events come once, streams go on, pages are whole."""
    for ask in KINDS:
        single(ask)
    pool_of(engine).capacity = 13  # of the longest alone: preemptions
    chaos, rng = Chaos(monkeypatch, seed=1), random.Random(2)
    users = Users(engine, single, rng)
    while chaos.count < 200 or chaos.missed:
        assert chaos.count < 600, f"never: {chaos.missed}"
        chaos.arm(rng.choice([200, 1000]))
        with contextlib.suppress(*FAULTS):
            for _ in range(8):
                users.act()
        if rng.random() < 0.1:  # as after an error of the device
            for leaf in jax.tree.leaves(engine._caches):
                leaf.delete()
    chaos.disarm()
    users.finish()
    assert users.served > 100
    stats = engine.stats()
    assert stats.recoveries > 100 and stats.preemptions > 3
    assert_settled(engine)


def once(patch: pytest.MonkeyPatch, owner, name: str, act) -> None:
    """``act(result)`` after the next call of a function, and no more."""
    inner = getattr(owner, name)

    def run(*args, **kwargs):
        found = inner(*args, **kwargs)
        patch.setattr(owner, name, inner)
        act(found)
        return found

    patch.setattr(owner, name, run)


def interrupt(_: object = None) -> None:
    raise KeyboardInterrupt


LONG = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def want(single):
    """Tokens of a prompt alone."""
    return lambda *prompt: single(traffic.Ask(prompt, LONG)).token_ids


@pytest.mark.parametrize(
    ("owner", "name"), [(Engine, "_tell"), (Scheduler, "apply"), (StepOutput, "read")]
)
def test_a_stream_gets_no_event_twice_when_another_call_is_interrupted(
    engine, monkeypatch, want, owner, name
):
    stream = engine.stream([1, 2, 3], LONG)
    events = [next(stream) for _ in range(3)]
    once(monkeypatch, owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    events += stream
    assert tuple(e.token_id for e in events) == want(1, 2, 3)
    assert_settled(engine)


@pytest.mark.parametrize("collected", [False, True])
def test_a_stream_that_ends_in_the_middle_of_a_step_disturbs_nobody(
    engine, monkeypatch, want, collected
):
    """As when the garbage collector ends it, whenever it likes."""
    streams = [engine.stream([5, 6], LONG)]
    next(streams[0])
    if collected:
        streams[0] = cycle = [streams[0]]
        cycle.append(cycle)
        del cycle

    def end(_):
        streams.clear() if collected else streams[0].close()
        gc.collect()

    once(monkeypatch, Scheduler, "schedule", end)
    (completion,) = engine.generate([[1, 2, 3]], LONG)
    assert completion.token_ids == want(1, 2, 3)
    assert engine.stats().recoveries == 0
    engine.step()
    assert_settled(engine)


def test_programs_are_made_after_an_interruption(engine, monkeypatch, want):
    """The step's arrays are gone; ``warm_up`` makes them anew before it uses them."""
    engine.add(KINDS[0].prompt, KINDS[0].params)
    run = Step.run

    def interrupted(*args, **kwargs):
        run(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.warm_up() == engine.stats().compiles
    while engine.stats().live:
        engine.step()


def test_a_traceback_keeps_no_caches(engine, monkeypatch, want):
    """Memory for both would not be there."""
    engine.add([1, 2, 3], LONG)
    once(monkeypatch, StepOutput, "read", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        engine.step()
    (old,) = [leaf for leaf in jax.tree.leaves(engine._caches) if leaf.ndim == 4]
    assert not old.is_deleted()
    events = engine.step()
    assert old.is_deleted()
    while engine.stats().live:
        events += engine.step()
    assert tuple(e.token_id for e in events) == want(1, 2, 3)
    assert kept.tb is not None


def test_an_error_of_the_device_is_overcome(engine, want):
    """Caches that a program took and did not give back."""
    id = engine.add([1, 2, 3], LONG)
    events = engine.step() + engine.step()
    for leaf in jax.tree.leaves(engine._caches):
        leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        engine.step()
    while engine.stats().live:
        events += engine.step()
    assert {e.id for e in events} == {id}
    assert tuple(e.token_id for e in events) == want(1, 2, 3)
    assert engine.stats().recoveries == 1
    assert_settled(engine)


def test_interrupted_while_it_takes_weights_it_serves_those_it_had(engine, monkeypatch, want):
    once(monkeypatch, DeepseekV3, "derive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.take(traffic.model(seed=1))
    assert engine.generate([[1, 2, 3]], LONG)[0].token_ids == want(1, 2, 3)


class Alarm:
    """A timer that interrupts a block, and nothing behind it."""

    def __init__(self, seconds: float):
        self.seconds, self.on = seconds, False

    def ring(self, _: int, frame: FrameType | None) -> None:
        leaving = frame is not None and frame.f_code is Alarm.__exit__.__code__
        if self.on and not leaving:  # there it would end the test: the block is over
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.ring)
        self.on = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, kind, *error: object) -> bool:
        self.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        return kind is KeyboardInterrupt


def test_an_interruption_on_the_way_out(engine, want, monkeypatch):
    """The call could not say that it had ended; the next one sees that it has."""

    def cut(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module._Exclusive, "__exit__", cut)
    with pytest.raises(KeyboardInterrupt) as kept:  # with the frames of its traceback
        engine.generate([(1, 2, 3)], LONG)
    found = engine.generate([(1, 2, 3), (4, 5)], LONG)
    assert [c.token_ids for c in found] == [want(1, 2, 3), want(4, 5)]
    assert_settled(engine)
    del kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time(engine, want):
    """``shared/repro/ctrlc.py``: a signal comes between any two instructions."""
    prompts = [(1, 2, 3), (4, 5), (6,), (7, 8, 9, 10)]
    ids = {engine.add(prompt, LONG): prompt for prompt in prompts[:2]}
    told = {id: [] for id in ids}
    for n in range(1, 60):
        with Alarm(n * 0.0007):
            engine.generate(prompts, LONG)
        engine.generate(prompts[:1], SamplingParams(max_new_tokens=1))
    found = engine.generate(prompts, LONG)
    assert [c.token_ids for c in found] == [want(*p) for p in prompts]
    for event in engine.step():
        told[event.id].append(event)
    for id, prompt in ids.items():
        assert tuple(e.token_id for e in told[id]) == want(*prompt)
    assert engine.stats().recoveries > 5
    assert_settled(engine)
