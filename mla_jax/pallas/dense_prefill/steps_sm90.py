"""What the prefill kernel needs and Pallas has no words for.

Products that are one group of instructions, stores of some rows straight from registers, rows of
zeros, and an atomic addition. They exist on the device only: the interpreter has other forms.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportReturnType=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas.mosaic_inline import arith, ir, nvvm
from mla_jax.pallas.mosaic_lib import ROW, WGMMA

__all__ = [
    "add_values", "any_score_above", "draw", "scores", "store_live_rows", "zero_rows_from",
]  # fmt: skip

_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def scores(q, k, *held: jax.Array) -> jax.Array:
    """``q k^T`` [64, keys], in flight. ``q`` [chunks, 64, 64] and ``k`` [chunks, keys, 64].

    One group of instructions for all columns, not one for every 64. ``held`` [64, 64 n] are the
    last ``n`` chunks of ``q`` in registers: a product with those reads only ``k``.
    """
    shape, chunks = (64, k.shape[1]), q.shape[0]
    rest = chunks - sum(x.shape[1] // 64 for x in held)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_TILES), plgpu.RefType(_TILES), *(WGMMA for _ in held)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA),
    )
    def issue(_, q, k, *held):
        def some(x, first, last, order):
            part = mgpu.utils.memref_slice(_squeeze(x), (slice(first, last),))
            return mgpu.utils.memref_transpose(part, order)

        acc = mgpu.WGMMAAccumulator.zero(*shape)
        for x in held:
            acc = mgpu.wgmma(acc, x, some(k, rest, chunks, (0, 1, 3, 2)))
        return _group(acc, some(q, 0, rest, (1, 0, 2, 3)), some(k, 0, rest, (0, 1, 3, 2)))

    return issue(q, k, *held)


def add_values(values: jax.Array, p: jax.Array, v) -> jax.Array:
    """``values + p v`` in flight, one group. ``p`` [64, keys], ``v`` [chunks, keys, 64]."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, plgpu.RefType(_TILES)),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=WGMMA),
    )
    def issue(_, values, p, v):
        v = mgpu.utils.memref_transpose(_squeeze(v), (1, 0, 2, 3))
        return _group(mgpu.WGMMAAccumulator.from_registers(values), p, v)

    return issue(values, p, v)


def _squeeze(x):
    """[chunks, rows / 8, 1, 8, 64] without the one."""
    return mgpu.utils.memref_slice(x, (slice(None), slice(None), 0))


def _group(acc, a, b):
    """Issue ``acc + a b`` and end the group. Tiles of ``a`` and ``b`` lie anywhere."""

    acc = mgpu.wgmma(acc, a, b)
    nvvm.wgmma_commit_group_sync_aligned()
    return acc.value


def any_score_above(x: jax.Array, bound: float, *after: jax.Array) -> jax.Array:
    """Whether a number of a warp's is above a positive ``bound``; each warp asks for its own.

    Such numbers are ordered as their bits are, and the largest of three integers is one
    instruction. ``after``, whose numbers are not negative, are looked at as well: else the
    assembler would begin what they come from only when the answer is there.
    """
    bits = int(np.float32(bound).view(np.int32))

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * (1 + len(after)), return_type=inline.NUMBER)
    def vote(_, *arrays):

        words, *others = (
            [w for register in a.registers.flat for w in inline.words(register)] for a in arrays
        )
        others = [w for found in others for w in found]
        signs = "".join(f"setp.lt.or.s32 p, ${2 + i}, 0, p;" for i in range(len(others)))
        tops, rest = words[:4], words[4:]  # four chains, two words a step
        for i in range(0, len(rest), 2):
            for w in rest[i : i + 2]:
                tops[i // 2 % 4] = arith.maxsi(tops[i // 2 % 4], w)
        top = functools.reduce(arith.maxsi, tops)
        tests = f"setp.gt.s32 p, $1, {bits}; {signs}"
        return inline.any_lane(tests, [top, *others], "r" + ",r" * len(others))

    return vote(x, *after) != 0


def store_live_rows(x: jax.Array, lse: jax.Array, out, lse_out, row, live, head) -> None:
    """``out[row:row + live, head] = x``, the same of ``lse``; other rows are not touched."""

    @plgpu.inline_mgpu(
        arg_types=(
            WGMMA,
            ROW,
            plgpu.RefType(),
            plgpu.RefType(),
            inline.SCALAR,
            inline.SCALAR,
            inline.SCALAR,
        )
    )
    def store(_, x, lse, out, lse_out, row, live, head):
        _store(x, lse, out, lse_out, *(a.registers.item() for a in (row, live, head)))

    store(x, lse, out, lse_out, row, live, head)


def _store(x, lse, out, lse_out, row, live, head) -> None:
    """A thread has rows ``r`` and ``r + 8``, of each two of every eight columns."""

    utils, less, equal = mgpu.utils, arith.CmpIPredicate.slt, arith.CmpIPredicate.eq
    _, heads, v = ir.MemRefType(out.type).shape
    size = utils.bytewidth(x.mlir_dtype)
    number, wide = inline.constant, inline.wide

    def place(ref, element, size):
        return inline.address(ref, arith.muli(element, number(size, 64)))

    tid = utils.thread_idx()
    lane = arith.andi(tid, number(31))
    warp = arith.andi(arith.shrui(tid, number(5)), number(3))
    quad, odd = arith.andi(lane, number(3)), arith.andi(lane, number(1))
    r = arith.addi(arith.muli(warp, number(16)), arith.shrui(lane, number(2)))
    exists = [arith.cmpi(less, arith.addi(r, number(8 * i)), live) for i in range(2)]
    vector = arith.muli(wide(arith.addi(row, r)), number(heads, 64))
    vector = arith.addi(vector, wide(head))  # number of the pair of token and head
    if size == 4:
        column, pieces = arith.shli(quad, number(1)), _registers(x)
    else:
        high = arith.shrui(quad, number(1))
        column = arith.addi(arith.muli(odd, number(8)), arith.muli(high, number(4)))
        pieces = _paired(_registers(x), arith.cmpi(equal, odd, number(1)))
    where = place(out, arith.addi(arith.muli(vector, number(v, 64)), wide(column)), size)
    for (j, i), words in pieces.items():
        _send(where, 8 * (j + i * heads * v) * size, words, exists[i])
    where, first = place(lse_out, vector, 4), arith.cmpi(equal, quad, number(0))
    for i, register in enumerate(lse.registers.flat):
        _send(where, 8 * i * heads * 4, inline.words(register), arith.andi(first, exists[i]))


def _registers(x) -> dict[tuple[int, int], list]:
    """``{(j, i): words}``: of columns ``8 j`` and on, in row ``r + 8 i``."""
    found = {}
    for place in np.ndindex(x.registers.shape):
        numbers = [k for k, n in zip(place, x.registers.shape, strict=True) if n > 1]
        found[tuple(numbers)] = inline.words(x.registers[place])
    assert set(found) == {(j, i) for j in range(x.shape[1] // 8) for i in range(2)}
    return found


def _paired(registers: dict, odd) -> dict[tuple[int, int], list]:
    """Four columns of every other tile instead of two of each: four threads fill a sector."""

    found = {}
    for (j, i), (a,) in registers.items():
        if j % 2:
            continue
        (b,) = registers[j + 1, i]
        mine, other = arith.select(odd, b, a), arith.select(odd, a, b)
        other = mgpu.utils.shfl_bfly(other, 1)
        found[j, i] = [arith.select(odd, other, mine), arith.select(odd, mine, other)]
    return found


def _send(where, offset: int, words: list, predicate) -> None:
    """Store one or two words if ``predicate`` holds."""

    kind = {1: "b32", 2: "v2.b32"}[len(words)]
    names = ", ".join(f"${2 + i}" for i in range(len(words)))
    inline.asm(
        f"""{{
        .reg .pred p;
        setp.ne.u32 p, $1, 0;
        @p st.global.{kind} [$0+{offset}], {{{names}}};
        }}""",
        [where, arith.extui(ir.IntegerType.get_signless(32), predicate), *words],
        "l,r," + ",".join("r" * len(words)) + ",~{memory}",
    )


def draw(counter, place) -> None:
    """Add one to ``counter[0]`` and put its old value into ``place[0]``, by one warp."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add(_, counter, place):
        inline.asm(
            """{
            .reg .pred p;
            .reg .u32 x;
            mov.u32 x, %laneid;
            setp.eq.u32 p, x, 0;
            @p atom.global.relaxed.gpu.add.u32 x, [$0], 1;
            @p st.shared.u32 [$1], x;
            bar.warp.sync 0xffffffff;
            }""",
            [mgpu.utils.memref_ptr(counter), mgpu.utils.memref_ptr(place)],
            "l,r,~{memory}",
        )

    add(counter, place)


def zero_rows_from(x, first) -> None:
    """Zeros from row ``first`` on in a buffer of rows of 128 bytes, by one warp."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TILES), inline.SCALAR))
    def clear(_, x, first):

        tiles, _, rows, _ = ir.MemRefType(x.type).shape
        inline.asm(
            f"""{{
            .reg .pred p;
            .reg .u32 at, end, lane, zero;
            .reg .u64 place;
            mov.u32 lane, %laneid;
            max.s32 at, $1, 0;
            shl.b32 at, at, 7;
            mad.lo.u32 at, lane, 16, at;
            mov.u32 end, {tiles * rows * 128};
            mov.u32 zero, 0;
            AGAIN:
            setp.ge.u32 p, at, end;
            @p bra DONE;
            cvt.u64.u32 place, at;
            add.u64 place, place, $0;
            st.shared.v4.u32 [place], {{zero, zero, zero, zero}};
            add.u32 at, at, 512;
            bra AGAIN;
            DONE:
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            }}""",
            [mgpu.utils.memref_ptr(x), first.registers.item()],
            "l,r,~{memory}",
        )

    clear(x, first)
