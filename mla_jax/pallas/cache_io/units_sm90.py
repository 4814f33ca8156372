"""Rows in units of 8 elements: what a thread takes, and what Pallas has no words for.

Thread blocks that run side by side take neighbouring units, so that what is on its way at any
moment lies together in memory. A row lies at a *place*, its number in an array; -1 is nowhere.
Numbers of rows and units differ from thread to thread; what touches memory exists on the
device only.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_inline import arith, gpu, ir, llvm, vectors
from mla_jax.types import cdiv

__all__ = [
    "EACH", "PIECE", "THREADS", "UNIT", "blocks", "keep", "load", "of_lane", "owner", "publish",
    "spot", "store", "thread",
]  # fmt: skip

UNIT = 8  # elements
THREADS = 128  # of a block
EACH = 2  # units of a thread: fewer lie closer together, more hide the search
SMALL = 2**18  # bytes that may stay in the L2 cache
PIECE = plgpu.Layout.WG_STRIDED((THREADS * UNIT,), vec_size=UNIT)
"""Registers of one unit of each thread, whichever it is."""


def blocks(rows: int, width: int) -> int:
    """Thread blocks for ``rows`` of ``width`` elements."""
    return cdiv(rows * (width // UNIT), THREADS * EACH)


def spot(block, thread, i: int, width: int):
    """``(row, unit of the row)``: the ``i``-th of a thread. No number passes 32 bits.

    The units of a warp are neighbours.
    """
    units, step = width // UNIT, THREADS * EACH
    period = units // math.gcd(step, units)  # blocks until a row and a block begin together
    turn = lax.div(block, jnp.int32(period))
    warp = lax.div(thread, jnp.int32(32))
    unit = (block - turn * period) * step + (warp * (EACH - 1) + i) * 32 + thread
    row = lax.div(unit, jnp.int32(units))
    return turn * (step * period // units) + row, unit - row * units


def owner(starts, row) -> jax.Array:
    """How many of ``starts[1:]`` are at most ``row``, which may differ from thread to thread."""
    last, low = starts.shape[0] - 1, jnp.int32(0)
    step = 1 << (last.bit_length() - 1)
    while step:
        at = low + step
        passed = (at <= last) & (starts[jnp.minimum(at, last)] <= row)
        low = jnp.where(passed, at, low)
        step //= 2
    return low


def thread() -> jax.Array:
    """The number of this thread in its block."""

    @plgpu.inline_mgpu(return_type=inline.NUMBER)
    def number(_):
        return inline.number(mgpu.utils.thread_idx())

    return number()


def of_lane(x, lane) -> jax.Array:
    """``x`` of another thread of the warp."""

    @plgpu.inline_mgpu(arg_types=(inline.SCALAR, inline.SCALAR), return_type=inline.NUMBER)
    def shuffle(_, x, lane):
        code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        values = [x.registers.item(), lane.registers.item()]
        return inline.number(inline.asm(code, values, "=r,r,r", result="i32"))

    return shuffle(x, lane)


def load(rows, place, unit) -> jax.Array:
    """A unit of row ``place`` of an array in any memory; zeros where there is no place."""
    piece = plgpu.ShapeDtypeStruct((THREADS * UNIT,), rows.dtype, layout=PIECE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR, inline.SCALAR), return_type=piece)
    def read(_, rows, place, unit):

        place, zero = place.registers.item(), inline.constant(0)
        kind = ir.VectorType.get((UNIT,), ir.MemRefType(rows.type).element_type)
        size = mgpu.utils.bitwidth(kind) // 8
        words = ir.VectorType.get((size // 4,), zero.type)
        pointer = _pointer(rows, arith.maxsi(place, zero), unit)
        exists = arith.cmpi(arith.CmpIPredicate.sge, place, zero)
        found = llvm.load(words, pointer, alignment=size)
        found = arith.select(exists, found, vectors.broadcast(words, zero))
        register = vectors.bitcast(kind, found)
        return mgpu.FragmentedArray(
            _registers=np.array([register], dtype=object), _layout=PIECE.to_mgpu(), _is_signed=None
        )

    return read(rows, place, unit)


def store(x: jax.Array, rows, place, unit) -> None:
    """``x`` to a unit of row ``place`` of an array in any memory, which exists."""

    @plgpu.inline_mgpu(arg_types=(PIECE, plgpu.RefType(), inline.SCALAR, inline.SCALAR))
    def write(_, x, rows, place, unit):

        register = x.registers.item()
        size = mgpu.utils.bitwidth(register.type) // 8
        words = ir.VectorType.get((size // 4,), ir.IntegerType.get_signless(32))
        pointer = _pointer(rows, place.registers.item(), unit)
        llvm.store(vectors.bitcast(words, register), pointer, alignment=size)

    write(x, rows, place, unit)


def publish() -> None:
    """What this warp stored to shared memory is seen by the copies that it starts now."""
    lib.issue("fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;")


def keep(*arrays) -> None:
    """Ask for small arrays at once; they leave the L2 cache last, also for the next kernel."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(arrays))
    def prefetch(_, *arrays):

        line = arith.addi(
            arith.muli(
                arith.index_cast(ir.IntegerType.get_signless(32), gpu.block_id(gpu.Dimension.x)),
                inline.constant(THREADS),
            ),
            mgpu.utils.thread_idx(),
        )
        for array in arrays:
            kind = ir.MemRefType(array.type)
            size = math.prod(kind.shape) * mgpu.utils.bitwidth(kind.element_type) // 8
            if size > SMALL:
                continue
            code = f"""{{
                .reg .pred p;
                setp.lt.u32 p, $1, {cdiv(size, 128)};
                @p prefetch.global.L2::evict_last [$0];
                }}"""
            offset = arith.muli(inline.wide(line), inline.constant(128, 64))
            inline.asm(code, [inline.address(array, offset), line], "l,r")

    prefetch(*arrays)


def _pointer(rows, place, unit):

    kind = ir.MemRefType(rows.type)
    size = mgpu.utils.bitwidth(kind.element_type) // 8
    offset = arith.addi(
        arith.muli(inline.wide(place), inline.constant(kind.shape[-1] * size, 64)),
        inline.wide(arith.muli(unit.registers.item(), inline.constant(UNIT * size))),
    )
    byte = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(rows), [offset], byte)
