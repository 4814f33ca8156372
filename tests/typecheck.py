"""The checker behind the jaxtyping hook of conftest.py."""

from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray


def _has_shape(hint: object) -> bool:
    is_array = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return is_array or any(map(_has_shape, get_args(hint)))


def check_shapes[F](fn: F) -> F:
    """Check functions that state shapes, but not constructors.

    Transformations rebuild a pytree around shapes, axes or sentinels instead of arrays.
    """
    stated = any(map(_has_shape, getattr(fn, "__annotations__", {}).values()))
    if not stated or getattr(fn, "__name__", "") == "__init__":
        return fn
    return beartype(fn)
