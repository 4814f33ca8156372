"""Pages of an engine that was not told how many: what fits beside the weights."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax import cache_sizes
from mla_jax.cache_sizes import page_counts, pages_that_fit, room_beside
from mla_jax.engine import Engine
from mla_jax.errors import EngineError
from mla_jax.model.family import Serving, family_of
from mla_jax.model.token_history import TokenHistory
from tests import traffic
from tests.model import sparse, tiny, v4

CONFIGS = {"v3": tiny.config(), "v32": sparse.config(), "v4": v4.config()}


class Device:
    """What a GPU says of its memory."""

    platform = "gpu"

    def __init__(self, limit: int | None, used: int = 0):
        self.stats = {} if limit is None else {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize("family", CONFIGS)
@settings(deadline=None)
@given(
    room=st.integers(0, 2**24),
    requests=st.integers(1, 9),
    length=st.integers(2, 128),
    page=st.sampled_from([4, 8, 64]),
)
def test_one_page_more_does_not_fit_or_is_not_needed(family, room, requests, length, page):
    config = CONFIGS[family]
    serving = Serving.of(
        config,
        page=page,
        max_requests=requests,
        max_model_len=length,
        cache_format="fp32",
        dtype="float32",
    )
    groups = family_of(config.family).groups(config, serving)

    def size(n: int) -> int:
        counts = page_counts(groups, n, serving)
        return sum(c * g.page_bytes for c, g in zip(counts, groups, strict=True))

    if size(2) > room:
        with pytest.raises(EngineError, match=f"allowed: {size(2):,} or more, for two pages"):
            pages_that_fit(groups, serving, room)
        return
    found = pages_that_fit(groups, serving, room)
    enough = 1 + requests * -(-length // groups[0].tokens)
    assert size(found) <= room
    assert found == enough or (found < enough and size(found + 1) > room)


def test_room_is_what_weights_and_others_leave():
    """In whole GiB, so that a few bytes more or less change no program."""
    gib = 2**30
    assert room_beside((), Device(100 * gib)) == 90 * gib
    assert room_beside((), Device(100 * gib, used=30 * gib + 5)) == 59 * gib
    assert room_beside((), Device(1000, used=100)) == 800
    assert room_beside((), Device(1000, used=100), later=30) == 770
    weights = jax.numpy.zeros((100,), jax.numpy.float32)
    assert room_beside((weights,), Device(1000, used=100)) == 500
    with pytest.raises(EngineError, match="num_pages: given None; allowed: a number, because"):
        room_beside((), Device(None))


def test_an_engine_makes_the_caches_that_fit(monkeypatch):
    """Where memory is plenty, enough for all requests; else fewer, and requests take turns."""
    settings = {"page": 8, "max_requests": 4, "prefill_chunk": 16, "max_model_len": 64}
    settings |= {"cache_format": "fp32", "ladder": traffic.LADDER}
    module = traffic.model()
    plenty = Engine(module, traffic.CONFIG, **settings)
    assert plenty.stats().pages == 4 * 8
    room = plenty.stats().cache_bytes * 20 // 33
    histories = 4 * TokenHistory.row_bytes(traffic.CONFIG.vocab)
    monkeypatch.setattr(cache_sizes, "_memory_of", lambda device: 4 * (room + histories))
    monkeypatch.setattr(cache_sizes, "bytes_of", lambda tree: 0)
    few = Engine(module, traffic.CONFIG, **settings)
    assert few.stats().pages == 19
    monkeypatch.setattr(cache_sizes, "_memory_of", lambda device: 4 * (2 + histories))
    with pytest.raises(EngineError, match="room for caches: given 2 bytes beside the weights"):
        Engine(module, traffic.CONFIG, **settings)
