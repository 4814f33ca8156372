"""Instructions inside ``plgpu.inline_mgpu``: assembly, constants, addresses, registers as words.

MLIR and its dialects are private parts of JAX: other kernels take them from here.

Values are those of the code that Mosaic generates, not arrays.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, memref, nvvm
from jax._src.lib.mlir.dialects import vector as vectors
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

__all__ = [
    "NUMBER", "SCALAR", "address", "any_lane", "any_of", "arith", "asm", "channels", "constant",
    "gpu", "ir", "llvm", "memref", "number", "nvvm", "strided", "unpacked", "vectors", "wide",
    "words",
]  # fmt: skip

SCALAR = plgpu.Layout.WGMMA
"""Of an argument that is a scalar: it has no layout, but the interface wants one."""

NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
"""Type of a result that is one int32; ``number`` makes it."""


def asm(text: str, operands: Sequence[Any], constraints: str, *, result: str = "void") -> Any:
    """Assembly that is neither moved nor dropped. ``result``: ``i32``, a struct in LLVM's words."""
    kind = ir.Type.parse(result if result.startswith("i") else f"!llvm.{result}")
    return llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True)


def any_of(comparison: str, bound: str, count: int, *, first: int) -> str:
    """``p``: whether one of ``count`` operands from ``$first`` on compares so with ``bound``."""
    tests = (f"setp.{comparison}.or.f32 p, ${first + i}, {bound}, p;" for i in range(count))
    return "setp.ne.u32 p, 0, 0;" + "".join(tests)


def any_lane(tests: str, operands: Sequence[Any], constraints: str) -> Any:
    """Whether ``p`` holds in a lane of the warp: a ``NUMBER``. ``tests`` set it from ``$1`` on."""
    code = f"""{{
        .reg .pred p;
        {tests}
        vote.sync.any.pred p, p, 0xffffffff;
        selp.u32 $0, 1, 0, p;
        }}"""
    return number(asm(code, operands, f"=r,{constraints}", result="i32"))


def constant(n: int, bits: int = 32) -> Any:
    """The number ``n``."""
    return mgpu.utils.c(n, ir.IntegerType.get_signless(bits))


def number(x: Any) -> Any:
    """A result of type ``NUMBER``."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def unpacked(found: Any, count: int, bits: int = 32) -> list[Any]:
    """The numbers of a struct of them, as ``asm`` gives it."""
    kind = ir.IntegerType.get_signless(bits)
    return [llvm.extractvalue(kind, found, [i]) for i in range(count)]


def strided(words: Sequence[Any], *, vector: int) -> Any:
    """A thread's words of 32 bits as an array in ``WG_STRIDED``."""
    kind = ir.VectorType.get((vector,), ir.IntegerType.get_signless(32))
    registers = [
        vectors.from_elements(kind, list(words[i : i + vector]))
        for i in range(0, len(words), vector)
    ]
    layout = mgpu.WGStridedFragLayout((128 * len(words),), vec_size=vector)
    return mgpu.FragmentedArray(
        _registers=np.asarray(registers, dtype=object), _layout=layout, _is_signed=True
    )


def channels(words: Sequence[Any], dtype: DTypeLike) -> Any:
    """A thread's words of 32 bits as its one register of an array of floats in ``WG_STRIDED``."""
    i32 = ir.VectorType.get((len(words),), ir.IntegerType.get_signless(32))
    count = 4 * len(words) // jnp.dtype(dtype).itemsize
    kind = ir.VectorType.get((count,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    registers = [vectors.bitcast(kind, vectors.from_elements(i32, list(words)))]
    layout = mgpu.WGStridedFragLayout((128 * count,), vec_size=count)
    return mgpu.FragmentedArray(
        _registers=np.asarray(registers, dtype=object), _layout=layout, _is_signed=None
    )


def wide(x: Any) -> Any:
    """A number of 32 bits in 64."""
    return arith.extsi(ir.IntegerType.get_signless(64), x)


def address(ref: Any, offset: Any) -> Any:
    """Of the byte ``offset``, a number of 64 bits, in an array."""
    base = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))
    return arith.addi(base, offset)


def words(register: Any) -> list[Any]:
    """A register of some vector type as words of 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    if not isinstance(register.type, ir.VectorType):
        return [arith.bitcast(i32, register)]
    n = mgpu.utils.bitwidth(register.type) // 32
    found = vectors.bitcast(ir.VectorType.get((n,), i32), register)
    return [vectors.extract(found, dynamic_position=[], static_position=[k]) for k in range(n)]
