"""The import graph of the package, read from its source without running it."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mla_jax"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Module name relative to the package (``pallas/merge/ref``) → file; a package is its folder.

    The package itself is the empty name.
    """
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found["/".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _absolute(node: ast.ImportFrom, path: Path, package: Path) -> str:
    if node.level == 0:
        return node.module or ""
    folder = path.relative_to(package.parent).parent.parts
    base = folder[: len(folder) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def imported_names(path: Path, package: Path = PACKAGE) -> set[str]:
    """Dotted names that a file imports anywhere, also by ``importlib.import_module("name")``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom():
                base = _absolute(node, path, package)
                names.update(f"{base}.{alias.name}" for alias in node.names)
                names.add(base)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]
            ):
                names.add(name)
    return names


def hidden_imports(path: Path) -> list[str]:
    """Import statements that are not at the top of a file: those inside functions and classes."""
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sorted(
        {
            ast.unparse(node)
            for outer in ast.walk(ast.parse(path.read_text()))
            if isinstance(outer, inside)
            for node in ast.walk(outer)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
    )


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module → modules of the package that it imports; parents of an import do not count."""
    known = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = {
            dotted.removeprefix(package.name).strip(".").replace(".", "/")
            for dotted in imported_names(path, package)
            if dotted.split(".")[0] == package.name
        }
        inner = {t for t in targets & set(known) if t}
        parents = {t for t in inner if any(o.startswith(t + "/") for o in inner)}
        edges[name] = inner - parents - {name}
    return edges


def third_party(path: Path, package: Path = PACKAGE) -> set[str]:
    """Top-level names of imported packages that are neither ours nor the standard library's."""
    roots = {name.split(".")[0] for name in imported_names(path, package)}
    return roots - set(sys.stdlib_module_names) - {package.name}


def ranks(text: str) -> dict[str, int]:
    """``{"errors": 0, "pallas/*": 2, …}`` from the Markdown table of docs/architecture.md."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, flags=re.MULTILINE)
    return {name: int(rank) for rank, cell in rows for name in re.findall(r"`([\w/*]+)`", cell)}


def room(name: str, table: dict[str, int]) -> str | None:
    """The entry of the rank table that a module falls under."""
    folder = name.split("/")[0] + "/*"
    return next((entry for entry in (name, folder) if entry in table), None)


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Every strongly connected set of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found
