"""Refusals: what was asked, what is allowed, and what would work.

Every error of the library is a ``MLAError``, built from fields by one of these classes, so that
a program can read it and a test can match it. They derive from the built-in type a caller would
expect too. A message is short whatever was given; the fields hold all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "ArgumentError",
    "ConfigError",
    "EngineError",
    "MLAError",
    "MetadataError",
    "PrefillBackendError",
    "UnsupportedError",
    "WeightsError",
    "described",
    "listed",
    "shown",
]

_LONGEST: Final = 300  # characters of one value in a message
_MOST: Final = 10  # entries of a list in a message


def shown(value: object) -> str:
    """``str(value)``, cut in the middle when it is long; also of what has no text in time."""
    try:
        text = str(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists in lists without end.
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"{type(value).__name__}{size}"
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} … {text[-half:]} ({len(text):,} characters)"


def described(value: object) -> str:
    """``'5' (str)``: a value as Python writes it, and its type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = shown(value)
    return f"{shown(text)} ({type(value).__name__})"


def listed(names: Sequence[object]) -> str:
    """The first ten names and how many more there are."""
    more = len(names) - _MOST
    return ", ".join(map(shown, names[:_MOST])) + (f" and {more:,} more" if more > 0 else "")


class MLAError(Exception):
    """The base class of every error of the library."""


@dataclass
class UnsupportedError(MLAError, NotImplementedError):
    """No backend, or not the one asked for, can run this problem.

    ``mla_decode[mosaic]: page=16 not in {64, 128}. Would accept: xla.``
    """

    op: str
    backend: str | None
    reasons: Sequence[str]
    would_accept: Sequence[str] = ()

    def __str__(self) -> str:
        name = f"{self.op}[{self.backend}]" if self.backend else self.op
        accept = ", ".join(self.would_accept) or "nothing here"
        return f"{name}: {'; '.join(self.reasons)}. Would accept: {accept}."


class PrefillBackendError(UnsupportedError, ValueError):
    """No prefill backend, or not the one asked for, serves a model on a device."""


@dataclass
class _Refusal(MLAError, ValueError):
    """What was given, what is allowed, what would work."""

    what: str
    given: object
    allowed: object
    hint: str = ""

    def __str__(self) -> str:
        what, given, allowed = map(shown, (self.what, self.given, self.allowed))
        return f"{what}: given {given}; allowed: {allowed}. {self.hint}".rstrip()


class ArgumentError(_Refusal):
    """Arguments of an operation that do not fit each other, or the cache."""


class MetadataError(_Refusal):
    """Host-side metadata that no bucket or builder can take."""


class ConfigError(_Refusal):
    """A model configuration that this library does not implement."""


class EngineError(_Refusal):
    """A request or engine setting that can never be served."""


@dataclass
class WeightsError(MLAError, ValueError):
    """A checkpoint folder that does not hold the model: every problem at once, ten in print."""

    folder: str
    problems: Sequence[str]

    def __str__(self) -> str:
        lines = [f"\n  - {shown(p)}" for p in self.problems[:_MOST]]
        more = len(self.problems) - _MOST
        lines += [f"\n  … and {more:,} more, all in `problems` of this error"] if more > 0 else []
        return f"{self.folder}: {len(self.problems):,} problem(s){''.join(lines)}"
