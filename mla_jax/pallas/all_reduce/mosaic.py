"""Sums over devices by a kernel that reads the memory of the others: Pallas Mosaic GPU.

A step of decodes adds up few rows twice a layer. XLA has NCCL do it, and puts no call of NCCL's into
a CUDA graph: the host cuts the step at every sum. This kernel is a part of the graph.

A thread block has a row, a warpgroup 1024 of its channels. Each thread reads its channels where
every device has them and adds them up in float32, in the same order everywhere: all devices get the
same bits. Before the kernel starts, JAX's launch waits for all devices. Before it ends, a block
waits until all devices have read its row of what this one has: it may be overwritten from then on.
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

__all__ = ["CHANNELS", "all_reduce"]

CHANNELS = 1024
"""Of a warpgroup: 16 bytes for each thread, from each device."""

WARPS = 4
"""Of a warpgroup."""

LAYOUT = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=CHANNELS // 128)

TOGETHER = 15
"""A hardware barrier of the block; Mosaic has one for each of up to eight warpgroups, from 1 on."""


def all_reduce(x: Hidden, *, axis: str, then: AddNorm | None) -> Hidden | tuple[Hidden, Hidden]:
    """``ref.all_reduce``, added up in float32 and rounded once."""
    rows, hidden = x.shape
    groups = hidden // CHANNELS
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    facts = {"axis": axis, "devices": lax.axis_size(axis), "groups": groups}
    if then is None:
        body, given, returned = functools.partial(_sum, **facts), (x,), out
    else:
        body = functools.partial(_sum_norm, eps=then.eps, **facts)
        given, returned = (x, then.residual, then.gain), (out, out)
    run = lib.kernel(
        body,
        out_type=returned,
        grid=(rows,),
        grid_names=("row",),
        num_threads=groups,
        thread_name="wg",
        scratch_types={
            "squares": plgpu.SMEM((WARPS * groups,), jnp.float32),
            "read": plgpu.SemaphoreType.REGULAR,
        },
        kernel_name="mla_all_reduce",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return run(*given)


def _sum(mine, out, *, squares, read, **facts) -> None:
    del squares
    row, columns = _place()
    total = _total(mine, row, columns, facts)
    lib.sync(TOGETHER, 128 * facts["groups"])
    _tell(read, facts)
    out[row, columns] = total.astype(out.dtype)
    _await(read, facts)


def _sum_norm(mine, residual, gain, h_out, x_out, *, squares, read, eps, **facts) -> None:
    """A sum, added to the residual and rounded; and the norm of that."""
    row, columns = _place()
    before = _load(residual, row, columns)
    factor = plgpu.load(gain.at[columns], layout=LAYOUT, optimized=True).astype(jnp.float32)
    y = _total(mine, row, columns, facts).astype(h_out.dtype).astype(jnp.float32)
    h = (before + y).astype(h_out.dtype)
    wide = h.astype(jnp.float32)
    _sum_of_warps(wide * wide, squares)
    lib.sync(TOGETHER, 128 * facts["groups"])
    _tell(read, facts)
    parts = [squares[i] for i in range(WARPS * facts["groups"])]
    square = functools.reduce(jnp.add, parts) / (CHANNELS * facts["groups"])
    h_out[row, columns] = h
    x_out[row, columns] = (factor * (wide * lax.rsqrt(square + eps))).astype(x_out.dtype)
    _await(read, facts)


def _place():
    """The row of this block, and the channels of this warpgroup."""
    return lax.axis_index("row"), pl.ds(lax.axis_index("wg") * CHANNELS, CHANNELS)


def _load(ref, row, columns) -> jax.Array:
    return plgpu.load(ref.at[row, columns], layout=LAYOUT, optimized=True).astype(jnp.float32)


def _total(mine, row, columns, facts) -> jax.Array:
    """What all devices have of it, added up in float32: all is asked for before one has come.

    Mosaic's own loads of other devices' memory are of two bytes.
    """
    axis, devices, dtype = facts["axis"], facts["devices"], mine.dtype
    refs = [plgpu.remote_ref(mine, {axis: device}) for device in range(devices)]
    begin = row * mine.shape[1] + columns.start
    code, operand_kinds = _reads(devices)
    words = ", ".join(["i32"] * (4 * devices))

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * devices, inline.SCALAR),
        return_type=[plgpu.ShapeDtypeStruct((CHANNELS,), dtype, layout=LAYOUT)] * devices,
    )
    def read(_, *operands):
        first = operands[-1].registers.item()
        at = [mgpu.utils.memref_ptr(ref) for ref in operands[:-1]]
        found = inline.asm(code, [*at, first], operand_kinds, result=f"struct<({words})>")
        words_of = inline.unpacked(found, 4 * devices)
        return [inline.channels(words_of[4 * i : 4 * i + 4], dtype) for i in range(devices)]

    return functools.reduce(jnp.add, [x.astype(jnp.float32) for x in read(*refs, begin)])


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


def _reads(devices: int) -> tuple[str, str]:
    """Assembly that reads a thread's 16 bytes of each device, and what operands it has.

    Results are words; operands the arrays' addresses, and the number of the first element.
    """
    count = 4 * devices
    loads = "".join(
        f"add.s64 at, ${count + i}, offset;"
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(f'${4 * i + k}' for k in range(4))}}}, [at];"
        for i in range(devices)
    )
    code = f"""{{
        .reg .b32 first, lane;
        .reg .b64 at, offset;
        mov.u32 lane, %tid.x;
        and.b32 lane, lane, 127;
        mad.lo.s32 first, lane, 8, ${count + devices};
        mul.wide.s32 offset, first, 2;
        {loads}
        }}"""
    operands = ",".join([*["=&r"] * count, *["l"] * devices, "r"])
    return code, operands


def _tell(read, facts) -> None:
    """Each other device, that this one has read its row: one by each warpgroup, at the same time."""
    here, wg = lax.axis_index(facts["axis"]), lax.axis_index("wg")
    for step in range(1, facts["devices"]):

        @pl.when(wg == (step - 1) % facts["groups"])
        def _(step=step):
            other = {facts["axis"]: lax.rem(here + step, facts["devices"])}
            pl.semaphore_signal(read, device_id=other, device_id_type=pl.DeviceIdType.MESH)


def _await(read, facts) -> None:
    """Until all other devices have read this one's row."""

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        pl.semaphore_wait(read, facts["devices"] - 1)
