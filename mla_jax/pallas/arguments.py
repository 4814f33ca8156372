"""What one argument of an operation must be, before axes of several arguments are compared.

Each function takes the argument's name for the message, such as ``mla_decode: scale``, and raises
``ArgumentError``. Arrays may be ``jax.ShapeDtypeStruct``: only shapes and dtypes are read.
"""

import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.checks import is_int, is_real
from mla_jax.errors import ArgumentError, described, shown

__all__ = [
    "ACTIVATIONS",
    "check_array",
    "check_cache",
    "check_eps",
    "check_fields",
    "check_flag",
    "check_number",
    "checked_count",
    "checked_pair",
    "checked_parts",
    "dtype_name",
    "is_static_number",
]

ACTIVATIONS = ("bfloat16", "float16", "float32")
"""Dtypes of queries, keys, values and outputs."""

_MOST = 2**31 - 1  # kernels count in int32


def check_array(what: str, x: Any) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise ArgumentError(what, described(x), "an array", "jnp.asarray makes one of numbers.")


def check_cache(what: str, cache: Any, *, records: bool = False) -> None:
    """Refuse what is no ``LatentCache``; with ``records``, a ``RecordCache`` is accepted too."""
    kinds = (LatentCache, RecordCache) if records else (LatentCache,)
    if not isinstance(cache, kinds):
        allowed = " or a ".join(kind.__name__ for kind in kinds)
        raise ArgumentError(what, described(cache), f"a {allowed}", "LatentCache.alloc makes one.")
    if isinstance(cache.pages, np.ndarray):
        hint = "jax.device_put(cache) makes one of it."
        raise ArgumentError(f"{what}: pages", "a numpy array", "an array of JAX", hint)


def check_fields(what: str, x: Any, kind: str, *names: str) -> None:
    """Refuse what lacks an attribute that a ``kind`` has."""
    if not all(hasattr(x, name) for name in names):
        raise ArgumentError(what, described(x), f"{kind}, with {', '.join(names)}")


def checked_pair(what: str, x: Any) -> tuple[Any, Any]:
    """Cos and sin."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise ArgumentError(what, described(x), "a pair of arrays: (cos, sin)")
    return x[0], x[1]


def checked_parts(what: str, x: Any, *, allowed: str) -> tuple[Any, ...]:
    """A tuple or list with at least one entry."""
    if not isinstance(x, tuple | list) or not x:
        raise ArgumentError(what, described(x), allowed)
    return tuple(x)


def checked_count(what: str, n: Any, *, low: int = 0, high: int = _MOST) -> int:
    """A static integer from ``low`` to ``high``."""
    if not is_int(n) or not low <= int(n) <= high:
        allowed = f"a static int, {low} or more, at most {high:,}"
        raise ArgumentError(what, n if is_int(n) else described(n), allowed)
    return int(n)


def check_flag(what: str, x: Any) -> None:
    if not isinstance(x, bool | np.bool_):
        raise ArgumentError(what, described(x), "True or False, static")


def is_static_number(x: Any) -> bool:
    """Whether ``x`` is a Python or numpy number, finite in float32, and no array."""
    return isinstance(x, numbers.Real) and is_real(x)


def check_number(what: str, x: Any) -> None:
    """A finite Python or numpy number."""
    if not is_static_number(x):
        raise ArgumentError(what, shown(x), "a finite Python number", "It is static, not an array.")


def check_eps(what: str, x: Any) -> None:
    """What is added to a mean of squares before its root is taken, or to a weight."""
    if not (is_static_number(x) and 0 <= float(x) <= 1):
        allowed = "a Python number from 0 to 1"
        raise ArgumentError(what, shown(x), allowed, "It is static, not an array.")


def dtype_name(what: str, dtype: DTypeLike) -> str:
    """The name of one of ``ACTIVATIONS``."""
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name not in ACTIVATIONS:
        given = described(dtype) if name is None else f"dtype {name}"
        raise ArgumentError(what, given, ", ".join(ACTIVATIONS))
    return name
