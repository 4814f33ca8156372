"""Committed documents that are printed from data."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
_spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert _spec and _spec.loader
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_committed_text_is_the_generated_one(name):
    assert (DOCS / name).read_text() == generate.PAGES[name](), "run: python docs/generate.py"
