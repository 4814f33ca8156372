import copy
import dataclasses
import inspect
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig
from mla_jax.engine import Engine
from mla_jax.errors import ArgumentError, EngineError, MetadataError
from mla_jax.metadata.buckets import Ladder, MLALadder
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.prefill_crossover import PathRate, PrefillCrossover
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import Step, StepOutput

CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab=64,
    hidden=32,
    layers=2,
    dims=MLADims(heads=2, rank=16, nope=8, rope=8, v=8, q_rank=None),
    rope=RopeConfig(dim=8, theta=10000.0),
    mlp=32,
    moe=MoEConfig(experts=4, topk=2, width=16, shared=1, method="noaux_tc", normalise=True),
    sparse_layers=(False, True),
    eps=1e-6,
    max_positions=128,
    eos=(0,),
)


F32 = jnp.dtype(jnp.float32)

LADDER = MLALadder(
    decodes=Ladder("decodes", (16,)),
    prefills=Ladder("prefills", (16,)),
    prefill_tokens=Ladder("prefill tokens", (48,)),
    pages=Ladder("pages", (16,)),
    context_rows=24,
)
"""One rung per dimension: at most five programs, whatever the traffic."""


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    return DeepseekV3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def make(model):
    """Engines that share their compiled programs, hence also ladder and cache shape.

    A smaller pool is the same pool of which the test holds some pages.
    """
    steps: dict[int, Step] = {}

    def make(*, pages=64, page=8, max_requests=4, prefill_chunk=16, **more) -> Engine:
        def shared(*args, **kwargs) -> Step:
            if page not in steps:
                steps[page] = Step(*args, **kwargs)
            return steps[page]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mla_jax.engine.Step", shared)
            settings = {"cache_format": "fp32", "ladder": LADDER, "want_logits": True} | more
            engine = Engine(
                model,
                CONFIG,
                num_pages=65,
                page=page,
                max_requests=max_requests,
                prefill_chunk=prefill_chunk,
                **settings,
            )
        pool_of(engine).alloc(64 - pages)
        return engine

    return make


def pool_of(engine: Engine):
    return engine.scheduler.groups[0].pool


def settled(engine: Engine, *, pages: int = 64) -> bool:
    """Nothing lives and nothing is held but what the test itself holds."""
    stats = engine.stats()
    return stats.live == 0 and stats.pages_used == 64 - pages and not engine._claimed


def prompts(n: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 64, rng.integers(1, longest + 1)).tolist() for _ in range(n)]


def wish(n: int, **more) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, ignore_eos=True, **more)


WARM = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
PROMPTS = prompts(6)
PARAMS = [wish(6 + i, seed=i, **(WARM if i % 2 else {})) for i in range(6)]


@pytest.fixture(scope="module")
def alone(make):
    """Every request by itself, the whole prompt in one chunk."""
    engine = make(max_requests=1, prefill_chunk=48)
    return [engine.generate([p], w)[0] for p, w in zip(PROMPTS, PARAMS, strict=True)]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.prompt_ids == b.prompt_ids
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        np.testing.assert_allclose(a.logits, b.logits, atol=2e-5)


@pytest.mark.slow
def test_tokens_are_the_same_without_running_ahead(make, alone):
    engine = make(max_requests=6, run_ahead=False)
    same(engine.generate(PROMPTS, PARAMS), alone)
    assert settled(engine)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_is_sent_before_the_tokens_of_the_last_are_read(make, monkeypatch, ahead):
    engine, order = make(run_ahead=ahead), []

    def logged(owner, name, what):
        inner = getattr(owner, name)

        def run(*args, **kwargs):
            order.append(what)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    logged(Step, "run", "send")
    logged(StepOutput, "read", "read")
    engine.generate([[1, 2, 3]], wish(4))
    plain = ["send", "read"] * 4
    assert order == (["send", *["send", "read"] * 3, "read"] if ahead else plain)


def test_a_second_thread_is_refused_and_loses_nothing(make, alone, monkeypatch):
    """A call that comes while another thread is in one; behind each other they may come."""
    engine, refused, run = make(), [], Step.run

    def beside(call):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).exception()

    def interrupted(*args):
        calls = partial(engine.add, PROMPTS[1]), partial(engine.cancel, "a"), engine.step
        calls = *calls, engine.warm_up
        refused.extend(map(beside, calls))
        return run(*args)

    engine.add(PROMPTS[0], PARAMS[0], id="a")
    assert beside(partial(engine.add, PROMPTS[1], PARAMS[1], id="b")) is None
    monkeypatch.setattr(Step, "run", interrupted)
    events = engine.step()
    monkeypatch.undo()
    while len(engine.scheduler):
        events += engine.step()
    assert refused and all(isinstance(error, EngineError) for error in refused)
    assert "one thread at a time" in str(refused[0])
    done = {e.id: e.completion for e in events if e.completion is not None}
    same([done["a"], done["b"]], alone[:2])


def test_two_interruptions_do_not_keep_other_threads_out(make, alone, monkeypatch):
    """The second comes while the engine mends what the first one broke."""
    engine, alloc = make(), Engine._alloc
    engine.add(PROMPTS[0], PARAMS[0], id="a")

    def interrupted(*_):
        raise KeyboardInterrupt

    for owner, name in ((Step, "run"), (Engine, "_alloc")):
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        if owner is Step:
            monkeypatch.undo()
    monkeypatch.undo()
    assert Engine._alloc is alloc
    events = []
    with ThreadPoolExecutor(1) as pool:
        while len(engine.scheduler):
            events += pool.submit(engine.step).result()
    (done,) = [e.completion for e in events if e.completion is not None]
    same([done], alone[:1])


def test_a_step_sent_for_an_ended_request_changes_nothing(make):
    """The end is noticed one step late: its pages go on to somebody else meanwhile."""
    first = make().generate([[1, 2, 3]], wish(6))[0].token_ids
    stop = wish(6, stop_token_ids=(first[2],))
    engine = make(pages=2, max_requests=2)  # one page each
    asked = [([1, 2, 3], stop), ([4, 5], wish(5)), ([1, 2, 3], wish(4)), ([6], stop)]
    got = engine.generate([p for p, _ in asked], [w for _, w in asked])
    want = [make().generate([p], w)[0] for p, w in asked]
    same(got, want)
    assert got[0].finish_reason == "stop" and settled(engine, pages=2)


def test_new_weights_wait_for_tokens_in_flight(make, model, alone):
    """What was drawn by the old ones is told, and nothing twice."""
    engine = make()
    id = engine.add(PROMPTS[0], PARAMS[0])
    events = engine.step()
    engine.take(model)
    while engine.stats().live:
        events += engine.step()
    assert [e.token_id for e in events] == list(alone[0].token_ids)
    assert {e.id for e in events} == {id}


def test_greedy_tokens_are_those_of_a_full_recompute(model, alone):
    full = nnx.jit(lambda m, ids: m.logits(m.full(ids)))
    for completion, params in zip(alone, PARAMS, strict=True):
        ids = [*completion.prompt_ids, *completion.token_ids]
        padded = jnp.asarray([ids + [0] * (64 - len(ids))], jnp.int32)
        logits = full(model, padded)[0, len(completion.prompt_ids) - 1 : len(ids) - 1]
        np.testing.assert_allclose(completion.logits, logits, atol=2e-5)
        if params.temperature == 0:
            assert completion.token_ids == tuple(jnp.argmax(logits, axis=-1).tolist())
        logprobs = jax.nn.log_softmax(logits)[np.arange(len(logits)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_requests": 6, "prefill_chunk": 48},
        {"max_requests": 6, "prefill_chunk": 7},
        {"max_requests": 3, "prefill_chunk": 1},
        {"max_requests": 6, "page": 3, "max_model_len": 48},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company_chunks_or_page_size(make, alone, settings):
    engine = make(**settings)
    same(engine.generate(PROMPTS, PARAMS), alone)
    assert settled(engine)


def test_tokens_do_not_depend_on_the_path_of_a_prefill(make, alone):
    """Short prompts on context go over their pages; the steps that did are counted."""
    engine = make(max_requests=6, prefill_chunk=7)
    rate = PathRate(tflops=1.0, fixed_us=0.0)
    crossover = PrefillCrossover(
        dims=CONFIG.dims,
        run=3,
        multiprocessors=132,
        expanded=rate,
        absorbed=rate,
        projection_tflops=1e-6,
        measured="",
    )
    engine.builder = dataclasses.replace(engine.builder, absorb=crossover.absorb, absorb_run=3)
    same(engine.generate(PROMPTS, PARAMS), alone)
    assert settled(engine)
    assert {b.absorb for b in engine.stats().buckets} == {0, 3}


def test_tokens_do_not_depend_on_which_pages(make, alone):
    engine = make()
    pages = pool_of(engine).alloc(pool_of(engine).free)
    random.Random(1).shuffle(pages)
    pool_of(engine).release(pages)
    same(engine.generate(PROMPTS, PARAMS), alone)


def test_unused_and_used_pages_may_hold_rubbish(make, alone):
    engine = make()
    poison = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, jnp.nan), engine._caches)
    engine._caches = poison
    clean = make().generate(PROMPTS, PARAMS)
    for a, b in zip(engine.generate(PROMPTS, PARAMS), clean, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs
        np.testing.assert_array_equal(a.logits, b.logits)


def test_tokens_do_not_depend_on_preemption(make):
    many, params = prompts(8, seed=3, longest=6), wish(30, **WARM)
    calm = make(max_requests=8).generate(many, params)
    engine = make(max_requests=8, pages=9)
    same(engine.generate(many, params), calm)
    assert engine.stats().preemptions > 3
    assert settled(engine, pages=9)


def test_stop_tokens_and_streaming(make, alone):
    engine = make()
    stop = alone[0].token_ids[3]
    params = wish(6, stop_token_ids=(stop,))
    events = list(engine.stream(PROMPTS[0], params))
    first = alone[0].token_ids.index(stop)
    assert tuple(e.token_id for e in events) == alone[0].token_ids[: first + 1]
    assert [e.completion is not None for e in events] == [False] * first + [True]
    assert events[-1].completion.finish_reason == "stop"
    assert events[-1].completion.logits.shape == (first + 1, 64)


def test_a_stream_closed_early_gives_its_pages_back(make):
    engine = make()
    stream = engine.stream(PROMPTS[1], wish(20))
    next(stream)
    assert engine.stats().pages_used > 0
    stream.close()
    assert settled(engine)
    assert engine.step() == []


def test_streams_generate_and_step_each_get_their_own_events(make, alone):
    engine = make()
    own = engine.add(PROMPTS[2], PARAMS[2])
    stream = engine.stream(PROMPTS[1], PARAMS[1])
    events = [next(stream)]
    same(engine.generate([PROMPTS[0]], PARAMS[0]), alone[:1])
    events += stream
    assert tuple(e.token_id for e in events) == alone[1].token_ids
    with pytest.raises(EngineError, match="an id that no live request has, nor one whose events"):
        engine.add(PROMPTS[0], PARAMS[0], id=own)
    unread = engine.step()
    while engine.stats().live:
        unread += engine.step()
    assert {e.id for e in unread} == {own}
    assert tuple(e.token_id for e in unread) == alone[2].token_ids
    assert settled(engine)
    assert engine._logits == {}


def test_an_id_whose_events_are_not_all_read_is_refused(make):
    engine = make()
    stream = engine.stream([1, 2], wish(2))
    first = next(stream)
    while engine.stats().live:
        engine.step()
    with pytest.raises(EngineError, match=r"request id: given '.*'; allowed: an id that no"):
        engine.add([1, 2], wish(5), id=first.id)
    assert [event.id for event in stream] == [first.id]
    assert engine.add([1, 2], wish(5), id=first.id) == first.id


def test_an_id_that_the_engine_chooses_is_no_unread_one(make):
    engine = make()
    engine.add([5], wish(2), id="request-1")
    engine.generate([[6, 7]], wish(4))  # request-0; the other one ends meanwhile
    assert engine.add([9], wish(2)) == "request-2"


def test_weights_that_programs_cannot_take_are_refused(make, model, alone):
    engine = make()
    other = DeepseekV3(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=r"take: .*: given bfloat16\[.*allowed: float32\["):
        engine.take(other)
    with pytest.raises(EngineError, match="take: model: given weights without memory"):
        engine.take(nnx.eval_shape(lambda: DeepseekV3(CONFIG, dtype=F32, rngs=nnx.Rngs(0))))
    turned = dataclasses.replace(CONFIG, rope=RopeConfig(dim=8, theta=50.0))
    with pytest.raises(EngineError, match=r"take: model's config: .*50.* the engine's: .*10000"):
        engine.take(DeepseekV3(turned, dtype=F32, rngs=nnx.Rngs(0)))  # of the same shapes
    (prompt, *_) = prompts(1)
    assert engine.generate([prompt], wish(2))[0].token_ids


@pytest.mark.parametrize("caught", [True, False], ids=["caught", "not"])
def test_a_call_inside_of_a_call_is_refused_and_loses_nothing(make, alone, monkeypatch, caught):
    """As of a signal handler: it runs between two lines of whatever the thread is in."""
    engine = make()
    ids = [engine.add(p, w) for p, w in zip(PROMPTS, PARAMS, strict=True)]
    run, left = Step.run, itertools.count()

    def interrupted(*args, **more):
        found = run(*args, **more)
        if next(left) == 3:
            with pytest.raises(EngineError, match="inside of another one") as error:
                engine.cancel(ids[0])
            if not caught:
                raise error.value
        return found

    monkeypatch.setattr(Step, "run", interrupted)
    done = {}
    while len(done) < len(ids):
        try:
            events = engine.step()
        except EngineError:
            assert not caught
            continue
        done |= {e.id: e.completion for e in events if e.completion is not None}
    same([done[id] for id in ids], alone)
    assert settled(engine)


def test_token_histories_that_no_memory_holds_are_refused(model):
    with pytest.raises(EngineError, match=r"max_requests: given 2,000,000,000 .*allowed: at most"):
        Engine(model, CONFIG, num_pages=9, page=4, max_model_len=64, max_requests=2 * 10**9)


@pytest.mark.parametrize("name", ["run_ahead", "want_logits"])
def test_flags_are_true_or_false(model, name):
    with pytest.raises(EngineError, match=rf"^{name}: given 5"):
        Engine(model, CONFIG, num_pages=9, page=4, max_model_len=64, **{name: 5})


def test_what_cannot_be_called_is_refused_before_anything_is_done(make):
    engine = make()
    with pytest.raises(EngineError, match="on_progress: given 5"):
        engine.generate([[1]], wish(1), on_progress=5)
    with pytest.raises(EngineError, match="progress: given 5"):
        engine.warm_up(progress=5)
    assert settled(engine)


def test_cancelled_requests_are_reported_by_the_next_step(make):
    engine = make()
    id = engine.add(PROMPTS[0], wish(9))
    engine.step()
    assert engine.cancel(id)
    assert not engine.cancel(id)
    (event,) = engine.step()
    assert event.completion.finish_reason == "cancelled"
    assert settled(engine)


def test_one_bad_prompt_leaves_none_behind(make):
    engine = make()
    with pytest.raises(EngineError, match="generate: prompt 1: token 1: given 64"):
        engine.generate([[1, 2], [3, 64]], wish(2))
    with pytest.raises(EngineError, match=r"120 \+ 9 = 129 tokens; allowed: at most 128"):
        engine.generate([[1], [1] * 120], wish(9))
    with pytest.raises(EngineError, match="generate: params: given 1; allowed: one, or 2"):
        engine.generate([[1], [2]], [wish(1)])
    assert settled(engine)
    assert engine.stats().steps == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([1, 2, 3], None, r"prompt 0: given 1 \(int\).*A single prompt is written \[\[1, 2, 3\]\]"),
        (np.array([1, 2]), None, r"prompt 0: given .*A single prompt is written"),
        ("text", None, r"prompts: given 'text' \(str\).*tokenizer"),
        (["text"], None, r"prompt 0: given 'text' \(str\).*tokenizer"),
        (5, None, r"prompts: given 5 \(int\); allowed: a sequence of prompts"),
        ([[1]], {"temperature": 1}, r"params: given .*dict\).*SamplingParams\(temperature=…\)"),
        ([[1]], {}, r"params: given \{\} \(dict\)"),
        ([[1]], [{}], r"params 0: given \{\} \(dict\)"),
        ([[1]], 0.7, r"params: given 0.7 \(float\); allowed: a SamplingParams, or None"),
        ([[1]], "hot", r"params: given 'hot' \(str\)"),
    ],
    ids=str,
)
def test_what_is_no_prompt_or_wish_is_refused_in_words(make, prompts, params, message):
    engine = make()
    with pytest.raises(EngineError, match=message):
        engine.generate(prompts, params)
    if params in ({}, 0.7, "hot"):
        with pytest.raises(EngineError, match="params: given"):
            engine.add([1], params)
    assert settled(engine)


def test_arrays_ranges_and_one_wish_each_are_taken(make):
    engine = make()
    got = engine.generate((range(1, 4), np.array([1, 2, 3])), (wish(1), None))
    assert got[0].prompt_ids == got[1].prompt_ids == (1, 2, 3)
    assert engine.generate([]) == []


def test_an_interrupted_generate_leaves_none_behind(make):
    engine = make()

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS, on_progress=interrupt)
    assert settled(engine)


def test_a_length_beyond_the_model_is_refused(make):
    with pytest.raises(
        EngineError, match="max_model_len: given 129; allowed: 1 or more, at most 128"
    ):
        make(max_model_len=129)


def test_an_unknown_backend_is_refused_before_anything_is_loaded():
    def load():
        raise AssertionError("loaded")

    with pytest.raises(
        EngineError, match=r"backend: given xal; allowed: mosaic or xla or triton, or None"
    ):
        Engine(load, CONFIG, num_pages=4, backend="xal")


@pytest.mark.parametrize(
    "setting",
    [
        {"max_model_len": 129},
        {"cache_format": "fp7"},
        {"page": 0},
        {"max_requests": 0},
        {"context_rows": 0},
        {"context_rows": 1.5},
        {"context_rows": "9"},
        {"max_model_len": "9"},
        {"max_model_len": 9.0},
        {"page": 8.0},
        {"num_pages": 2**31},
        {"num_pages": 7.5},
        {"pages": 8},  # no such setting
    ],
    ids=str,
)
def test_a_setting_is_refused_before_weights_are_read(setting):
    def read():
        raise AssertionError("weights were read")

    with pytest.raises((ArgumentError, EngineError, MetadataError)) as refusal:
        Engine(read, CONFIG, **{"num_pages": 8} | setting)
    if "pages" in setting:
        text = str(refusal.value)
        assert "given pages; allowed: num_pages, dtype, run_ahead" in text
        assert "prefill_chunk" in text


def test_a_model_may_be_made_by_a_function(model):
    sizes = {"num_pages": 16, "page": 8, "max_requests": 16, "prefill_chunk": 48}
    engine = Engine(lambda: model, CONFIG, max_model_len=64, ladder=LADDER, **sizes)
    assert engine.stats().pages == 15


def test_logits_that_are_not_finite_are_reported(make):
    engine = make()
    engine._step = copy.copy(engine._step)
    engine._step.leaves = [jnp.full_like(leaf, jnp.nan) for leaf in engine._step.leaves]
    (completion,) = engine.generate([[1, 2, 3]], wish(4))
    assert (completion.finish_reason, completion.token_ids) == ("error", ())
    assert completion.logits.shape == (0, 64)


@pytest.mark.slow
def test_two_thousand_requests_with_cancellations_and_a_pool_too_small(model):
    rng = random.Random(0)
    engine = Engine(
        model,
        CONFIG,
        num_pages=14,
        page=8,
        max_requests=16,
        prefill_chunk=48,
        cache_format="fp32",
        ladder=LADDER,
    )
    live, done, refused = [], {}, 0
    while len(done) + refused < 2000:
        while len(live) < 40 and len(done) + len(live) + refused < 2000:
            length = rng.randrange(300) if rng.random() < 0.03 else rng.randrange(24)
            prompt = [rng.randrange(64) for _ in range(length)]
            params = SamplingParams(
                max_new_tokens=rng.randrange(1, 32),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**32),
            )
            try:
                live.append(engine.add(prompt, params))
            except EngineError:
                refused += 1
        if live and rng.random() < 0.2:
            assert engine.cancel(rng.choice(live))
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
                live.remove(event.id)
    stats = engine.stats()
    reasons = {c.finish_reason for c in done.values()}
    assert reasons == {"stop", "length", "cancelled"}
    assert refused > 20
    assert len(done) == 2000 - refused
    assert stats.preemptions > 50
    assert (stats.live, stats.pages_used) == (0, 0)
    assert stats.compiles == len(stats.buckets) == 3
    assert stats.steps == sum(stats.buckets.values())


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_caches_stay_where_they_are(model, tmp_path, stored):
    """A step writes its rows into the memory that it was given, also by a stored program."""

    def places() -> list[int]:
        engine = Engine(
            model,
            CONFIG,
            num_pages=65,
            page=8,
            max_requests=16,
            prefill_chunk=48,
            ladder=LADDER,
            programs=tmp_path if stored else None,
        )
        engine.add([1, 2, 3], wish(3))
        found = [engine._caches["latent"].pages.unsafe_buffer_pointer()]
        for _ in range(3):  # a prefill, two decodes
            engine.step()
            found.append(engine._caches["latent"].pages.unsafe_buffer_pointer())
        return found

    for _ in range(1 + stored):
        assert len(set(places())) == 1


def test_a_seed_of_none_is_another_one_each_time(make):
    engine = make()
    hot = wish(8, temperature=50.0, seed=None)
    drawn = [tuple(c.token_ids) for c in engine.generate([[1, 2]] * 4, hot)]
    assert len(set(drawn)) > 1  # of 64**8 answers
    equal = engine.generate([[1, 2]] * 4, dataclasses.replace(hot, seed=7))
    assert len({tuple(c.token_ids) for c in equal}) == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], r"int32\[2\]; allowed: integers \[sequences, tokens\]. One sequence is token_ids"),
        ([[1.0]], r"float32\[1, 1\]; allowed: integers"),
        ([[64]], r"given 64; allowed: 0 to 63"),
        ([[-1]], r"given -1; allowed: 0 to 63"),
        ([[1] * 129], r"tokens: given 129; allowed: at most 128"),
        ("ab", r"allowed: integers"),
    ],
)
def test_tokens_of_whole_sequences_are_checked(model, tokens, message):
    full = inspect.unwrap(DeepseekV3.full)  # without the tests' own check of shapes
    with pytest.raises(ArgumentError, match=message):
        full(model, tokens)


def test_an_empty_name_is_no_folder_of_programs(model):
    with pytest.raises(EngineError, match=r"programs: given ''; allowed: a folder"):
        Engine(model, CONFIG, num_pages=9, page=4, max_model_len=64, programs="")


def test_programs_are_lowered_one_after_the_other_and_compiled_beside_each_other(
    model, monkeypatch
):
    """Python of several threads takes longer than that of one; XLA's threads do not need it."""
    lowering, together = threading.Lock(), threading.Barrier(2, timeout=60)
    compiled, sizes = itertools.count(), []

    class Fake:
        """A program at each of its stages."""

        jaxpr = jax.make_jaxpr(lambda: 0)()

        def lower(self):
            assert lowering.acquire(blocking=False), "two at once"
            time.sleep(0.01)
            lowering.release()
            return self

        def compile(self, _):
            if next(compiled) < 2:
                together.wait()  # of the first two, for each other
            return self

        def memory_analysis(self):
            return None

    def trace(_, layout, caches):
        sizes.append(jax.tree.unflatten(layout.tree, layout.shapes).token_ids[0])
        return Fake()

    engine = Engine(model, CONFIG, num_pages=9, page=4, max_model_len=64, max_requests=8)
    monkeypatch.setattr(Step, "trace", trace)
    rungs = engine.warm_up()
    assert rungs == len(sizes) == len(engine.builder.rungs()) > 2
    engine = Engine(model, CONFIG, num_pages=9, page=4, max_model_len=64, max_requests=8)
    sizes.clear()
    engine.warm_up(threads=1)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_a_step_takes_no_memory_for_a_second_cache(model, tmp_path):
    """With all default programs made ahead of time and stored, as a server does."""
    engine = Engine(model, CONFIG, num_pages=2**17, page=64, max_model_len=128, programs=tmp_path)
    engine.warm_up()
    memory = engine.placement.device.memory_stats
    before = memory()["peak_bytes_in_use"]
    cache = engine.stats().cache_bytes
    engine.generate([[1, 2, 3]] * 3, wish(4))
    assert memory()["peak_bytes_in_use"] - before < cache / 2
