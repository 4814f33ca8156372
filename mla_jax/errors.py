"""Refusals: what was asked, what is allowed, and what would work.

Every error of the library is built from fields by one of these classes, so that a program
can read it and a test can match it. They derive from the built-in type a caller would expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ArgumentError",
    "ConfigError",
    "EngineError",
    "MetadataError",
    "PrefillBackendError",
    "UnsupportedError",
    "WeightsError",
]


@dataclass
class UnsupportedError(NotImplementedError):
    """No backend, or not the one asked for, can run this problem.

    ``dense_decode[mosaic]: page=16 not in {64, 128}. Would accept: xla.``
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
class _Refusal(ValueError):
    """What was given, what is allowed, what would work."""

    what: str
    given: object
    allowed: object
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: given {self.given}; allowed: {self.allowed}."
        return f"{text} {self.hint}".rstrip()


class ArgumentError(_Refusal):
    """Arguments of an operation that do not fit each other, or the cache."""


class MetadataError(_Refusal):
    """Host-side metadata that no bucket or builder can take."""


class ConfigError(_Refusal):
    """A model configuration that this library does not implement."""


class EngineError(_Refusal):
    """A request or engine setting that can never be served."""


@dataclass
class WeightsError(ValueError):
    """A checkpoint folder that does not hold the model: every problem at once."""

    folder: str
    problems: Sequence[str]

    def __str__(self) -> str:
        lines = "\n".join(f"  - {p}" for p in self.problems)
        return f"{self.folder}: {len(self.problems)} problem(s)\n{lines}"
