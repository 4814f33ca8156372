"""Two rooms: the core that engine, operations and families reach, and what looks like vLLM."""

from tests import imports

GRAPH = imports.graph()
CORE = {m for m in GRAPH if m.startswith("metadata") and not m.startswith("metadata/compat")}
ROOTS = ("engine", "ops", "model/family")


def reached(graph: dict[str, set[str]], roots: tuple[str, ...]) -> set[str]:
    """Modules that the roots import, directly or not."""
    found, left = set(), [r for r in roots if r in graph]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += graph[module]
    return found


def test_the_core_is_small():
    assert "metadata/common" in CORE
    assert len(CORE) <= 16, sorted(CORE)  # the package itself is one of them


def test_the_core_never_imports_compat():
    importers = {m for m, targets in GRAPH.items() if any("metadata/compat" in t for t in targets)}
    assert not {m for m in importers if not m.startswith("metadata/compat")}


def test_every_module_of_the_core_is_reached():
    """A parent package is imported with each of its modules: it counts as reached."""
    assert CORE - {"metadata"} <= reached(GRAPH, ROOTS)


def test_the_walk_can_fail():
    graph = {"engine": {"a"}, "a": {"b"}, "b": {"a"}, "c": {"a"}}
    assert reached(graph, ("engine", "not there")) == {"engine", "a", "b"}
