"""Jinja as transformers sets it up for chat templates; the one module that imports jinja2."""

import json
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["compiled"]


class _Generation(Extension):
    """``{% generation %}`` marks what the model says, for training; it prints its inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside).set_lineno(line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)


@cache
def compiled(source: str) -> Template:
    """A template in a sandbox, with what transformers adds to the language."""
    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    room.filters["tojson"] = _to_json
    room.globals["raise_exception"] = _refuse
    room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return room.from_string(source)
