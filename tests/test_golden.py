"""Our API on golden vectors: all of them hold, refusals refuse, and spoiled ones are noticed."""

import base64
import copy
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.golden.common import load
from tests.golden_adapter import CHECKS, check

HERE = Path(__file__).parent / "data" / "goldens"
FULL = Path(__file__).parent.parent.parent / "shared" / "goldens"
SUITE = {path.name.split(".")[0]: path for path in sorted(HERE.glob("*.json*"))}


@pytest.mark.slow
@pytest.mark.parametrize("stem", SUITE)
def test_cases_hold(stem):
    cases = load(SUITE[stem])
    assert cases
    found = [f for case in cases if (f := check(stem, case))]
    assert not found, "\n".join(found)


def test_every_check_has_vectors():
    assert set(SUITE) == set(CHECKS)


def test_an_unknown_stem_is_named():
    assert "no check for golden stem 'nothing'" in (check("nothing", {}) or "")


def _spoil(value) -> object:
    """Another value of the same kind; arrays change in their last element."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return "another"
        case None:
            return 1
        case {"dtype": _, "b64": text}:
            raw = bytearray(base64.b64decode(text))
            raw[-1] ^= 0x10
            return value | {"b64": base64.b64encode(bytes(raw)).decode()}
        case {"dtype": _, "data": [*data]}:
            return value | {"data": [*data[:-1], _spoil(data[-1])]}
        case [*items]:
            return [*items[:-1], _spoil(items[-1])]
    raise TypeError(type(value))


def _empty(value) -> bool:
    return value == [] or (isinstance(value, dict) and 0 in value.get("shape", ()))


def _spoiled(out) -> Iterator[tuple[str, object]]:
    """``(entry, out with that entry spoiled)`` for every entry, at any depth."""
    if isinstance(out, dict) and "shape" not in out and "raises" not in out:
        for key, value in out.items():
            for where, bad in _spoiled(value):
                yield f".{key}{where}", out | {key: bad}
    elif isinstance(out, list) and out and isinstance(out[-1], dict):
        for where, bad in _spoiled(out[-1]):
            yield f"[-1]{where}", [*out[:-1], bad]
    elif isinstance(out, dict) and "raises" in out:
        yield "", {"no": "refusal"}
    elif not _empty(out):
        yield "", _spoil(out)


def _representatives(cases: list[dict]) -> list[dict]:
    """The first case of each revision and set of entries, refusals included."""
    kinds = {}
    for case in cases:
        out = case["out"]
        entries = tuple(sorted(out)) if isinstance(out, dict) else type(out).__name__
        kinds.setdefault((case["rev"], entries), case)
    return list(kinds.values())


@pytest.mark.parametrize("stem", SUITE)
def test_spoiled_vectors_are_noticed(stem):
    unnoticed = []
    for case in _representatives(load(SUITE[stem])):
        for where, bad in _spoiled(case["out"]):
            spoiled = copy.deepcopy(case) | {"out": bad}
            if check(stem, spoiled) is None:
                unnoticed.append(f"{case['name']}: out{where}")
    assert not unnoticed


def test_a_refusal_where_a_result_is_due_is_noticed():
    case = load(SUITE["advance_step"])[0] | {"out": {"raises": "AssertionError"}}
    assert "expected a refusal" in (check("advance_step", case) or "")


@pytest.mark.slow
@pytest.mark.skipif(not FULL.is_dir(), reason="the full golden files are not beside the checkout")
@pytest.mark.skipif("GOLDEN_FULL" not in os.environ, reason="set GOLDEN_FULL=1: takes minutes")
@pytest.mark.parametrize("stem", CHECKS)
def test_full_files_hold(stem):
    path = next(FULL.glob(f"{stem}.json*"), None)
    if path is None:
        pytest.skip(f"{stem} is not among the full golden files")
    found = [f for case in load(path) if (f := check(stem, case))]
    assert not found, "\n".join(found)


def test_arrays_compare_exactly_and_by_kind():
    from tests.golden.common import compare

    assert compare({"a": np.array([1, 2])}, {"a": np.array([1, 2], np.int32)}) is None
    assert "dtype" not in (compare({"a": [1, 2]}, {"a": [1, 3]}) or "dtype")
    assert compare({"a": np.array([True])}, {"a": np.array([1])}) is not None
    assert compare({"a": np.array([1.0, np.nan])}, {"a": np.array([1.0, np.nan])}) is None
    assert compare({"a": np.array([1.0, np.inf])}, {"a": np.array([1.0, -np.inf])}) is not None
    assert compare({"a": np.array([1.0])}, {"a": np.array([1.1])}, rtol=0.2) is None
    assert "no such entry" in (compare({"a": 1}, {}) or "")
