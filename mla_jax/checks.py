"""What is a number, and what is a size: checks of settings that people give."""

import operator
from pathlib import Path

import numpy as np

from mla_jax.errors import EngineError, described

__all__ = [
    "LARGEST_FLOAT", "check_choice", "check_flags", "checked_size", "is_int", "is_real",
    "made_folder",
]  # fmt: skip

LARGEST_FLOAT = float.fromhex("0x1.fffffep127")
"""Of float32: a larger number is infinite on the device."""


def is_int(value: object) -> bool:
    """Whether ``value`` counts: a Python, numpy or JAX integer, and no boolean."""
    try:
        return not isinstance(value, bool) and operator.index(value) is not None  # pyright: ignore
    except TypeError:
        return False


def is_real(value: object) -> bool:
    """Whether ``value`` is a number, finite in float32: no text, no boolean, no infinity."""
    if isinstance(value, bool | str | bytes | bytearray):
        return False
    try:
        return abs(float(value)) <= LARGEST_FLOAT  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return False


def check_flags(**given: object) -> None:
    """Refuse settings, by their names, that are not booleans."""
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise EngineError(name, described(value), "True or False")


def check_choice(name: str, value: object) -> None:
    """Refuse a setting that is not True, False or None (None: the library decides)."""
    if not isinstance(value, bool | None):
        raise EngineError(name, described(value), "True, False or None")


def checked_size(
    what: str,
    value: object,
    *,
    low: int = 1,
    high: int = 2**31 - 1,
    allowed: str | None = None,
    hint: str = "",
) -> int:
    """``value`` as a Python integer from ``low`` to ``high``.

    Raises:
        EngineError: it is none; ``allowed`` says so in place of the two limits.
    """
    if is_int(value) and low <= (size := operator.index(value)) <= high:  # pyright: ignore
        return size
    text = allowed or f"{low} or more, at most {high:,}, as an integer"
    raise EngineError(what, value if is_int(value) else repr(value), text, hint)


def made_folder(what: str, folder: Path) -> Path:
    """``folder``, made if it is not there.

    Raises:
        EngineError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: of characters that no path has
        known = isinstance(error, OSError)
        given = f"{folder} ({error.strerror})" if known else f"{str(folder)!r} ({error})"
        raise EngineError(what, given, "a folder that is there or can be made") from None
    return folder
