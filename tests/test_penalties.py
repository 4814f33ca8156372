"""Penalties, bias, min-p and likeliest tokens in the engine, against a definition in numpy.

The definition has a request's raw logits and its tokens, and knows nothing of steps, chunks,
evictions or rows.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import EngineError
from mla_jax.history_rows import HistoryRows
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import Step
from tests import traffic

VOCAB = traffic.CONFIG.vocab


def changed(logits, prompt, drawn, params: SamplingParams) -> np.ndarray:
    """Bias, then repetition (prompt and answer), then frequency and presence (answer)."""
    x = np.array(logits, np.float32)
    for token, value in params.logit_bias:
        x[token] += np.float32(value)
    for token in {*prompt, *drawn}:
        by = np.float32(params.repetition_penalty)
        x[token] = x[token] / by if x[token] > 0 else x[token] * by
    for token in set(drawn):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(drawn.count(token))
        x[token] -= np.float32(params.presence_penalty)
    return x


def choice(x: np.ndarray, params: SamplingParams, position: int) -> int:
    """Greedy, or temperature, top-k, top-p, min-p, and Gumbel-max."""
    if params.temperature == 0:
        return int(np.argmax(x))
    order = np.argsort(-x, kind="stable")
    z = ((x - x.max()) / np.float32(params.temperature))[order]
    kept = np.arange(len(z)) < (params.top_k or len(z))
    p = np.where(kept, np.exp(z.astype(np.float64)), 0)
    before = np.cumsum(p / p.sum()) - p / p.sum()
    kept &= (params.top_p >= 1) | (before < params.top_p)
    kept &= np.exp(z) >= params.min_p
    key = jax.random.fold_in(jax.random.key(np.uint32(params.seed)), position)
    noise = np.asarray(jax.random.gumbel(key, x.shape, jnp.float32))[order]
    return int(order[np.argmax(np.where(kept, z + noise, -np.inf))])


def check(completion, params: SamplingParams) -> None:
    """Every token, its log-probability and the likeliest, from the raw logits."""
    prompt, tokens = completion.prompt_ids, completion.token_ids
    assert len(completion.top_logprobs) == (len(tokens) if params.logprobs else 0)
    for i, raw in enumerate(completion.logits):
        x = changed(raw, prompt, tokens[:i], params)
        assert tokens[i] == choice(x, params, len(prompt) + i)
        model = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        np.testing.assert_allclose(completion.logprobs[i], model[tokens[i]], atol=2e-5)
        if params.logprobs:
            best = np.argsort(-raw, kind="stable")[: params.logprobs]
            ids, logprobs = zip(*completion.top_logprobs[i], strict=True)
            assert list(ids) == best.tolist()
            np.testing.assert_allclose(logprobs, model[best], atol=2e-5)


FULL = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.9,
    "logit_bias": {3: 4.0, 11: -100.0, 60: 2.5},
    "logprobs": 4,
}
WARM = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
PARAMS = [
    SamplingParams(max_new_tokens=20, ignore_eos=True, seed=i, **more)
    for i, more in enumerate(
        [
            FULL,
            {},
            FULL | WARM,
            {"repetition_penalty": 0.7},
            WARM | {"frequency_penalty": -1.5},
            {"presence_penalty": 2.0},
            {"logit_bias": {7: 100.0}},
            WARM | {"logprobs": 20},
        ]
    )
]
PROMPTS = [
    np.random.default_rng(i).integers(1, VOCAB, size).tolist()
    for i, size in enumerate((9, 3, 17, 1, 5, 26, 2, 12))
]


@pytest.fixture(scope="module")
def model():
    return traffic.model()


@pytest.fixture(scope="module")
def first(model):
    return traffic.engine(model, want_logits=True)


@pytest.fixture(scope="module")
def make(first, model):
    """Engines that share their programs."""

    def make(**more):
        return traffic.sharing(first, model, want_logits=True, **more)

    return make


@pytest.fixture(scope="module")
def alone(make):
    engine = make(max_requests=1)
    return [engine.generate([p], w)[0] for p, w in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.slow
def test_tokens_are_those_of_the_definition(alone):
    for completion, params in zip(alone, PARAMS, strict=True):
        check(completion, params)
    assert len(set(alone[6].token_ids)) == 1  # a bias of 100 decides
    assert len(set(alone[5].token_ids)) > len(set(alone[1].token_ids))  # a penalty does something


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("chunk", [16, 5])
def test_company_chunks_and_running_ahead_change_nothing(make, alone, ahead, chunk):
    engine = make(run_ahead=ahead, prefill_chunk=chunk)
    got = engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in got] == [c.token_ids for c in alone]
    for completion, params in zip(got, PARAMS, strict=True):
        check(completion, params)


@pytest.mark.parametrize("ahead", [True, False])
def test_evictions_and_cancellations_change_nothing(make, alone, ahead):
    """Rows go from hand to hand: evicted requests are counted again from their first token."""
    engine = make(run_ahead=ahead)
    pool = engine.scheduler.groups[0].pool
    pool.alloc(pool.free - 16)
    rng, left, done, asked = random.Random(0), [*range(len(PROMPTS))] * 3, {}, {}
    cancelled = set()
    while left or engine.stats().live:
        if left and rng.random() < 0.7:
            n = left.pop()
            asked[engine.add(PROMPTS[n], PARAMS[n])] = n
        live = sorted(asked.keys() - done.keys())
        if live and rng.random() < 0.05 and engine.cancel(one := rng.choice(live)):
            cancelled.add(one)
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
    done |= {e.id: e.completion for e in engine.step()}
    assert engine.stats().preemptions > 5 and len(cancelled) > 1
    for id, n in asked.items():
        check(done[id], PARAMS[n])
        if id not in cancelled:
            assert done[id].token_ids == alone[n].token_ids


def test_an_interruption_is_mended(make, alone, monkeypatch):
    """The history that a failed step took is gone; it is counted again."""
    engine = make()
    ids = [engine.add(p, w) for p, w in zip(PROMPTS, PARAMS, strict=True)]
    done, run, count = {}, Step.run, 0

    def fail(*args, **kwargs):
        nonlocal count
        count += 1
        out = run(*args, **kwargs)
        if count in (4, 9):
            for leaf in jax.tree.leaves(engine._history.now):  # as after a program that failed
                leaf.delete()
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(Step, "run", fail)
    while engine.stats().live:
        try:
            events = engine.step()
        except KeyboardInterrupt:
            events = engine.step()
        done |= {e.id: e.completion for e in events if e.completion is not None}
    assert engine.stats().recoveries == 2
    assert [done[id].token_ids for id in ids] == [c.token_ids for c in alone]


def test_no_program_is_added_and_none_compiled_after_warm_up(make):
    engine = make()
    assert engine.warm_up() == len(engine.builder.rungs()) == engine.stats().compiles == 3
    compiled = traffic.Compilations()
    engine.generate(PROMPTS, PARAMS)
    assert (compiled.count, engine.stats().compiles) == (0, len(engine.builder.rungs()))


def test_a_bias_for_a_token_that_is_none_is_refused(make):
    engine = make()
    with pytest.raises(EngineError, match="logit_bias: given 64; allowed: tokens below 64"):
        engine.add([1], SamplingParams(logit_bias={64: 1.0}))
    assert engine.stats().live == 0


def test_rows_are_lent_again_when_nobody_runs_with_them():
    rows: HistoryRows[str] = HistoryRows(2)
    assert {rows.of("a", ["a"]), rows.of("b", ["a", "b"])} == {0, 1}
    kept = rows.of("b", ["b"])
    assert rows.of("c", ["b", "c"]) == 1 - kept
    assert rows.of("b", ["b", "c"]) == kept


def test_the_definition_can_fail(alone):
    other = dataclasses.replace(PARAMS[0], frequency_penalty=0.0)
    with pytest.raises(AssertionError):
        check(alone[0], other)
