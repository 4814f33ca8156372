"""The house rules that imports and functions must keep, read from the source and from
docs/architecture.md.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mla_jax.dispatch import REGISTRY
from tests import imports

TABLE = imports.ranks((imports.ROOT / "docs" / "architecture.md").read_text())
MODULES = imports.modules()
GRAPH = imports.graph()

PYPROJECT = tomllib.loads((imports.ROOT / "pyproject.toml").read_text())["project"]
CORE = {Requirement(line).name for line in PYPROJECT["dependencies"]}
OPTIONAL = {  # package → the only modules that may import it
    "huggingface_hub": {"hub"},
    "jinja2": {"chat_sandbox"},
    "rich": {"cli", "commands/show"},
    "tokenizers": {"tokenizer"},
    "torch": {"commands/transformers_trace"},
    "transformers": {"commands/transformers_trace"},
    "triton": {"pallas/triton_lib"},
    "typer": {"cli", "commands/options"},
}

PRIVATE = {"pallas/mosaic_inline", "pallas/triton_lib"}
"""Modules that import ``jax._src``."""


def rank_violations(edges: dict[str, set[str]], table: dict[str, int]) -> list[str]:
    """Imports of a higher rank, and imports between rooms that are strangers."""
    broken = []
    for name, targets in edges.items():
        here = imports.room(name, table)
        for target in targets:
            there = imports.room(target, table)
            if here is None or there is None:
                continue
            strangers = {here, there} == {"pallas/*", "metadata/*"}
            if table[there] > table[here] or strangers:
                broken.append(f"{name} ({here}) imports {target} ({there})")
    return sorted(broken)


def test_the_table_was_read():
    assert len(TABLE) >= 12
    assert TABLE["errors"] == 0
    assert TABLE["pallas/*"] == TABLE["metadata/*"] == 2


def test_every_module_has_a_rank():
    homeless = [name for name in MODULES if name and imports.room(name, TABLE) is None]
    assert not homeless, f"add to docs/architecture.md: {homeless}"


def test_lower_ranks_never_import_higher_ones():
    assert not rank_violations(GRAPH, TABLE)


def test_no_import_cycles():
    assert not imports.cycles(GRAPH)


def test_nobody_imports_the_front_door():
    """Modules import where a name lives, not the package that re-exports it."""
    tops = {f"mla_jax.{name.split('/')[0]}" for name in MODULES}
    guests = {
        (name, dotted)
        for name, path in MODULES.items()
        for dotted in imports.imported_names(path)
        if dotted.startswith("mla_jax.") and ".".join(dotted.split(".")[:2]) not in tops
    }
    assert not guests


@pytest.mark.parametrize("name", [m for m in MODULES if m.endswith("/ref")])
def test_references_import_no_kernel(name):
    kernels = [t for t in GRAPH[name] if t.split("/")[-1].startswith(("mosaic", "triton"))]
    assert not kernels


@pytest.mark.parametrize("name", MODULES)
def test_optional_packages_stay_in_their_files(name):
    for package in imports.third_party(MODULES[name]) - CORE:
        assert name in OPTIONAL.get(package, ()), f"{name} must not import {package}"


@pytest.mark.parametrize("name", MODULES)
def test_imports_stand_at_the_top(name):
    assert not imports.hidden_imports(MODULES[name])


LATE = re.compile(r"pallas/(\w+/)?(mosaic|triton|mosaic_\w+|triton_\w+|\w+_sm90|\w+_triton)$")
"""Modules of kernels: Mosaic GPU takes more than a second to import, Triton need not be there."""


@pytest.mark.parametrize("name", MODULES)
def test_kernels_are_imported_by_kernels_alone(name):
    """And by the registry, when a backend is chosen: it has their names as texts."""
    if not LATE.search(name):
        assert not {t for t in GRAPH[name] if LATE.search(t)} - WITHOUT_KERNEL


WITHOUT_KERNEL = {"pallas/dense_decode/sizes_sm90", "pallas/sparse_attention/rows_sm90"}


@pytest.mark.parametrize("entry", REGISTRY.backends, ids=lambda b: f"{b.op}-{b.name}")
def test_backends_name_a_function_of_their_operations_folder(entry):
    if isinstance(entry.function, str):
        module, _, function = entry.function.partition(":")
        path = MODULES[module.removeprefix("mla_jax.").replace(".", "/")]
        assert path.stem == entry.name
        defined = {n.name for n in ast.parse(path.read_text()).body if hasattr(n, "name")}
        assert {function} | ({"Tuning", "tune"} if entry.tunable else set()) <= defined


def test_one_module_imports_private_parts_of_jax():
    private = {
        name
        for name, path in MODULES.items()
        if any(n.startswith("jax._src") for n in imports.imported_names(path))
    }
    assert private == PRIVATE


def test_every_dependency_is_imported():
    """And by the test above every import is a dependency, or an option in its own file."""
    unused = CORE.difference(*map(imports.third_party, MODULES.values()))
    assert not unused, f"nothing imports {unused}"


@pytest.mark.parametrize(
    ("version", "accepted"), [("3.6.0", True), ("3.7.1", True), ("3.5.1", False)]
)
def test_the_triton_extra_is_triton_3_6_or_newer(version, accepted):
    (line,) = PYPROJECT["optional-dependencies"]["triton"]
    assert (version in Requirement(line).specifier) == accepted


@pytest.mark.parametrize("name", MODULES)
def test_annotations_are_evaluated(name):
    """A postponed annotation would hide dataclass fields from the shape checker."""
    assert "__future__" not in {n.split(".")[0] for n in imports.imported_names(MODULES[name])}


REFERENCE, KERNEL, PARAMETERS = 25, 150, 14
"""Lines of a function of a ``ref.py`` and of any other under ``pallas``, and parameters of any
function of the package, at most. Signature and docstring count, decorators do not."""


def oversized(name: str, source: str) -> dict[str, set[str]]:
    """Functions of a module that break a rule: ``{"length": ..., "parameters": ...}``."""
    found: dict[str, set[str]] = {"length": set(), "parameters": set()}
    limit = REFERENCE if name.endswith("/ref.py") else KERNEL
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        args = node.args
        named = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
        if named + bool(args.vararg) + bool(args.kwarg) > PARAMETERS:
            found["parameters"].add(f"{name} {node.name}")
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if name.startswith("pallas/") and lines > limit:
            found["length"].add(f"{name} {node.name}")
    return found


SIZES = {
    str(path.relative_to(imports.PACKAGE)): oversized(
        str(path.relative_to(imports.PACKAGE)), path.read_text()
    )
    for path in MODULES.values()
}


def test_references_and_kernels_are_short():
    long = {f for found in SIZES.values() for f in found["length"]}
    limits = f"more than {REFERENCE} lines (ref.py) or {KERNEL}"
    assert not long, f"{limits}: {sorted(long)}"


def test_parameter_lists_are_short():
    long = {f for found in SIZES.values() for f in found["parameters"]}
    assert not long, f"more than {PARAMETERS} parameters: {sorted(long)}"


def test_the_rules_of_size_can_fail():
    kernel = "def f(a):\n" + "    a += 1\n" * 150
    assert oversized("pallas/x/kernel.py", kernel)["length"] == {"pallas/x/kernel.py f"}
    assert not oversized("model/x.py", kernel)["length"]
    assert oversized("pallas/x/ref.py", "def f(a):\n" + "    a += 1\n" * 25)["length"]
    many = ", ".join(f"a{i}" for i in range(12))
    assert oversized("x.py", f"def f({many}, *b, c, **d): ...")["parameters"] == {"x.py f"}
    assert not oversized("x.py", f"def f({many}, *b, **d): ...")["parameters"]


def _package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "toy"
    for name, source in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_the_rules_can_fail(tmp_path):
    package = _package(
        tmp_path,
        {
            "errors.py": "def f():\n    from toy.cache import x\n    import torch, json",
            "cache.py": "from . import errors",
            "pallas/merge.py": "from ..metadata import plan",
            "metadata/plan.py": "import jax.numpy as jnp, torch",
        },
    )
    edges = imports.graph(package)
    assert rank_violations(edges, TABLE) == [
        "errors (errors) imports cache (cache)",
        "pallas/merge (pallas/*) imports metadata/plan (metadata/*)",
    ]
    assert imports.cycles(edges) == [["cache", "errors"]]
    hidden = ["from toy.cache import x", "import torch, json"]
    assert imports.hidden_imports(package / "errors.py") == hidden
    assert imports.third_party(package / "metadata/plan.py", package) == {"jax", "torch"}
