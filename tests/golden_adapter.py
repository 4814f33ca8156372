"""``check(stem, case)``: run our API on one golden vector and say what differs, if anything."""

import importlib
import pkgutil

import tests.golden
from tests.golden.common import Case, Check, decode


def _collect() -> dict[str, Check]:
    """All ``CHECKS`` of the modules in ``tests/golden``; a stem belongs to one module."""
    checks: dict[str, Check] = {}
    for info in pkgutil.iter_modules(tests.golden.__path__):
        module = importlib.import_module(f"{tests.golden.__name__}.{info.name}")
        for stem, check_case in getattr(module, "CHECKS", {}).items():
            if stem in checks:
                raise ValueError(
                    f"golden stem {stem!r} has two checks; the second is in {info.name}"
                )
            checks[stem] = check_case
    return checks


CHECKS = _collect()


def check(stem: str, case: Case) -> str | None:
    """None when our API gives what ``case`` expects, else the first difference.

    ``case`` is one entry of a golden file as read from JSON (arrays not decoded), ``stem`` the
    name of that file without its suffix.
    """
    if stem not in CHECKS:
        return f"no check for golden stem {stem!r}; there are: {', '.join(sorted(CHECKS))}"
    name = case.get("name", "?")
    try:
        found = CHECKS[stem](decode(case))
    except Exception as error:  # a crash of our API is a difference, with its case named
        found = f"{type(error).__name__}: {error}"
    return f"{stem}/{name}: {found}" if found else None
