"""The one place that imports Triton, an optional package (extra ``triton``): compile and launch.

Kernels and their wrappers import it, and the registry imports a wrapper when its backend is chosen:
where Triton is missing, none is. Compiling needs no GPU; jaxlib's CUDA plugin, which
launches, comes with JAX.

This is the form of jax-triton 0.4, a typed custom call. The one of jax-triton 0.3 is no such, and
XLA hands it copies of what a loop slices out of stacked weights, where this one gets addresses.
"""

# Triton may be missing where types are checked, and states few types.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax._src.lib import gpu_triton  # what jax-triton and Pallas use; there is no public name
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_jax.errors import ArgumentError
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import Array

__all__ = ["INTERPRETED", "ask_for", "call", "compiled", "jit", "scatter", "swap_order", "tl"]

TARGET = "triton_kernel_call_ffi"
"""Where jaxlib's CUDA plugin takes Triton kernels; typed."""

NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv",
    "int32": "i32", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
"""Element types by their names in Triton."""

INTERPRETED = triton.knobs.runtime.interpret
"""Whether programs run in Triton's interpreter, which knows no assembly."""

ALIGNMENT = 16
"""Bytes: what a kernel may assume of every array, and the launch checks."""


def jit(fn: Callable) -> Any:
    """``triton.jit`` of the function as written: whatever wraps it, shape checks too, is left out.

    Triton reads the source, and would otherwise resolve names where the wrapper lives.
    """
    return triton.jit(inspect.unwrap(fn))


@jit
def swap_order(x):
    """Between the bits of a float32 and the int32 that is ordered as it is, both ways."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


if INTERPRETED:

    @jit
    def ask_for(pointers, mask):
        """Bring what the pointers show to the L2 cache: of no effect on any number."""

    @jit
    def scatter(pointers, values, mask):
        """Store each value where its pointer says."""
        tl.store(pointers, values, mask=mask)

else:

    @jit
    def ask_for(pointers, mask):
        """Bring the 128 bytes around each pointer to the L2 cache; nothing waits for them."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @jit
    def scatter(pointers, values, mask):
        """Store each value where its pointer says, from whichever thread has it.

        Before a ``tl.store`` to places that are no neighbours Triton exchanges pointers, values and
        mask through shared memory, for an order in which neighbours would be stored together.
        """
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def call(
    kernel: Any,
    *args: Array | int | tuple[Array, ...],
    out: Any,
    grid: int,
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
    registers: int | None = None,
    **constants: Any,
) -> Any:
    """Launch ``kernel(*args, *out, **constants)`` on ``grid`` programs; returns ``out``.

    ``out`` is one ``jax.ShapeDtypeStruct`` or a tuple of them; what is returned begins with
    whatever memory held. Integers among ``args`` are no part of the program's text. A tuple of
    arrays, or of results, is one argument of the kernel. ``aliases`` maps the number of an array of
    ``args`` to that of the result that takes its memory; those in tuples count too. ``registers``
    bounds those of a thread.

    Raises:
        ArgumentError: a thread block would need more shared memory than the device has.
    """
    operands = (*args, *(out if isinstance(out, tuple) else (out,)))
    device = DeviceInfo.current()
    program = compiled(
        kernel,
        jax.tree.map(lambda x: "i32" if isinstance(x, int) else _pointer(x.dtype), operands),
        tuple(constants.items()),
        sm=device.sm,
        warps=warps,
        stages=stages,
        registers=registers,
    )
    meta, text = program.metadata, program.asm
    assert not meta.global_scratch_size, f"{meta.name} asks for memory that nobody allocates"
    if 0 < device.shared_memory < meta.shared:
        raise ArgumentError(
            f"{meta.name} on {device.kind}: shared memory of a thread block",
            f"{meta.shared} bytes",
            f"at most {device.shared_memory}",
            "The backend xla has no such limit.",
        )
    binary = gpu_triton.TritonKernel(
        meta.name, warps, 1, meta.shared, text["ptx"], str(text["ttir"]), meta.target.arch
    )
    parameters = [
        gpu_triton.create_scalar_parameter(x, "i32")
        if isinstance(x, int)
        else gpu_triton.create_array_parameter(0, ALIGNMENT)
        for x in jax.tree.leaves(operands)
    ]
    launch = gpu_triton.TritonKernelCall(binary, grid, 1, 1, parameters)
    outs, form = jax.tree.flatten(out)
    run = jax.ffi.ffi_call(TARGET, outs, input_output_aliases=aliases)
    arrays = [x for x in jax.tree.leaves(args) if not isinstance(x, int)]
    results = run(*arrays, opaque=zlib.compress(launch.to_proto(meta.name, b"")))
    return jax.tree.unflatten(form, results)


@functools.cache
def compiled(
    kernel: Any,
    types: tuple[str | tuple[str, ...], ...],
    constants: tuple[tuple[str, Any], ...],
    *,
    sm: int,
    warps: int,
    stages: int,
    registers: int | None = None,
) -> Any:
    """A kernel compiled for ``sm``, from the Triton types of its arguments, in order."""
    names = kernel.arg_names
    positions = {name: i for i, name in enumerate(names)}
    signature = dict(zip(names, types, strict=False)) | {k: "constexpr" for k, _ in constants}
    assert len(types) + len(constants) == len(names) == len(signature), "arguments do not fit"
    arrays = [
        tuple(key.idx for key in path)
        for path, type in jax.tree.leaves_with_path(types)
        if type[0] == "*"
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(positions[k],): v for k, v in constants},
        attrs={path: [["tt.divisibility", ALIGNMENT]] for path in arrays},
    )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    options |= {"enable_fp_fusion": True}  # Triton's default changes with its version
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def _pointer(dtype: Any) -> str:
    return f"*{NAMES[jnp.dtype(dtype).name]}"
