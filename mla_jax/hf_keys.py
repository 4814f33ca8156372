"""A reader of JSON objects that knows every key it was asked for and refuses the rest by name."""

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mla_jax.errors import ConfigError

__all__ = ["Keys", "load_json"]

_ABSENT: Final = object()


def load_json(path: Path) -> object:
    """The JSON value of a file; raises ConfigError naming file and problem."""
    try:
        return json.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(str(path), e.strerror or type(e).__name__, "a readable file") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(str(path), f"not JSON ({e})", "a JSON object") from None


class Keys:
    """Takes keys out of an object one by one; ``finish`` refuses what nobody took."""

    def __init__(self, data: object, where: str, prefix: str = ""):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: {prefix or 'top level'}", data, "a JSON object")
        self._data = dict(data)
        self._known: set[str] = set()
        self.where = where
        self._prefix = prefix

    def refusal(self, key: str, given: object, allowed: object, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.where}: {self._prefix}{key}", repr(given), allowed, hint)

    def take(self, *names: str, default: object = _ABSENT) -> Any:
        """The value under any of ``names``, which must agree where several are present."""
        self._known.update(names)
        given = {n: self._data.pop(n) for n in names if n in self._data}
        values = list(given.values())
        if any(v != values[0] for v in values[1:]):
            raise self.refusal(" and ".join(given), values, "equal values, or one of the keys")
        if values:
            return values[0]
        if default is _ABSENT:
            what = f"{self.where}: {self._prefix}{names[0]}"
            raise ConfigError(
                what, "nothing", "a value, it has no default", self._similar(names[0])
            )
        return default

    def integer(self, *names: str, default: object = _ABSENT, low: int = 1) -> int:
        value = self.take(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refusal(names[0], value, f"an integer >= {low}")
        return value

    def maybe_integer(self, *names: str, default: object = _ABSENT, low: int = 0) -> int | None:
        """An integer or null."""
        value = self.take(*names, default=default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refusal(names[0], value, f"an integer >= {low}, or null")
        return value

    def number(self, name: str, default: object = _ABSENT) -> float:
        """A finite number above zero."""
        value = self.take(name, default=default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and number > 0:
                return number
        raise self.refusal(name, value, "a finite number > 0")

    def maybe_number(self, name: str) -> float | None:
        """A finite number above zero; None when absent, null or 0."""
        value = self.take(name, default=None)
        if value is None or (value == 0 and value is not False):
            return None
        self._data[name] = value
        return self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default=default)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def only(self, name: str, allowed: Sequence[object], hint: str = "") -> None:
        """The key may be absent or null; otherwise it has one of these values."""
        value = self.take(name, default=None)
        if value is not None and not any(value == a for a in allowed):
            raise self.refusal(name, value, " or ".join(map(repr, allowed)), hint)

    def ignore(self, names: Collection[str]) -> None:
        """Keys whose value does not matter."""
        for name in names:
            self.take(name, default=None)

    def finish(self) -> None:
        """Raises ConfigError naming every key that nobody took, with the nearest known name."""
        if not self._data:
            return
        unknown = sorted(self._data)
        names = ", ".join(f"{self._prefix}{k}" for k in unknown)
        hint = " ".join(f"{k}: {self._near(k)}" for k in unknown)
        allowed = "keys whose meaning this library knows"
        raise ConfigError(f"{self.where}: unknown key {names}", self._data, allowed, hint)

    def _near(self, key: str) -> str:
        near = difflib.get_close_matches(key, sorted(self._known), n=1)
        return f"Nearest known name: {near[0]}." if near else "No known name is near."

    def _similar(self, key: str) -> str:
        near = difflib.get_close_matches(key, sorted(self._data), n=2)
        return f"Similar keys present: {', '.join(near)}." if near else ""
