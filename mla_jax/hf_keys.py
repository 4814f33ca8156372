"""A reader of JSON objects that knows every key it was asked for and refuses the rest by name."""

import difflib
import json
import math
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mla_jax.checks import LARGEST_FLOAT
from mla_jax.errors import ConfigError, EngineError, listed, shown
from mla_jax.files import read_regular

__all__ = ["LARGEST", "Keys", "config_object", "load_json", "load_object"]

LARGEST: Final = 2**31 - 1
"""Of a size: positions, tokens and slots are int32."""

_ABSENT: Final = object()
_MAX_BYTES: Final = 16 * 2**20  # of a config.json; published ones have some thousand

# Who wrote the file and with what: names that nothing could be computed from.
_BOOKKEEPING: Final = re.compile(
    r"_.*|unsloth_.*|model_name|license|(created|saved|converted)_(at|by|with)"
    r"|(torch|peft|trl|mlx|mlx_lm|vllm|sglang|accelerate|deepspeed|axolotl|llamafactory)_version"
)


def load_json(path: Path) -> object:
    """The JSON value of a file; raises ConfigError naming file and problem."""
    allowed = f"a readable file of at most {_MAX_BYTES:,} bytes"
    try:
        content = read_regular(path, limit=_MAX_BYTES)
    except OSError as e:
        raise ConfigError(str(path), e.strerror or type(e).__name__, allowed) from None
    except ValueError as e:  # characters that no path has
        raise ConfigError(repr(str(path)), str(e), allowed) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise ConfigError(str(path), f"not JSON ({e})", "a JSON object") from None


def load_object(path: Path) -> Mapping[str, Any]:
    """The JSON object of a file beside config.json.

    Raises:
        ConfigError: no JSON.
        EngineError: another JSON value.
    """
    data = load_json(path)
    if not isinstance(data, Mapping):
        raise EngineError(str(path), type(data).__name__, "a JSON object")
    return data


def config_object(
    source: Mapping | str | Path, ignore_keys: Collection[str] = ()
) -> tuple[object, str]:
    """The content of a ``config.json`` and where it is from: itself, its path or its folder.

    Raises:
        ConfigError: no such folder or file, no JSON, or names to ignore that are one text.
    """
    one = isinstance(ignore_keys, str)
    if one or not isinstance(ignore_keys, Collection):
        hint = "Put it in []." if one else ""
        raise ConfigError("ignore_keys", repr(ignore_keys), "a list of names", hint)
    if not isinstance(source, str | Path):
        return source, "config.json"
    path = Path(source)
    if path.suffix != ".json" and _absent(path):
        allowed = "a folder with config.json and weights, or a hub id OWNER/NAME"
        hint = "To get one: hf download OWNER/NAME --local-dir FOLDER."
        raise ConfigError("model", f"{path}, which is not here", allowed, hint)
    path = path / "config.json" if os.path.isdir(path) else path
    return load_json(path), str(path)


def _absent(path: Path) -> bool:
    """Nothing is there; a path that cannot be asked for is what its reader says."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False


class Keys:
    """Takes keys out of an object one by one; ``finish`` refuses what was not taken.

    ``ignored`` names unknown keys to pass over, with their prefix.
    """

    def __init__(
        self, data: object, where: str, prefix: str = "", *, ignored: Collection[str] = ()
    ):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: {prefix or 'top level'}", data, "a JSON object")
        self._data = dict(data)
        self._known: set[str] = set()
        self._ignored = frozenset(ignored)
        self.where = where
        self._prefix = prefix

    def inner(self, data: object, prefix: str) -> "Keys":
        """A reader of an object inside this one."""
        return Keys(data, self.where, prefix, ignored=self._ignored)

    def refusal(self, key: str, given: object, allowed: object, hint: str = "") -> ConfigError:
        given = shown(given) if isinstance(given, int | list | dict) else repr(given)
        return ConfigError(f"{self.where}: {self._prefix}{key}", given, allowed, hint)

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

    def integer(
        self, *names: str, default: object = _ABSENT, low: int = 1, high: int = LARGEST
    ) -> int:
        value = self.take(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(names[0], value, f"an integer >= {low}, at most {high:,}")
        return value

    def maybe_integer(
        self, *names: str, default: object = _ABSENT, low: int = 0, high: int = LARGEST
    ) -> int | None:
        """An integer or null."""
        value = self.take(*names, default=default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(names[0], value, f"an integer >= {low}, at most {high:,}, or null")
        return value

    def number(self, name: str, default: object = _ABSENT, *, most: float = LARGEST_FLOAT) -> float:
        """A number above zero, finite in float32, or at most ``most``."""
        value = self.take(name, default=default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an integer of hundreds of digits
                number = math.inf
            if 0 < number <= most:
                return number
        few = "finite in float32" if most == LARGEST_FLOAT else f"at most {most}"
        allowed = f"a number > 0, {few}"
        raise self.refusal(name, value, allowed)

    def maybe_number(self, name: str, *, zero: bool = True) -> float | None:
        """A finite number above zero; None when absent, null or, with ``zero``, 0."""
        value = self.take(name, default=None)
        if value is None or (zero and value == 0 and value is not False):
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
        """Raises ConfigError naming every key that was not taken, with the nearest known name.

        Keys that only say who wrote the file are a warning, and those of ``ignored`` nothing.
        """
        known = sorted(k for k in self._known if f"{self._prefix}{k}" in self._ignored)
        if known:
            allowed = "keys that this library does not know: these decide what is computed"
            raise ConfigError(f"{self.where}: ignored keys", self._named(known), allowed)
        rest = sorted(k for k in self._data if f"{self._prefix}{k}" not in self._ignored)
        passed = [k for k in rest if _BOOKKEEPING.fullmatch(k)]
        unknown = [k for k in rest if not _BOOKKEEPING.fullmatch(k)]
        if passed:
            text = f"{self.where}: bookkeeping that nothing is computed from: {self._named(passed)}"
            warnings.warn(text, stacklevel=2)
        if not unknown:
            return
        near = " ".join(f"{shown(k)}: {self._near(k)}" for k in unknown[:3])
        hint = f"{near} Keys that cannot change what is computed may be passed over by name: "
        hint += (
            f"ignore_keys=['{self._prefix}{shown(unknown[0])}'], on the command line --ignore-key."
        )
        allowed = "keys whose meaning this library knows"
        given = {k: self._data[k] for k in unknown[:10]}
        what = f"{self.where}: unknown key {self._named(unknown)}"
        raise ConfigError(what, given, allowed, hint)

    def _named(self, keys: Sequence[str]) -> str:
        return listed([f"{self._prefix}{k}" for k in keys])

    def _near(self, key: str) -> str:
        near = difflib.get_close_matches(key[:100], sorted(self._known), n=1)
        return f"Nearest known name: {near[0]}." if near else "No known name is near."

    def _similar(self, key: str) -> str:
        present = [k for k in sorted(self._data)[:1000] if len(k) < 100]
        near = difflib.get_close_matches(key, present, n=2)
        return f"Similar keys present: {', '.join(near)}." if near else ""
