"""The pages have the figures of the committed results; a trace of served steps is counted right."""

import pytest

from benchmarks import table


def test_the_page_is_up_to_date():
    assert table.PAGE.read_text() == table.page(), "run `python -m benchmarks.table`"


def test_the_figures_of_starting_are_the_newest():
    assert table.STARTING.read_text() == table.starting(), "run `python -m benchmarks.table`"


def test_smaller_steps_behind_the_traced_ones_do_not_count():
    """A trace goes on until all requests have ended, and steps of fewer requests are shorter."""
    serve = pytest.importorskip("benchmarks.serve")
    events = []
    for step in range(serve.TRACED + 4):
        us = 40 if step <= serve.TRACED else 1
        layers = [{"name": serve.ROUTER, "ts": 100 * step + 50 * k, "dur": us} for k in range(2)]
        events += layers
    found = serve._breakdown(events, 100.0, sparse=2)
    assert found["busy_percent"] == 80 and found["kernels"] == {serve.ROUTER: 80}
    assert serve._breakdown(events[:1], 100.0, sparse=2) == {}
