"""Every refusal has one base class, is exported, and stays short whatever was given."""

import inspect
import pickle

import pytest

import mla_jax
from mla_jax import errors
from mla_jax.errors import ConfigError, EngineError, MLAError, WeightsError, listed, shown

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


def deep(n: int = 100_000) -> list:
    nested: list = []
    for _ in range(n):
        nested = [nested]
    return nested


@pytest.mark.parametrize("kind", [c for c in CLASSES if not c.__name__.startswith("_")])
def test_every_error_has_the_one_base_and_is_exported(kind):
    assert issubclass(kind, MLAError)
    assert kind is MLAError or issubclass(kind, ValueError | NotImplementedError)
    assert getattr(mla_jax, kind.__name__) is kind
    assert kind.__name__ in mla_jax.__all__


def test_short_values_are_shown_whole():
    error = EngineError("page", 0, "1 or more", "Use 64.")
    assert str(error) == "page: given 0; allowed: 1 or more. Use 64."
    assert str(EngineError("page", 0, "1 or more")) == "page: given 0; allowed: 1 or more."


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("a" * 5_000_000, "(5,000,000 characters)"),
        ([7] * 1_000_000, "(3,000,000 characters)"),
        (10**5000, "int of 16610 bits"),
        (deep(), "list"),
    ],
    ids=["text", "list", "integer", "nested"],
)
def test_long_values_are_cut(value, part):
    assert part in shown(value)
    message = str(ConfigError("key " + "k" * 10_000, value, "less", "Do this."))
    assert len(message) < 1000
    assert part in message
    assert message.endswith("allowed: less. Do this.")


def test_a_list_of_problems_shows_ten_and_counts_the_rest():
    problems = [f"unexpected: stray.{i} [2]" for i in range(300_000)]
    problems[3] = "unexpected: " + "x" * 100_000
    error = WeightsError("folder", problems)
    text = str(error)
    assert text.startswith("folder: 300,000 problem(s)\n  - unexpected: stray.0 [2]\n")
    assert "stray.9" in text
    assert "stray.10 " not in text
    assert text.endswith("and 299,990 more, all in `problems` of this error")
    assert len(text) < 2000
    assert error.problems[299_999] == "unexpected: stray.299999 [2]"
    assert "more" not in str(WeightsError("folder", problems[:10]))
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(12)).endswith("8, 9 and 2 more")


def test_errors_survive_a_process_boundary():
    error = pickle.loads(pickle.dumps(EngineError("page", 0, "1 or more")))
    assert str(error) == "page: given 0; allowed: 1 or more."
