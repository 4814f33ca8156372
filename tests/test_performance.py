"""docs/performance.md is the table of the committed results."""

from benchmarks import table


def test_the_page_is_up_to_date():
    assert table.PAGE.read_text() == table.page(), "run `python -m benchmarks.table`"
