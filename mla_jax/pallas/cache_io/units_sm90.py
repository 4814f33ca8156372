"""A copy of rows in units of 8 elements: what a thread takes, and what Pallas has no words for.

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
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.types import cdiv

__all__ = [
    "EACH", "THREADS", "UNIT", "blocks", "load", "owner", "spot", "steps", "store", "thread",
]  # fmt: skip

UNIT = 8  # elements
THREADS = 128  # of a block
EACH = 2  # units of a thread: fewer lie closer together, more hide the search
_PIECE = plgpu.Layout.WG_STRIDED((THREADS * UNIT,), vec_size=UNIT)
"""Registers of one unit of each thread."""


def blocks(rows: int, width: int) -> int:
    """Thread blocks for ``rows`` of ``width`` elements."""
    return cdiv(rows * (width // UNIT), THREADS * EACH)


def spot(block, thread, i: int, width: int):
    """``(row, unit of the row)``: the ``i``-th of a thread. No number passes 32 bits.

    A warp has units of one row, or of one and the next.
    """
    units, step = width // UNIT, THREADS * EACH
    period = units // math.gcd(step, units)  # blocks until a row and a block begin together
    turn = lax.div(block, jnp.int32(period))
    unit = (block - turn * period) * step + i * THREADS + thread
    row = lax.div(unit, jnp.int32(units))
    return turn * (step * period // units) + row, unit - row * units


def steps(count: int) -> Iterator[int]:
    """Of a search among ``count`` numbers by 32 lanes: each round they look that far apart."""
    while count:
        step = cdiv(count + 1, 33)
        yield step
        count = step - 1


def thread() -> jax.Array:
    """The number of this thread in its block."""

    @plgpu.inline_mgpu(return_type=inline.NUMBER)
    def number(_):
        return inline.number(mgpu.utils.thread_idx())

    return number()


def owner(starts, row) -> jax.Array:
    """How many of ``starts[1:]`` are at most ``row``, one of at most two rows of this warp."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR), return_type=inline.NUMBER)
    def search(_, starts, row):
        from jax._src.lib.mlir.dialects import arith

        row = row.registers.item()
        first, last = (_of_lane(row, lane) for lane in (0, 31))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, row, first)
        return inline.number(arith.select(is_first, _search(starts, first), _search(starts, last)))

    return search(starts, row)


def load(rows, place, unit) -> jax.Array:
    """A unit of row ``place``; zeros where there is no place."""
    piece = plgpu.ShapeDtypeStruct((THREADS * UNIT,), rows.dtype, layout=_PIECE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR, inline.SCALAR), return_type=piece)
    def read(_, rows, place, unit):
        from jax._src.lib.mlir import ir

        kind = ir.MemRefType(rows.type).element_type
        place = place.registers.item()
        address = _address(rows, place, unit.registers.item())
        words = _read(address, place, mgpu.utils.bitwidth(kind) * UNIT // 32)
        register = mgpu.utils.bitcast(words, ir.VectorType.get((UNIT,), kind))
        return mgpu.FragmentedArray(
            _registers=np.array([register], dtype=object), _layout=_PIECE.to_mgpu(), _is_signed=None
        )

    return read(rows, place, unit)


def store(x: jax.Array, rows, place, unit) -> None:
    """``x`` to a unit of row ``place``, which exists; the first that leaves the L2 cache."""

    @plgpu.inline_mgpu(arg_types=(_PIECE, plgpu.RefType(), inline.SCALAR, inline.SCALAR))
    def write(_, x, rows, place, unit):
        address = _address(rows, place.registers.item(), unit.registers.item())
        _write(address, x.registers.item())

    write(x, rows, place, unit)


def _of_lane(x, lane: int):
    """``x`` of another thread of the warp."""
    code = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;"
    return inline.asm(code, [x], "=r,r", result="i32")


def _search(starts, row):
    """``owner`` of a row of the whole warp."""
    from jax._src.lib.mlir import ir

    last, low = ir.MemRefType(starts.type).shape[0] - 1, inline.constant(0)
    for step in steps(last):
        low = inline.asm(
            f"""{{
            .reg .pred p;
            .reg .u32 at, x;
            .reg .u64 where;
            mov.u32 at, %laneid;
            mad.lo.u32 at, at, {step}, {step};
            add.u32 at, at, $1;
            min.u32 x, at, {last};
            mad.wide.u32 where, x, 4, $3;
            ld.global.u32 x, [where];
            setp.le.u32 p, at, {last};
            setp.le.and.s32 p, x, $2, p;
            vote.sync.ballot.b32 x, p, 0xffffffff;
            popc.b32 x, x;
            mad.lo.u32 $0, x, {step}, $1;
            }}""",
            [low, row, mgpu.utils.memref_ptr(starts)],
            "=r,r,r,l",
            result="i32",
        )
    return low


def _address(rows, place, unit):
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith

    kind = ir.MemRefType(rows.type)
    size = mgpu.utils.bitwidth(kind.element_type) // 8
    offset = arith.addi(
        arith.muli(inline.wide(place), inline.constant(kind.shape[-1] * size, 64)),
        inline.wide(arith.muli(unit, inline.constant(UNIT * size))),
    )
    return inline.address(rows, offset)


def _read(address, place, n: int):
    """``n`` words; zeros if ``place`` is negative."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import llvm, vector

    i32 = ir.IntegerType.get_signless(32)
    names = [f"${k}" for k in range(n)]
    found = inline.asm(
        f"""{{
        .reg .pred p;
        setp.ge.s32 p, ${n + 1}, 0;
        {"".join(f"mov.b32 {x}, 0; " for x in names)}
        @p ld.global.L1::no_allocate.v{n}.b32 {{{", ".join(names)}}}, [${n}];
        }}""",
        [address, place],
        "=&r," * n + "l,r",
        result=f"struct<({', '.join(['i32'] * n)})>",
    )
    one = ir.VectorType.get((1,), i32)
    words = [llvm.extractvalue(i32, found, [k]) for k in range(n)]
    return mgpu.utils.vector_concat([vector.broadcast(one, w) for w in words])


def _write(address, register) -> None:
    words = inline.words(register)
    names = ", ".join(f"${1 + k}" for k in range(len(words)))
    inline.asm(
        f"""{{
        .reg .b64 policy;
        createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
        st.global.L2::cache_hint.v{len(words)}.b32 [$0], {{{names}}}, policy;
        }}""",
        [address, *words],
        "l," + "r," * len(words) + "~{memory}",
    )
