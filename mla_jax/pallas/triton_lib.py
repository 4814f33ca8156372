"""The one place that imports Triton and jax-triton, both optional (extra ``triton``).

Import it only where a Triton kernel is about to run: files of kernels do, and are themselves
imported by their wrappers inside a function. Triton compiles without a GPU; jax-triton needs
jaxlib's CUDA plugin, so it is imported by the call alone.
"""

# Both packages may be missing where types are checked, and Triton states few types.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import Array

__all__ = ["call", "jit", "tl"]


def jit(fn: Callable) -> Any:
    """``triton.jit`` of the function as written: whatever wraps it, shape checks too, is left out.

    Triton reads the source, and would otherwise resolve names where the wrapper lives.
    """
    return triton.jit(inspect.unwrap(fn))


def call(
    kernel: Any,
    *args: Array | int,
    out: Any,
    grid: int,
    warps: int,
    stages: int,
    **constants: Any,
) -> Any:
    """Launch ``kernel(*args, *out, **constants)`` on ``grid`` programs; returns ``out``.

    ``out`` is one ``jax.ShapeDtypeStruct`` or a tuple of them; what is returned begins with
    whatever memory held. Numbers among ``args`` are arguments of the kernel, not part of its
    text, as far as the release of jax-triton allows.
    """
    import jax_triton

    accepted = inspect.signature(jax_triton.triton_call).parameters
    name = "out_type" if "out_type" in accepted else "out_shape"  # since 0.4, before 0.4
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        grid=(grid,),
        num_warps=warps,
        num_stages=stages,
        compute_capability=DeviceInfo.current().sm or None,
        **{name: out},
        **constants,
    )
