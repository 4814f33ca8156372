"""The checker behind the jaxtyping hook of conftest.py."""

from beartype import beartype


def check_functions[F](fn: F) -> F:
    """Check functions and methods, but not constructors.

    Transformations rebuild a pytree around shapes, axes or sentinels instead of arrays.
    """
    return fn if getattr(fn, "__name__", "") == "__init__" else beartype(fn)
