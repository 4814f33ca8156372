import math
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mla_jax.detokenize import TextSoFar
from mla_jax.errors import EngineError
from mla_jax.model.sampling import SamplingParams
from mla_jax.pages import PageGroup, PagePool
from mla_jax.scheduler import Plan, Request, Scheduler

VOCAB = 97


def make(
    *, num_pages=9, page=4, max_requests=4, max_prefill_tokens=8, max_model_len=64, eos=()
) -> Scheduler:
    return Scheduler(
        groups=[
            PageGroup(name="latent", pool=PagePool(num_pages), tokens=page),
            PageGroup(name="states", pool=PagePool(num_pages), tokens=3 * page),
        ],
        max_requests=max_requests,
        max_prefill_tokens=max_prefill_tokens,
        max_model_len=max_model_len,
        vocab=VOCAB,
        eos=eos,
    )


def wish(n: int, **more) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, **more)


def next_token(tokens: list[int]) -> int:
    """A model: any function of a request's own tokens."""
    return (sum(tokens) * 31 + len(tokens)) % VOCAB


def check(s: Scheduler, plan: Plan) -> None:
    """What every plan must be, whatever came before."""
    decodes, chunks = plan.work[: plan.num_decodes], plan.work[plan.num_decodes :]
    assert all(w.is_decode and w.length == 1 for w in decodes)
    assert not any(w.is_decode for w in chunks)
    assert all(w.length > 0 for w in chunks)
    assert sum(w.length for w in chunks) <= s.max_prefill_tokens
    assert len({w.request.id for w in plan.work}) == len(plan.work) <= s.max_requests
    for w in plan.work:
        assert w.request in s.running
        assert w.start == w.request.computed
        assert w.start + w.length <= len(w.request.pages[0]) * s.groups[0].tokens
        assert w.samples == (w.start + w.length == len(w.request.tokens))


def run(s: Scheduler, plan: Plan):
    check(s, plan)
    drawn = [next_token(w.request.tokens[: w.start + w.length]) for w in plan.work]
    return s.commit(plan, drawn, [-0.5] * len(drawn))


def drain(s: Scheduler, limit: int = 100_000) -> dict:
    done = {}
    for _ in range(limit):
        plan = s.schedule()
        if not plan.work:
            break
        for event in run(s, plan):
            if event.completion:
                done[event.id] = event.completion
    assert len(s) == 0, "requests left that no plan serves"
    return done


def drawn_by(plan: Plan, known: dict) -> list[int]:
    """What a step in flight draws, promised tokens being what steps before it drew."""
    drawn = []
    for w in plan.work:
        tokens = known.setdefault(w.request, [])
        tokens[:] = [*w.request.tokens, *tokens[len(w.request.tokens) :]]
        drawn.append(next_token(tokens[: w.start + w.length]))
        if w.samples:
            tokens[w.start + w.length :] = [drawn[-1]]
    return drawn


def expected(prompt, n, stops=()) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tuple(tokens[len(prompt) :])


def test_one_request_in_chunks_then_token_by_token():
    s = make()
    s.add("a", range(10), wish(3))
    shapes = []
    while (plan := s.schedule()).work:
        shapes += [(w.start, w.length, w.is_decode, w.samples) for w in plan.work]
        run(s, plan)
    assert shapes == [
        (0, 8, False, False),
        (8, 2, False, True),
        (10, 1, True, True),
        (11, 1, True, True),
    ]
    assert s.groups[0].pool.used == 0


def test_the_last_single_token_of_a_prompt_is_a_decode():
    s = make(max_prefill_tokens=4)
    s.add("a", range(5), wish(1))
    run(s, s.schedule())
    plan = s.schedule()
    assert plan.num_decodes == 1
    assert run(s, plan)[0].completion.finish_reason == "length"


def test_decodes_come_first_and_prompts_share_the_budget_in_order_of_arrival():
    s = make(num_pages=50)
    s.add("a", range(3), wish(9))
    run(s, s.schedule())
    s.add("b", range(5), wish(9))
    s.add("c", range(5), wish(9))
    plan = s.schedule()
    assert [(w.request.id, w.length, w.samples) for w in plan.work] == [
        ("a", 1, True),
        ("b", 5, True),
        ("c", 3, False),
    ]


def test_requests_beyond_the_limit_wait():
    s = make(num_pages=50, max_requests=2)
    for id in "abc":
        s.add(id, [1], wish(2))
    assert [w.request.id for w in s.schedule().work] == ["a", "b"]
    assert [r.id for r in s.waiting] == ["c"]


def test_a_newcomer_never_takes_the_page_of_a_running_request():
    s = make(num_pages=4)  # 3 to give
    s.add("a", range(4), wish(5))
    s.add("b", range(8), wish(1))
    assert [w.request.id for w in s.schedule().work] == ["a"]  # 2 free, 1 kept for a


def test_preemption_evicts_the_youngest_to_the_front_and_its_tokens_come_again():
    s = make(num_pages=6, max_prefill_tokens=16)  # 5 to give
    for id in "abc":
        s.add(id, range(3), wish(8))
    done, seen = {}, []
    while (plan := s.schedule()).work:
        seen.append(([r.id for r in s.running], [r.id for r in s.waiting]))
        done |= {e.id: e.completion for e in run(s, plan) if e.completion}
    assert s.preemptions > 0
    assert (["a", "b"], ["c"]) in seen
    assert {c.token_ids for c in done.values()} == {expected(range(3), 8)}
    assert (s.groups[0].pool.used, s.groups[0].pool.peak) == (0, 5)


def test_stop_tokens_end_a_request_and_are_its_last_token():
    first = next_token([1, 2])
    s = make(eos=[first])
    s.add("eos", [1, 2], wish(4))
    s.add("ignored", [1, 2], wish(4, ignore_eos=True))
    s.add("own", [1, 2], wish(4, ignore_eos=True, stop_token_ids=(first,)))
    done = drain(s)
    assert done["eos"].token_ids == done["own"].token_ids == (first,)
    assert done["eos"].finish_reason == done["own"].finish_reason == "stop"
    assert len(done["ignored"].token_ids) == 4
    assert done["ignored"].finish_reason == "length"


def test_a_logprob_that_is_not_finite_ends_its_request_only():
    s = make()
    s.add("bad", [1], wish(3))
    s.add("good", [2], wish(1))
    bad, good = s.commit(s.schedule(), [5, 6], [math.nan, -1.0])
    assert (bad.completion.finish_reason, bad.completion.token_ids) == ("error", ())
    assert (good.completion.finish_reason, good.completion.logprobs) == ("length", (-1.0,))
    assert s.groups[0].pool.used == 0


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "in flight", "preempted"])
def test_cancellation_in_any_state_returns_every_page(when):
    s = make(num_pages=6, max_prefill_tokens=4)
    s.add("a", range(3), wish(12))
    s.add("x", range(6), wish(8))
    x = s._live["x"]
    reached = {
        "waiting": lambda: True,
        "prefilling": lambda: 0 < x.computed < 6,
        "decoding": lambda: x.generated > 1,
        "in flight": lambda: x.generated > 1,
        "preempted": lambda: s.preemptions and x in s.waiting,
    }[when]
    for _ in range(40):
        if reached():
            break
        run(s, s.schedule())
    assert reached()
    plan = s.schedule() if when == "in flight" else None
    event = s.cancel("x")
    assert event.completion.finish_reason == "cancelled"
    assert event.completion.prompt_ids == tuple(range(6))
    assert len(event.completion.token_ids) == x.generated
    assert s.cancel("x") is None
    if plan:
        drawn = [next_token(w.request.tokens[: w.start + w.length]) for w in plan.work]
        assert {e.id for e in s.commit(plan, drawn, [-1.0] * len(drawn))} == {"a"}
    assert drain(s)["a"].token_ids == expected(range(3), 12)
    assert s.groups[0].pool.used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], wish(1), "prompt: given no tokens; allowed: 1 token or more"),
        ([1, -1], wish(1), "prompt: token 1: given -1; allowed: integers from 0 to 96"),
        ([VOCAB], wish(1), "prompt: token 0: given 97"),
        ([1.5], wish(1), "prompt: token 0: given 1.5"),
        (["1"], wish(1), "prompt: given a list of texts; allowed: a sequence of token ids"),
        ([1] * 60, wish(5), r"60 \+ 5 = 65 tokens; allowed: at most 64 \(max_model_len\)"),
        ([1] * 30, wish(4), r"given 9 \(30 \+ 4 - 1 rows, 4 to a page\).*at most 8.*Use 10 pages"),
        ([1], None, "request id: given 'live'"),
        (5, wish(1), r"prompt: given 5 \(int\); allowed: a sequence of token ids"),
        ("abc", wish(1), r"prompt: given 'abc' \(str\).*Text needs tokenizer.json"),
        (iter([1]), wish(1), r"prompt: given .*iterator\); allowed: a sequence"),
        ({1: 2}, wish(1), r"prompt: given \{1: 2\} \(dict\)"),
        (np.array(3), wish(1), "prompt: given array"),
        (np.ones((2, 2), int), wish(1), "prompt: token 0: given array"),
        ([10**5000], wish(1), "prompt: token 0: given int of 16610 bits"),
    ],
)
def test_what_can_never_be_served_is_refused_and_nothing_is_kept(prompt, params, message):
    s = make()
    s.add("live", [1], wish(1))
    with pytest.raises(EngineError, match=message):
        s.add("new" if params else "live", prompt, params or wish(1))
    assert len(s) == len(s.waiting) == 1
    assert s.groups[0].pool.used == 0


def test_the_largest_request_that_fits_is_served_with_the_whole_pool():
    s = make(num_pages=9)
    s.add("a", [1] * 30, wish(3))  # 32 rows, 8 pages
    assert drain(s)["a"].finish_reason == "length"
    assert s.groups[0].pool.peak == 8


@pytest.mark.parametrize("name", ["max_requests", "max_prefill_tokens", "max_model_len"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(EngineError, match=f"{name}: given 0; allowed: 1 or more"):
        make(**{name: 0})


@pytest.mark.parametrize("value", [2.0, "3", None, True, 2**31, [1]], ids=str)
def test_sizes_are_integers_that_fit_in_32_bits(value):
    with pytest.raises(EngineError, match=r"requests: given .*; allowed: 1 or more, at most 2,147"):
        make(max_requests=value)
    with pytest.raises(EngineError, match=r"latent: tokens: given .*; allowed: 1 or more, at most"):
        PageGroup(name="latent", pool=PagePool(2), tokens=value)
    assert make(max_requests=np.int64(4)).max_requests == 4


@pytest.mark.parametrize("order", ["oldest first", "youngest first", "any"])
def test_cancelling_a_long_queue_looks_at_every_request_once(order, monkeypatch):
    looked = 0

    def compare(self, other):
        nonlocal looked
        looked += 1
        return self is other

    monkeypatch.setattr(Request, "__eq__", compare)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
    s = make(max_requests=1000, num_pages=4000)
    ids = [str(i) for i in range(4000)]
    for id in ids:
        s.add(id, [1], wish(9))
    run(s, s.schedule())
    ids = ids if order == "oldest first" else ids[::-1]
    if order == "any":
        random.Random(0).shuffle(ids)
    looked = 0
    assert all(s.cancel(id) for id in ids)
    assert looked < 10 * len(ids)  # not one for every pair
    assert (len(s), len(s.waiting), len(s.running), s.groups[0].pool.used) == (0, 0, 0, 0)


@pytest.mark.slow
def test_two_thousand_requests_with_cancellations_and_a_pool_too_small():
    rng = random.Random(0)
    s = make(num_pages=12, max_requests=8, max_prefill_tokens=16, max_model_len=48)
    wanted, done, refused = {}, {}, 0
    while len(wanted) + refused < 2000 or len(s):
        for _ in range(rng.randrange(4)):
            if len(wanted) + refused == 2000:
                break
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(40))]
            params = wish(rng.randrange(1, 16), stop_token_ids=(rng.randrange(VOCAB),))
            id = f"{len(wanted)}"
            try:
                s.add(id, prompt, params)
                wanted[id] = prompt, params
            except EngineError:
                refused += 1
        if s._live and rng.random() < 0.1:
            event = s.cancel(rng.choice(list(s._live)))
            done[event.id] = event.completion
        if (plan := s.schedule()).work:
            done |= {e.id: e.completion for e in run(s, plan) if e.completion}
    assert len(done) == len(wanted) == 2000 - refused
    assert refused > 50
    assert s.preemptions > 100
    assert s.groups[0].pool.used == 0
    for id, (prompt, params) in wanted.items():
        whole = expected(prompt, params.max_new_tokens, params.stop_token_ids)
        got = done[id].token_ids
        if done[id].finish_reason == "cancelled":
            assert got == whole[: len(got)]
        else:
            assert got == whole


def test_a_plan_is_made_while_the_step_before_it_runs():
    s = make(max_prefill_tokens=16)
    s.add("a", range(3), wish(3))
    s.add("b", range(4), wish(1))
    first = s.schedule()
    s.launch(first)
    second = s.schedule()  # b's only token is promised: nothing is left to do for it
    assert [(w.request.id, w.start, w.length, w.samples) for w in second.work] == [
        ("a", 3, 1, True)
    ]
    assert second.work[0].tokens == [] and second.work[0].request.row == 0
    s.launch(second)
    for outcome in s.outcomes(first, drawn_by(first, {}), [0.0, 0.0]):
        s.apply(outcome)
    assert "b" not in s and len(s._live["a"].tokens) == 4
    third = s.schedule()
    assert [(w.start, w.samples) for w in third.work] == [(4, True)]


class Ahead:
    """A scheduler of which one step is always in flight."""

    def __init__(self, scheduler: Scheduler):
        self.s, self.flights, self.known = scheduler, [], {}

    def step(self) -> list:
        """Launch what can be launched, land the oldest."""
        while len(self.flights) < 2 and (plan := self.s.schedule()).work:
            for w in plan.work:
                assert w.start == w.request.computed and w.length > 0
                assert w.start + w.length <= len(w.request.pages[0]) * self.s.groups[0].tokens
                assert len(w.tokens) + (w.start + w.length > len(w.request.tokens)) == w.length
            self.s.launch(plan)
            self.flights.append((plan, drawn_by(plan, self.known)))
        if not self.flights:
            return []
        plan, drawn = self.flights.pop(0)
        outcomes = self.s.outcomes(plan, drawn, [-0.5] * len(drawn))
        for outcome in outcomes:
            self.s.apply(outcome)
        return [o.event for o in outcomes if o.event is not None]


@pytest.mark.slow
def test_two_thousand_requests_with_a_step_in_flight_and_a_pool_too_small():
    rng = random.Random(1)
    s = make(num_pages=12, max_requests=8, max_prefill_tokens=16, max_model_len=48)
    ahead, wanted, done = Ahead(s), {}, {}
    while len(wanted) < 2000 or len(s):
        for _ in range(rng.randrange(4)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            params = wish(rng.randrange(1, 14), stop_token_ids=(rng.randrange(VOCAB),))
            if len(wanted) < 2000:
                s.add(id := f"{len(wanted)}", prompt, params)
                wanted[id] = prompt, params
        if s._live and rng.random() < 0.1:
            event = s.cancel(rng.choice(list(s._live)))
            done[event.id] = event.completion
        if rng.random() < 0.02:  # a step is lost, and with it those in flight
            s.recover()
            ahead.flights.clear()
            ahead.known.clear()
        done |= {e.id: e.completion for e in ahead.step() if e.completion}
    assert len(done) == 2000 and s.preemptions > 100
    assert all(group.pool.used == 0 for group in s.groups)
    for id, (prompt, params) in wanted.items():
        whole = expected(prompt, params.max_new_tokens, params.stop_token_ids)
        got = done[id].token_ids
        cancelled = done[id].finish_reason == "cancelled"
        assert got == (whole[: len(got)] if cancelled else whole)


class Traffic(RuleBasedStateMachine):
    """Any interleaving of arrivals, cancellations, steps and steps in flight."""

    def __init__(self):
        super().__init__()
        self.s = make(num_pages=6, page=2, max_requests=3, max_prefill_tokens=5, max_model_len=12)
        self.added = 0
        self.ended = 0
        self.arrival = {}

    @rule(length=st.integers(0, 12), new=st.integers(1, 6))
    def add(self, length, new):
        id = str(self.added)
        fits = length > 0 and length + new <= 12 and length + new - 1 <= 10
        try:
            self.s.add(id, [1] * length, wish(new))
        except EngineError:
            assert not fits
        else:
            assert fits
            self.arrival[id] = self.added
            self.added += 1

    @rule(which=st.integers(0, 50))
    def cancel(self, which):
        self.ended += self.s.cancel(str(which)) is not None

    @rule(cancel=st.none() | st.integers(0, 50))
    def step(self, cancel):
        live = len(self.s)
        plan = self.s.schedule()
        check(self.s, plan)
        assert bool(plan.work) == bool(live)
        if cancel is not None:
            self.ended += self.s.cancel(str(cancel)) is not None
        drawn = [next_token(w.request.tokens[: w.start + w.length]) for w in plan.work]
        events = self.s.commit(plan, drawn, [0.0] * len(drawn))
        self.ended += sum(e.completion is not None for e in events)

    @invariant()
    def nothing_is_lost(self):
        s = self.s
        for i, group in enumerate(s.groups):
            held = [page for r in s.running for page in r.pages[i]]
            assert len(set(held)) == len(held) == group.pool.used
            assert 0 not in held
            assert group.pool.used + group.pool.free == group.pool.capacity
            for r in s.running:
                assert len(r.pages[i]) <= group.pages_of(max(len(r.tokens), r.rows_at_most))
        assert not any(any(r.pages) or r.computed for r in s.waiting)
        order = [self.arrival[r.id] for r in (*s.running, *s.waiting)]
        assert order == sorted(order)
        assert len(order) == len(s) == self.added - self.ended

    @rule(cut=st.booleans())
    def interrupted(self, cut):
        """A step is lost: before its tokens were known, or before all were recorded."""
        plan = self.s.schedule()
        outcomes = []
        if cut:
            drawn = [next_token(w.request.tokens[: w.start + w.length]) for w in plan.work]
            outcomes = self.s.outcomes(plan, drawn, [0.0] * len(drawn))
            for outcome in outcomes[: len(outcomes) // 2]:
                self.s.apply(outcome)
        self.s.recover(outcomes)
        self.ended += sum(o.reason is not None for o in outcomes)

    def teardown(self):
        drain(self.s, limit=2000)
        assert all(group.pool.used == 0 for group in self.s.groups)


Traffic.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestTraffic = Traffic.TestCase


def windowed(pages, *, window=6, page=4, states=40, requests=4, chunk=16):
    """A scheduler of states, of a window of so many pages, and of a ring."""
    groups = [
        PageGroup(name="window", pool=PagePool(1 + pages), tokens=page, window=window),
        PageGroup(name="states", pool=PagePool(1 + states), tokens=8),
        PageGroup(name="ring", pool=PagePool(1 + requests), tokens=2**31 - 1),
    ]
    return Scheduler(
        groups=groups, max_requests=requests, max_prefill_tokens=chunk, max_model_len=64, vocab=99
    )


@pytest.mark.parametrize("pages", [4, 5, 8, 30])
@pytest.mark.parametrize("window", [1, 6, 9])
def test_windows_hold_what_is_seen_and_no_more(pages, window):
    """Random traffic, down to the fewest pages: all requests end, no page has two owners."""
    rng = random.Random(pages * 10 + window)
    s = windowed(pages, window=window, chunk=24)  # of which the fewest pages hold a part
    group = s.groups[0]
    assert group.least(60) <= 4
    lens = [rng.choice([1, 2, 7, 16, 17, 40]) for _ in range(30)]
    for n, length in enumerate(lens):
        s.add(str(n), [1] * length, SamplingParams(max_new_tokens=rng.randint(1, 20)))
    ended = 0
    for _ in range(2000):
        plan = s.schedule()
        if not plan.work:
            break
        for w in plan.work:
            table = w.request.pages[0]
            first, last = max(w.start - window + 1, 0), w.start + w.length - 1
            assert all(table[p // group.tokens] for p in range(first, last + 1))
            assert len(w.request.pages[2]) == 1
        held = [p for r in s.running for p in r.pages[0] if p]
        assert len(held) == len(set(held)) == group.pool.used <= pages
        for r in s.running:  # a page more than its window cuts, and those of this step's chunk
            fed = sum(w.length for w in plan.work if w.request is r)
            assert sum(map(bool, r.pages[0])) <= (window - 1 + fed) // group.tokens + 2
        if rng.random() < 0.1:
            ended += s.cancel(rng.choice(plan.work).request.id) is not None
        events = s.commit(plan, [2] * len(plan.work), [0.0] * len(plan.work))
        ended += sum(e.completion is not None for e in events)
    assert ended == len(lens)
    assert [g.pool.used for g in s.groups] == [0, 0, 0]


def test_a_prompt_gets_its_window_chunk_by_chunk():
    s = windowed(6)
    s.add("a", [1] * 50, SamplingParams(max_new_tokens=3))
    held = []
    while (plan := s.schedule()).work:
        held.append(sum(map(bool, plan.work[0].request.pages[0])))
        assert len(plan.work[0].request.pages[1]) >= 7  # states of the whole prompt
        s.commit(plan, [2] * len(plan.work), [0.0] * len(plan.work))
    assert max(held) <= 6
    assert s.groups[0].pool.peak <= 6


def test_a_window_too_small_for_one_request_is_refused():
    with pytest.raises(EngineError, match=r"cache pages: given 4 .*at most 3, the whole pool"):
        windowed(3).add("a", [1] * 50, SamplingParams(max_new_tokens=3))
    windowed(4).add("a", [1] * 50, SamplingParams(max_new_tokens=3))


def test_a_stop_string_before_half_a_character_ends_the_last_token():
    """The text waits for the rest of the character, which never comes."""
    texts = {5: "aS\ufffd", 6: "ab\ufffd"}

    def decode(ids):
        return "".join(texts[i] for i in ids)

    for token, reason, told in ((5, "stop", "a"), (6, "length", "ab\ufffd")):
        s = make()
        s.add("x", [1], wish(1, stop="S"), TextSoFar(decode=decode, stops=("S",)))
        (event,) = s.commit(s.schedule(), [token], [-1.0])
        done = event.completion
        assert done is not None and (done.finish_reason, done.text) == (reason, told)


def test_more_likeliest_tokens_than_there_are_is_refused():
    s = make()
    s.vocab = 5
    with pytest.raises(EngineError, match="request x: logprobs: given 6; allowed: at most 5"):
        s.add("x", [1], wish(1, logprobs=6))
    s.add("x", [1], wish(1, logprobs=5))


def test_a_stop_token_that_is_no_token_is_refused():
    s = make()
    with pytest.raises(EngineError, match=f"stop_token_ids: given {VOCAB}; allowed: tokens below"):
        s.add("x", [1], wish(1, stop_token_ids=(3, VOCAB)))
