"""docs/performance.md and docs/starting.md have the figures of the committed results."""

from benchmarks import table


def test_the_page_is_up_to_date():
    assert table.PAGE.read_text() == table.page(), "run `python -m benchmarks.table`"


def test_the_figures_of_starting_are_the_newest():
    assert table.STARTING.read_text() == table.starting(), "run `python -m benchmarks.table`"
