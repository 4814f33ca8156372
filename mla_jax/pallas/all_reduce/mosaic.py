"""Sums over devices by a kernel that writes into the memory of the others: Pallas Mosaic GPU.

A step of decodes adds up few rows twice a layer. XLA has NCCL do it, and puts no call of NCCL's
into a CUDA graph: the host cuts the step at every sum. This kernel is a part of the graph.

A thread block has a row, a warpgroup 1024 of its channels. Of each sum a device

1. writes its row into its slot in the memory of every device (its own too),
2. sets its flag there to the number of the sum, behind all of these writes,
3. waits for the flags of all devices in its own memory,
4. reads the slots and adds them up in float32, in the same order everywhere: all get the same bits.

Two sets of slots take turns. Who writes into a slot again has seen all flags of the sum between,
which come behind the reads of the sum before. Flags and the count of sums, one for each row, only
grow: nothing is ever reset.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.axes import AddNorm, Hidden
from mla_jax.peers import FLAGS, ROW_BYTES, SLOTS, Peers, rows_of

__all__ = ["CHANNELS", "all_reduce"]

CHANNELS, WARPS = 1024, 4
"""Of a warpgroup: 16 bytes for each thread."""

LAYOUT = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=CHANNELS // 128)

TOGETHER = 15
"""A hardware barrier of the block; Mosaic has one for each of up to eight warpgroups, from 1 on."""


def all_reduce(
    x: Hidden, *, axis: str, peers: Peers, then: AddNorm | None
) -> Hidden | tuple[Hidden, Hidden]:
    """``ref.all_reduce``, added up in float32 and rounded once."""
    rows, hidden = x.shape
    groups, devices = hidden // CHANNELS, lax.axis_size(axis)
    if not rows:
        return x if then is None else (x, x)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    facts = {"groups": groups, "devices": devices}
    if then is None:
        body, given, returned = functools.partial(_sum, **facts), (x, peers.table), out
    else:
        body = functools.partial(_sum_norm, eps=then.eps, **facts)
        given, returned = (x, peers.table, then.residual, then.gain), (out, out)
    run = lib.kernel(
        body,
        out_type=returned,
        grid=(rows,),
        grid_names=("row",),
        num_threads=groups,
        thread_name="wg",
        scratch_types={"squares": plgpu.SMEM((WARPS * groups,), jnp.float32)},
        kernel_name="mla_all_reduce",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return run(*given)


def _sum(mine, table, out, *, squares, **facts) -> None:
    del squares
    row, columns = _place()
    out[row, columns] = _total(mine, table, row, columns, **facts).astype(out.dtype)


def _sum_norm(mine, table, residual, gain, h_out, x_out, *, squares, eps, **facts) -> None:
    """A sum, added to the residual and rounded; and the norm of that."""
    row, columns = _place()
    before = _load(residual.at[row, columns])
    factor = _load(gain.at[columns])
    y = _total(mine, table, row, columns, **facts).astype(h_out.dtype).astype(jnp.float32)
    h = (before + y).astype(h_out.dtype)
    wide = h.astype(jnp.float32)
    _sum_of_warps(wide * wide, squares)
    lib.sync(TOGETHER, 128 * facts["groups"])
    parts = [squares[i] for i in range(WARPS * facts["groups"])]
    square = functools.reduce(jnp.add, parts) / (CHANNELS * facts["groups"])
    h_out[row, columns] = h
    x_out[row, columns] = (factor * (wide * lax.rsqrt(square + eps))).astype(x_out.dtype)


def _place():
    """The row of this block, and the channels of this warpgroup."""
    return lax.axis_index("row"), pl.ds(lax.axis_index("wg") * CHANNELS, CHANNELS)


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=True).astype(jnp.float32)


def _total(mine, table, row, columns, *, groups: int, devices: int) -> jax.Array:
    """What all devices have of it, added up in float32."""
    dtype = mine.dtype
    own = plgpu.load(mine.at[row, columns], layout=LAYOUT, optimized=True)
    code, constraints = _exchange(groups, devices)
    kinds = ", ".join(["i32"] * (4 * devices))

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, plgpu.RefType(), inline.SCALAR),
        return_type=[plgpu.ShapeDtypeStruct((CHANNELS,), dtype, layout=LAYOUT)] * devices,
    )
    def exchange(_, own, table, row):
        words = [word for register in own.registers.flat for word in inline.words(register)]
        given = [*words, mgpu.utils.memref_ptr(table), row.registers.item()]
        found = inline.asm(code, given, constraints, result=f"struct<({kinds})>")
        words = inline.unpacked(found, 4 * devices)
        return [inline.channels(words[4 * i : 4 * i + 4], dtype) for i in range(devices)]

    parts = exchange(own, table, row)
    return functools.reduce(jnp.add, [x.astype(jnp.float32) for x in parts])


def _exchange(groups: int, devices: int) -> tuple[str, str]:
    """Assembly of one sum of a block's row, and what operands it has.

    Results are the words of all devices, operands this thread's four, the table and the row.
    """
    count, rows = 4 * devices, rows_of(devices)
    table, row = f"${count + 4}", f"${count + 5}"
    mine = ", ".join(f"${count + i}" for i in range(4))
    together = f"barrier.cta.sync {TOGETHER}, {128 * groups};"

    def slot(number: str, to: str) -> str:
        """The slot of a device, this thread's part of it, from the beginning of a memory on."""
        return f"""
        mad.lo.u32 t, turn, {devices}, {number};
        mad.lo.u32 t, t, {rows}, {row};
        mul.wide.u32 {to}, t, {ROW_BYTES};
        add.s64 {to}, {to}, part;"""

    write = "".join(
        f"""
        ld.global.b64 peer, [{table}+{8 + 8 * i}];
        add.s64 at, peer, place;
        st.relaxed.sys.global.v4.b32 [at], {{{mine}}};"""
        for i in range(devices)
    )
    read = "".join(
        f"""{slot(str(i), "at")}
        add.s64 at, at, own;
        ld.relaxed.sys.global.v4.b32 {{{", ".join(f"${4 * i + k}" for k in range(4))}}}, [at];"""
        for i in range(devices)
    )
    code = f"""{{
        .reg .pred p;
        .reg .b32 tid, me, before, now, turn, t;
        .reg .b64 own, peer, part, place, counter, at;
        mov.u32 tid, %tid.x;
        ld.global.b32 me, [{table}];
        mul.wide.u32 at, me, 8;
        add.s64 at, at, {table};
        ld.global.b64 own, [at+8];
        mul.wide.u32 counter, {row}, 4;
        add.s64 counter, counter, own;
        ld.relaxed.sys.global.b32 before, [counter];
        add.u32 now, before, 1;
        and.b32 turn, before, 1;
        mul.wide.u32 part, tid, 16;
        add.s64 part, part, {SLOTS};
        {slot("me", "place")}
        {write}
        {together}
        setp.ge.u32 p, tid, {devices};
        @p bra TOLD;
        mul.wide.u32 at, tid, 8;
        add.s64 at, at, {table};
        ld.global.b64 peer, [at+8];
        mad.lo.u32 t, me, {rows}, {row};
        mul.wide.u32 at, t, 4;
        add.s64 at, at, peer;
        st.release.sys.global.b32 [at+{FLAGS}], now;
        mad.lo.u32 t, tid, {rows}, {row};
        mul.wide.u32 at, t, 4;
        add.s64 at, at, own;
        WAIT:
        ld.acquire.sys.global.b32 t, [at+{FLAGS}];
        sub.s32 t, t, now;
        setp.lt.s32 p, t, 0;
        @p bra WAIT;
        TOLD:
        {together}
        setp.eq.u32 p, tid, 0;
        @p st.relaxed.sys.global.b32 [counter], now;
        {read}
        }}"""
    constraints = [*["=&r"] * count, *["r"] * 4, "l", "r", "~{memory}"]
    return code, ",".join(constraints)


def _sum_of_warps(x: jax.Array, sums) -> None:
    """The sum of each warp's elements of ``x``. Warpgroups that add up at the same time write into
    the same memory with Mosaic's own sums.
    """

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))
    def add_up(_, x, sums):
        (register,) = x.registers.flat
        count = register.type.shape[0]
        each = [inline.vectors.extract(register, [], [i]) for i in range(count)]
        total = functools.reduce(inline.arith.addf, each)
        for lanes in (16, 8, 4, 2, 1):
            total = inline.arith.addf(total, mgpu.utils.shfl_bfly(total, lanes))
        code = """{
            .reg .pred p;
            .reg .b32 at, lane, thread;
            mov.u32 thread, %tid.x;
            and.b32 lane, thread, 31;
            setp.eq.u32 p, lane, 0;
            cvt.u32.u64 at, $0;
            shr.u32 thread, thread, 5;
            mad.lo.u32 at, thread, 4, at;
            @p st.shared.f32 [at], $1;
            }"""
        inline.asm(code, [mgpu.utils.memref_ptr(sums), total], "l,f,~{memory}")

    add_up(x, sums)
