"""Random mixes through one engine; ``python -m tools.traffic 10000`` for more than here."""

import dataclasses

import jax
import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import Ladder, MLALadder
from tests import traffic


@pytest.fixture(scope="module")
def model():
    return traffic.model()


@pytest.fixture(scope="module")
def engine(model):
    """All programs ready."""
    engine = traffic.engine(model)
    assert engine.warm_up() == len(engine.builder.rungs()) == engine.stats().compiles == 3
    return engine


@pytest.fixture(scope="module")
def single(engine, model):
    """Each request alone, its prompt in longer chunks than among others."""
    return traffic.alone(traffic.sharing(engine, model, max_requests=1))


@pytest.mark.slow
def test_500_random_mixes_equal_each_request_alone(engine, single):
    single(traffic.asks(1, seed=0)[0])
    compiled = traffic.Compilations()
    tally = traffic.run(engine, single, mixes=500, kinds=60)
    assert (tally.wrong, tally.lost_pages, compiled.count) == (0, 0, 0), tally
    assert tally.completed + tally.cancelled == tally.requests
    assert min(tally.preemptions, tally.cancelled) > 50, tally
    stats = engine.stats()
    assert stats.compiles == len(engine.builder.rungs())
    assert set(stats.buckets) == {d.bucket for d in engine.builder.rungs()}
    assert (stats.live, stats.pages_used, stats.recoveries) == (0, 0, 0)


def test_a_wrong_token_and_a_lost_page_are_found(engine, single):
    """The comparison can fail."""

    def wrong(ask):
        want = single(ask)
        return dataclasses.replace(want, token_ids=(*want.token_ids[:-1], -1))

    tally = traffic.run(engine, wrong, mixes=5, kinds=5, seed=1)
    assert tally.wrong >= tally.completed > 0
    pool = engine.scheduler.groups[0].pool
    release, lost = pool.release, []

    def lose(pages):
        pages = list(pages)
        first = [] if lost else pages[:1]
        lost.extend(first)
        release(pages[len(first) :])

    pool.release = lose
    try:
        tally = traffic.run(engine, single, mixes=1, kinds=5, seed=1)
    finally:
        del pool.release
    pool.release(lost)
    assert tally.lost_pages == 1


def test_a_compilation_is_heard_of():
    compiled = traffic.Compilations()
    jax.jit(lambda x: x + 1)(2.5).block_until_ready()
    assert compiled.count >= 1


def test_nobody_need_absorb(model, engine, single):
    """``shared/repro/absorb.py``: called or not, tokens are the same."""
    asked = traffic.asks(6, seed=2)
    want = [single(ask).token_ids for ask in asked]
    model.absorb()
    engine.take(model)
    assert [engine.generate([a.prompt], a.params)[0].token_ids for a in asked] == want


def test_a_ladder_smaller_than_the_settings_is_refused(model):
    """``shared/repro/ladder.py``: when the engine is made, before any request lives."""
    for part, size in (("decodes", 4), ("prefills", 2), ("prefill_tokens", 8), ("pages", 3)):
        small = dataclasses.replace(traffic.LADDER, **{part: Ladder(part, (size,))}, mixed=())
        with pytest.raises(MetadataError, match=f"number of {part}: given .*allowed: 0 to {size}"):
            traffic.engine(model, ladder=small)


def test_the_rest_of_a_chunk_behind_whole_prompts_counts(model):
    """Two prompts of 24 fill a chunk of 40: a ladder of 30 prompt tokens is refused."""
    sizes = {"max_requests": 2, "prefill_chunk": 40, "max_model_len": 24}
    parts = (("decodes", 2), ("prefills", 2), ("prefill_tokens", 30), ("pages", 6))
    ladder = MLALadder(**{p: Ladder(p, (n,)) for p, n in parts}, context_rows=24)
    with pytest.raises(MetadataError, match="number of prefill_tokens: given 40; allowed: 0 to 30"):
        traffic.engine(model, ladder=ladder, **sizes)


def test_a_chunk_longer_than_any_request_is_taken(model):
    assert traffic.engine(model, ladder=None, prefill_chunk=512, max_model_len=16).stats().pages
    assert traffic.engine(model, ladder=None, prefill_chunk=512, max_model_len=1).stats().pages
