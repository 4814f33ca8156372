"""Which backend runs an operation: the registry of all of them, and the way to one.

Choice happens while tracing, from shapes, dtypes and the device alone.
"""

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from mla_jax.errors import ArgumentError
from mla_jax.pallas import (
    all_reduce,
    append,
    append_window,
    cache_io,
    dense_decode,
    dense_prefill,
    fp8_matmul,
    grouped_matmul,
    indexer,
    merge,
    pooling,
    problems,
    router,
    sparse_attention,
    streams,
    topk,
)
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Backend, Problem, Registry
from mla_jax.types import Array, Int, gathered

__all__ = [
    "REGISTRY",
    "Layer",
    "backend_of",
    "choose",
    "explain",
    "in_one_kernel",
    "int32",
    "named",
    "number",
    "support_matrix",
    "tuned",
]

type Layer = int | Int[Array, ""] | None
"""Which layer of a stack: static, or a scalar array, so that one program serves all of them."""

REGISTRY = Registry(
    (
        *dense_decode.BACKENDS,
        *dense_prefill.BACKENDS,
        *cache_io.BACKENDS,
        *append.BACKENDS,
        *append_window.BACKENDS,
        *merge.BACKENDS,
        *all_reduce.BACKENDS,
        *router.BACKENDS,
        *streams.BACKENDS,
        *grouped_matmul.BACKENDS,
        *fp8_matmul.BACKENDS,
        *indexer.BACKENDS,
        *topk.BACKENDS,
        *pooling.BACKENDS,
        *sparse_attention.BACKENDS,
    )
)


def named(op: str, backend: str | None) -> str | None:
    """``backend`` where the operation has one of that name, else None: its best."""
    known = isinstance(backend, str) and any(b.name == backend for b in REGISTRY.of(op))
    return backend if known else None


def in_one_kernel(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> bool:
    """Whether to call ``op``, which fuses several operations, rather than those operations.

    True if the first backend of ``op`` qualifies for these arguments, or if ``backend`` names it:
    the call then says what is missing. False for any other name.
    """
    first = REGISTRY.of(op)[0]
    if backend is not None:
        return backend == first.name
    problem = problems.PROBLEMS[op](*args, **kwargs)
    return not first.requirement.missing(problem, DeviceInfo.current())


def backend_of(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> str:
    """Name of the backend that ``op(*args, backend=backend, **kwargs)`` takes.

    Raises:
        UnsupportedError: the call would raise it.
    """
    problem = problems.PROBLEMS[op](*args, **kwargs)
    return REGISTRY.choose(problem, DeviceInfo.current(), backend).name


def explain(
    op: str,
    *args: Any,
    backend: str | None = None,
    device: DeviceInfo | None = None,
    **kwargs: Any,
) -> str:
    """Which backend would run ``op(*args, **kwargs)``, and why not the others.

    Arguments are those of the operation; arrays may be ``jax.ShapeDtypeStruct``. ``device`` is
    the current one unless stated.
    """
    if not isinstance(op, str) or op not in problems.PROBLEMS:
        raise ArgumentError("explain: op", repr(op), ", ".join(problems.PROBLEMS))
    for name in ("tuning", "plan"):
        kwargs.pop(name, None)
    make = problems.PROBLEMS[op]
    try:
        inspect.signature(make).bind(*args, **kwargs)
    except TypeError as error:
        allowed = ", ".join(map(str, inspect.signature(make).parameters.values()))
        raise ArgumentError(f"explain: arguments of {op}", error, allowed) from None
    if not isinstance(device, DeviceInfo | None):
        raise ArgumentError("explain: device", repr(device), "a DeviceInfo, or None: this one")
    problem = make(*args, **kwargs)
    return REGISTRY.explain(problem, device or DeviceInfo.current(), backend)


def support_matrix() -> str:
    """Every registered backend and what it requires, as a Markdown table."""
    return REGISTRY.support_matrix()


def choose(
    problem: Problem, backend: str | None, tuning: object = None, plan: object = None
) -> Callable[..., Any]:
    """The function of the chosen backend, with its tuning and the step's plan bound to it."""
    chosen, tuning = tuned(problem, backend, tuning)
    if plan is not None and chosen.plan is None:
        name = f"{problem.op}[{chosen.name}]: plan"
        raise ArgumentError(name, type(plan).__name__, "None (this backend makes no plan)")
    bound = {"tuning": tuning, "plan": plan}
    return functools.partial(chosen.run, **{k: v for k, v in bound.items() if v is not None})


def tuned(problem: Problem, backend: str | None, tuning: object) -> tuple[Backend, object]:
    """The chosen backend and its tuning: the given one, or its own choice."""
    device = DeviceInfo.current()
    chosen = REGISTRY.choose(problem, device, backend)
    if tuning is None:
        return chosen, chosen.tune(problem, device).value if chosen.tune else None
    name = f"{problem.op}[{chosen.name}]: tuning"
    if chosen.tuning is None:
        raise ArgumentError(name, tuning, "None (this backend has nothing to tune)")
    if not isinstance(tuning, chosen.tuning):
        raise ArgumentError(name, tuning, f"None or {chosen.tuning.__name__}")
    return chosen, tuning


def int32(x: Any) -> Array:
    """``x`` in int32; what is too large for it becomes the largest, never another number.

    Of a NumPy array before JAX sees it, which keeps the low 32 bits of one in 64 alone.
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    xp = np if isinstance(x, np.ndarray) else jnp
    if x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        bounds = jnp.iinfo(jnp.int32)
        x = xp.minimum(xp.maximum(x, 0 if x.dtype.kind == "u" else bounds.min), bounds.max)
    return gathered(jnp.asarray(x.astype(jnp.int32)))


def number(layer: Layer) -> Array | None:
    return (
        None
        if layer is None
        else int32(np.asarray(layer) if isinstance(layer, numbers.Integral) else layer)
    )
