"""The list of seeded faults is true, and the command that applies them can say no."""

import ast
import collections
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests import imports
from tools import faults

FAULTS = faults.faults()
AT_LEAST = dict.fromkeys(faults.KERNELS, 8) | dict.fromkeys(faults.BUILDERS, 5)


def test_every_family_has_its_faults():
    counts = collections.Counter(f.family for f in FAULTS)
    assert set(counts) == set(AT_LEAST)
    assert not {name: n for name, n in counts.items() if n < AT_LEAST[name]}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_applies(fault):
    """Its text is in its file once; nothing is to be done where it stays the same."""
    assert faults.occurrences(fault) == 1, f"{fault.file} has changed: find the text anew"
    assert fault.text != fault.replacement


def test_every_fault_names_a_test_that_exists():
    defined = {}
    for name in {f.test.partition("::")[0] for f in FAULTS}:
        tree = ast.parse((imports.ROOT / name).read_text())
        defined[name] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    lost = [f for f in FAULTS if function(f.test) not in defined[f.test.partition("::")[0]]]
    assert not lost


def function(test: str) -> str:
    return re.fullmatch(r"[\w/]+\.py::(\w+)(\[.*\])?", test).group(1)


def test_every_fault_names_the_parameters_of_its_test():
    """Pytest finds it by them. Without Triton it cannot collect all files."""
    pytest.importorskip("triton", reason="Triton is not installed (extra parity)")
    files = sorted({f.test.partition("::")[0] for f in FAULTS})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--slow", "all", *files]
    given = faults.environment("cpu", "", imports.ROOT)
    found = subprocess.run(
        command, cwd=imports.ROOT, env=given, capture_output=True, text=True, check=False
    )
    ids = set(found.stdout.splitlines())
    whole = {line.partition("[")[0] for line in ids}
    assert not [f.test for f in FAULTS if f.test not in ids | whole], found.stdout[-2000:]


def test_interpreted_tests_are_marked():
    """Triton's interpreter has files of its own; Pallas' is asked for by the test."""
    for f in FAULTS:
        if f.test.partition("::")[0].endswith("_interpreted.py"):
            assert f.where == "interpreter", str(f)


@pytest.fixture
def toy(tmp_path):
    """A tree of one function and two tests, of which one looks."""
    (tmp_path / "twice.py").write_text("def double(x):\n    return x + x\n")
    (tmp_path / "test_twice.py").write_text(
        "from twice import double\n\n"
        "def test_looks():\n    assert double(2) == 4\n\n"
        "def test_looks_away():\n    assert double(1) == 2\n"
    )
    fault = faults.Fault(
        family="merge", name="x", file="twice.py", text="x + x", replacement="x + 1",
        test="test_twice.py::test_looks", where="cpu",
    )  # fmt: skip
    return tmp_path, fault


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "noticed"),
        ({"test": "test_twice.py::test_looks_away"}, "NOT NOTICED"),
        ({"test": "test_twice.py::test_of_another_name"}, "BROKEN TEST"),
        ({"text": "x * 2"}, "DOES NOT APPLY"),
        ({"text": "x"}, "DOES NOT APPLY"),
    ],
)
def test_verdicts(toy, change, verdict):
    root, fault = toy
    before = (root / "twice.py").read_text()
    found, _ = faults.judged(replace(fault, **change), root, intact=False)
    assert found == verdict
    assert (root / "twice.py").read_text() == before


@pytest.mark.parametrize(
    ("status", "text", "want"),
    [
        (0, "1 passed in 2s", "passed"),
        (1, "FAILED x\n1 failed in 2s", "failed"),
        (1, "ERROR x\n1 error in 2s", "failed"),
        (-11, "", "failed"),
        (0, "1 skipped in 2s", "skipped"),
        (1, "python: No module named pytest", "broken"),
        (4, "no tests ran in 2s\nERROR: not found", "broken"),
        (1, "1 failed, 2 passed in 3.21s\nE1125 CUDA_ERROR_MISALIGNED_ADDRESS", "failed"),
    ],
)
def test_outcomes(status, text, want):
    assert faults.outcome(status, text) == want


def test_without_its_fault_a_test_must_pass(toy):
    root, fault = toy
    assert faults.judged(fault, root, intact=True)[0] == "passes"
    (root / "twice.py").write_text("def double(x):\n    return x + 1\n")
    assert faults.judged(fault, root, intact=True)[0] == "BROKEN (failed)"


def test_the_copy_comes_before_other_packages(monkeypatch, tmp_path):
    """Relative entries of PYTHONPATH would be those of the intact tree."""
    monkeypatch.setenv("PYTHONPATH", f".:{tmp_path / 'site'}")
    for where in faults.WHERE:
        found = faults.environment(where, "tests/test_faults.py::test_outcomes", tmp_path)
        assert found["PYTHONPATH"] == f"{tmp_path}:{tmp_path / 'site'}"


def test_the_same_seed_draws_the_same_faults(capsys):
    drawn = []
    for seed in (1, 1, 2):
        assert faults.main(["--sample", "6", "--seed", str(seed), "--list"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert "6 faults" in drawn[0] and "gpu" not in drawn[0].split()


def test_a_file_of_another_family_is_refused(tmp_path):
    (tmp_path / "unknown.toml").write_text("[[fault]]\nname='a'\nfile='b'\ntext='c'\n"
                                           "replacement='d'\ntest='e'\nwhere='cpu'\n")  # fmt: skip
    with pytest.raises(ValueError, match="family of a fault: given unknown; allowed: dense_decode"):
        faults.faults(tmp_path)
