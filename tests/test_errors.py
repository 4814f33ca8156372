"""Every refusal has one base class, is exported, and stays short whatever was given."""

import ast
import inspect
import pickle
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import mla_jax
from mla_jax import errors, ops
from mla_jax.demo_task import encode
from mla_jax.errors import ConfigError, EngineError, MLAError, WeightsError, listed, shown
from mla_jax.metadata.check import check
from mla_jax.model.deepseek_v32 import DeepseekV32, SparseMLA
from mla_jax.model.family import Serving, family_of
from mla_jax.model.moe import MoE
from mla_jax.pallas.registry import Registry
from tests import imports
from tests.model import sparse, tiny

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


RAISED = {c.__name__ for c in CLASSES} | {
    "AttributeError",  # of the package's own ``__getattr__``, as Python asks for
    "SystemExit",  # of commands, without the packages they print with
    "OSError",  # of files, as the system says it; readers of checkpoints turn it into theirs
}
INTERNAL = {
    # Contracts between modules, which no caller's input can break.
    "metadata/buckets": "raise AssertionError",
    "pages": "the scheduler asks what is free before it takes pages",
    "pallas/cache_io/row_layout": "what a record format of ours says",
    "pallas/dense_prefill/steps_sm90": "a layout that is written out twice",
    "pallas/indexer/paged_sm90": "what the backend requires",
    "pallas/indexer/scores_sm90": "a layout written out twice, and what the backend requires",
    "pallas/topk/select_sm90": "the wrapper rounds columns up and chooses a shape that holds them",
    "pallas/triton_lib": "what the compiler said of a kernel",
    "request_queue": "the scheduler knows which requests wait",
}
CAUGHT = {
    "chat_sandbox",
    "metadata/compat/prefill_selection",
    "model/safetensors_io",
    "tokenizer",
}
"""Raise another error inside of a block that turns it into the library's own."""


def _raised(path: Path) -> set[str]:
    nodes = [n.exc for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise)]
    found = (n.func if isinstance(n, ast.Call) else n for n in nodes if n is not None)
    return {n.id for n in found if isinstance(n, ast.Name) and n.id[0].isupper()}


@pytest.mark.parametrize("name", imports.modules())
def test_whatever_is_raised_is_an_error_of_the_library(name):
    stray = _raised(imports.modules()[name]) - RAISED
    if name in CAUGHT:
        stray -= {"ValueError", "ImportError", "TemplateError"}
    if name in INTERNAL:
        stray -= {"AssertionError", "IndexError"}
    assert not stray


def _narrows(test: ast.expr) -> bool:
    """``x is not None`` or ``isinstance(x, K)``, or several: what a type checker cannot know."""
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot)
    return isinstance(test, ast.Call) and getattr(test.func, "id", "") == "isinstance"


@pytest.mark.parametrize("name", imports.modules())
def test_assertions_only_narrow_types(name):
    """``python -O`` drops them, so none may judge what a caller gave."""
    tree = ast.parse(imports.modules()[name].read_text())
    judges = [
        n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert) and not _narrows(n.test)
    ]
    assert name in INTERNAL or not judges


NO_INDEXER = tiny.config(family="deepseek_v32")
FACTS = {"dtype": jnp.dtype("float32"), "rngs": nnx.Rngs(0)}
ANGLES = jnp.ones((2, 2)), jnp.zeros((2, 2))
SHARED = SparseMLA(sparse.config("glm_moe_dsa"), selects=False, **FACTS)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeepseekV32(NO_INDEXER, **FACTS), "indexer of family deepseek_v32: given None"),
        (lambda: family_of("deepseek_v32").groups(NO_INDEXER, Serving.of(NO_INDEXER)), "indexer"),
        (lambda: MoE(tiny.config(None, sparse_layers=(False,) * 3), **FACTS), "MoE: config.moe"),
        (lambda: Registry(ops.REGISTRY.backends * 2), "Registry: backends given twice: given"),
        (lambda: check({}), "check: object: given dict; allowed: one of"),
        (lambda: encode("Ä"), "demo: characters: given ['Ä']; allowed: those of"),
        (lambda: SHARED.whole(jnp.zeros((2, 32)), None), "SparseMLA.whole: selected: given None"),
        (lambda: SHARED.scores(jnp.zeros((2, 32)), ANGLES), "SparseMLA.scores: layer: given no"),
    ],
)
def test_what_used_to_be_an_assertion_is_a_refusal(make, text):
    with pytest.raises(MLAError) as refusal:
        make()
    assert text in str(refusal.value)
    assert "; allowed: " in str(refusal.value)
