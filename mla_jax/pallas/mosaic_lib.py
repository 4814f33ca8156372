"""Shared vocabulary of the Pallas Mosaic GPU kernels for Hopper.

``simulate`` marks a run in JAX's GPU interpreter on a CPU. It knows neither products with a
left operand in registers nor accumulators carried from outside, so the three product helpers
have a second, slower form for it. Everything else is the same program.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false
# pyright: reportReturnType=false
# pyright: reportInvalidTypeForm=false
# pyright: reportUnusedExpression=false

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.errors import ArgumentError
from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import round_up

__all__ = [
    "LAG",
    "LOWEST",
    "ROW",
    "SHARED_MEMORY",
    "Turns",
    "WGMMA",
    "accumulate",
    "afresh",
    "any_above",
    "any_below_one",
    "any_of_warp_above",
    "arrive",
    "await_uses",
    "barrier",
    "clear_rows",
    "fence",
    "fill_rows",
    "fold_columns",
    "in_place",
    "issue",
    "kernel",
    "landed",
    "lowered_once",
    "layer_of",
    "matmul",
    "matmul_registers",
    "multipliers_and_loader",
    "row_vector",
    "shared_bytes",
    "store_rows",
    "swizzled",
    "sync",
    "tile",
    "with_layer",
]

WGMMA = plgpu.Layout.WGMMA
"""Registers of a (64, 8n) tile: accumulators and 16-bit left operands."""

ROW = plgpu.Layout.WGMMA.reduce(1)
"""Registers of one value per row of such a tile."""

SHARED_MEMORY = 232448
"""Bytes of shared memory that one thread block may use on sm_90, where the device does not say."""

TURNS = 8
"""The first of the hardware barriers of warpgroups that take turns; Mosaic has 0 to 3."""

ALIGNMENT = 256
"""Of which multiple the address of a Mosaic kernel's operand must be."""

LOWEST = -1.0e30
"""A first running maximum of scores: finite, so that exp2(-inf - LOWEST) = 0."""

LAG = 8.0
"""Powers of two that a running maximum may lag behind: few blocks search for it and rescale sums.
Weights are at most 2**LAG, which 16 bits and float32 sums hold as exactly as 1."""


def lowered_once(*static: str) -> Callable[[Callable], Callable]:
    """``jax.jit`` with these static arguments: a kernel that several layers call is lowered once.

    Lowering a Mosaic kernel takes a second or more of Python, and a program has its text once for
    every call that JAX does not know to be the same.
    """
    return functools.partial(jax.jit, static_argnames=static)


def kernel(body: Callable, *, sliced: Sequence[int] = (), **options: Any) -> Callable:
    """``plgpu.kernel`` whose operands and results are never a slice of another array.

    XLA may pass a kernel a slice of an array in place, and may have it write its result into one,
    wherever the slice begins; Mosaic refuses what is not aligned to 256 bytes. So operands and
    results are kept apart from other arrays. For refs see ``in_place``. ``sliced`` are positions
    of operands that may be slices of stacks: those of whole multiples of 256 bytes are passed in
    place, for a copy of a layer's weights takes as long as reading them.

    Raises:
        ArgumentError: what it allocates is more shared memory than a thread block of the device
            may have, or an array varies between devices and ``jax.shard_map`` checks that.
    """
    _check_shared_memory(options, DeviceInfo.current())
    run = plgpu.kernel(body, **options)

    def call(*operands):
        if any(map(_varies, operands)):
            raise ArgumentError(
                "a Mosaic kernel under jax.shard_map",
                "check_vma=True",
                "check_vma=False",
                'Mosaic kernels cannot be checked by shard_map; backend="xla" runs with the check.',
            )
        whole = [
            lax.optimization_barrier(x)
            if isinstance(x, jax.Array) and not (i in sliced and x.nbytes % ALIGNMENT == 0)
            else x
            for i, x in enumerate(operands)
        ]
        return jax.tree.map(lax.optimization_barrier, run(*whole))

    return call


def _check_shared_memory(options: dict[str, Any], device: DeviceInfo) -> None:
    params = options.get("compiler_params") or plgpu.CompilerParams()
    given = shared_bytes(options.get("scratch_types", {})) + params.reduction_scratch_bytes
    if given > device.shared_memory > 0:  # 0: unknown, and the assembler refuses
        raise ArgumentError(
            f"{options['kernel_name']}: shared memory of a thread block",
            f"{given} bytes",
            f"{device.shared_memory} bytes on {device.kind}",
            "Smaller blocks or fewer stages in the tuning would fit.",
        )


def _varies(x: object) -> bool:
    """Whether ``jax.shard_map`` keeps account of devices among which an array differs."""
    return bool(jax.typeof(x).manual_axis_type.varying)


def in_place(
    kernel: Callable, operands: Sequence[jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """``arrays`` as ``kernel`` leaves them, which gets refs to them behind its operands."""
    refs = [jax.new_ref(lax.optimization_barrier(x)) for x in arrays]
    kernel(*operands, *refs)
    return [lax.optimization_barrier(jax.freeze(ref)) for ref in refs]


def with_layer(body: Callable, layer: jax.Array | None) -> tuple[Callable, tuple[jax.Array, ...]]:
    """The body of a kernel whose first parameter is a ref to the layer's number, and the operand
    for it; of a cache of one layer the parameter is None, and the kernel has no such operand.
    """
    if layer is None:
        return functools.partial(body, None), ()
    return body, (layer.reshape(1),)


def layer_of(layer_g, layers: int):
    """The number of the layer in its stack, clamped; 0 where there is no stack."""
    return 0 if layer_g is None else jnp.clip(layer_g[0], 0, layers - 1)


def swizzled(shape: Sequence[int], dtype: DTypeLike) -> plgpu.SMEM:
    """A shared-memory buffer that tensor-core products and the copy engine can both use."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def barrier(
    arrivals: int = 1, count: int = 1, *, axis: str | None = None
) -> plgpu.Barrier | plgpu.ClusterBarrier:
    """``count`` barriers, each of which lets go after so many arrivals of a thread block.

    With the ``axis`` of a cluster every thread block of it must arrive, and all are let go.
    """
    sizes = {"num_arrivals": arrivals, "num_barriers": count}
    if axis is None:
        return plgpu.Barrier(**sizes)
    return plgpu.ClusterBarrier(collective_axes=(axis,), **sizes)


def await_uses(barriers, uses) -> None:
    """Wait until the last slots of a ring are free, those that none of its ``uses`` took again."""
    count = jnp.int32(barriers.shape[0])

    @pl.loop(jnp.maximum(uses - count, 0), uses)
    def _(i):
        plgpu.barrier_wait(barriers.at[lax.rem(i, count)])


def multipliers_and_loader(
    count: int, *, registers: tuple[int, int], multiplier: Callable[[Any], Any],
    loader: Callable[[], Any], simulate: bool,
) -> None:  # fmt: skip
    """Warpgroups below ``count`` run what ``multiplier(number)`` gives, one warp of the next one
    what ``loader()`` gives. ``registers``: of a thread of the loader, and of a multiplier.

    Both are made where they run, so that no register holds before what they read.
    """
    wg = lax.axis_index("wg")

    @pl.when(wg < count)
    def _():
        plgpu.set_max_registers(registers[1], action="increase")
        multiplier(wg).run()

    @pl.when(wg == count)
    def _():
        plgpu.set_max_registers(registers[0], action="decrease")
        role = loader()
        if simulate:  # there are no warps
            role.run()
        else:
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(role.run))


def shared_bytes(scratch: dict) -> int:
    """Shared memory of a scratch dictionary: buffers in whole kilobytes, 8 bytes a barrier."""
    total = 0
    for item in scratch.values():
        if isinstance(item, plgpu.Barrier | plgpu.ClusterBarrier):
            total += 8 * math.prod(item.num_barriers)
        else:
            total += round_up(math.prod(item.shape) * jnp.dtype(item.dtype).itemsize, 1024)
    return total


def row_vector(value, rows: int) -> jax.Array:
    """``rows`` copies of a number, one per row of a tile."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROW)


def tile(value, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """A tile of one number."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), WGMMA)


def fold_columns(x: jax.Array, columns: int, join: Callable = jnp.add) -> jax.Array:
    """Columns that are equal modulo ``columns`` joined to one, all inside a thread."""
    while x.shape[1] > columns:
        middle = x.shape[1] // 2
        x = join(x[:, :middle], x[:, middle:])
    return x


def fill_rows(x: jax.Array, columns: int) -> jax.Array:
    """A row vector repeated over ``columns`` columns; costs nothing in registers."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def landed(x: jax.Array, later: int) -> jax.Array:
    """``x``, of a group in flight, once at most the ``later`` groups behind it still are."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)
    )
    def wait(_, x):
        inline.nvvm.wgmma_wait_group_sync_aligned(later)
        return fragmented_array.optimization_barrier(x)  # no use of it before the wait

    return wait(x)


def matmul(acc, a, b, *, simulate: bool) -> None:
    """``acc += a b`` with both operands in shared memory; does not wait."""
    if simulate:  # plain loads, which the interpreter's race detector sees
        a[...], b[...]
        plgpu.commit_smem()
    plgpu.wgmma(acc, a, b)


def matmul_registers(acc, a: jax.Array, b, scratch) -> None:
    """``acc += a b`` with ``a`` in registers; ``scratch`` exists in the interpreter only."""
    if scratch is None:
        plgpu.wgmma(acc, a, b)
        return
    scratch[...] = a
    plgpu.commit_smem()
    matmul(acc, scratch, b, simulate=True)


def accumulate[A: (jax.Array, list[jax.Array])](
    acc: A, product: Callable[[Any], Any], *, simulate: bool
) -> A:
    """``acc`` plus the products that ``product(acc_ref)`` issues, or of each; waits for them."""
    if not simulate:
        return pl.run_state(product)(jax.tree.map(plgpu.ACC.init, acc))

    def total(refs):
        product(refs)
        return jax.tree.map(lambda ref: ref[...], refs)

    return jax.tree.map(
        jnp.add,
        acc,
        pl.run_scoped(total, jax.tree.map(lambda x: plgpu.ACC(x.shape, jnp.float32), acc)),
    )


def clear_rows(x, first) -> None:
    """Zeros from row ``first`` on in a swizzled buffer of 64 rows, and publish them.

    Keys that do not exist have a weight of zero, and zero times NaN would be NaN.
    """

    @pl.loop(0, x.shape[1] // 64)
    def _(c):
        ref = x.at[:, pl.ds(pl.multiple_of(c * 64, 64), 64)]
        v = plgpu.load(ref, layout=WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, (x.shape[0], 64), 0, layout=WGMMA)
        ref[...] = jnp.where(row < first, v, jnp.zeros_like(v))

    plgpu.commit_smem()


def store_rows(src, dst, start, count, *, rows: int, step: int) -> None:
    """Send rows ``[0, count)`` of a ``rows``-row buffer to ``dst`` from row ``start`` on.

    ``count`` is a traced multiple of the static ``step``; sizes of copies are static, so a
    partial tile goes out in powers of two. Rows behind ``count`` are not touched.
    """

    if rows <= dst.shape[0]:
        pl.when(count >= rows)(lambda: plgpu.copy_smem_to_gmem(src, dst.at[pl.ds(start, rows)]))

    size = rows // 2
    while size and size % step == 0:
        first = pl.multiple_of(count & -(2 * size) & (rows - 1), 2 * size)

        @pl.when((count < rows) & ((count & size) != 0))
        def _(first=first, size=size):
            part = pl.ds(first, size)
            plgpu.copy_smem_to_gmem(src.at[part], dst.at[pl.ds(start + first, size)])

        size //= 2


def afresh(x: jax.Array, *, simulate: bool) -> jax.Array:
    """``x``, equal in all threads of a warp, hidden from the hoisting of loop invariants.

    ``x`` is a warpgroup's number. What is computed from it is computed again in every turn of a
    loop: computing the descriptors of matrix products again, in registers of the warp, is faster
    than moving them there from registers of a thread.
    """
    if simulate:
        return x

    @plgpu.inline_mgpu(arg_types=(inline.SCALAR,), return_type=inline.NUMBER)
    def read(_, x):
        code = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        return inline.number(inline.asm(code, [x.registers.item()], "=r,r", result="i32"))

    return read(x)


def any_above(x: jax.Array, bound: float, *, simulate: bool) -> jax.Array:
    """Whether a value of a tile is above ``bound``; the warpgroup waits for itself."""
    if simulate:
        return jnp.where(x > bound, 1, 0).max() > 0  # not of a NaN

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=inline.NUMBER)
    def vote(_, x):
        values = [word for register in x.registers.flat for word in inline.words(register)]
        name = mgpu.utils.warpgroup_barrier_idx(sync=False)
        text = "\n".join(
            (
                "{ .reg .pred p;",
                inline.any_of("gt", repr(bound), len(values), first=2),
                "bar.red.or.pred p, $1, 128, p;",
                "selp.u32 $0, 1, 0, p; }",
            )
        )
        constraints = "=r,r" + ",r" * len(values)
        return inline.number(inline.asm(text, [name, *values], constraints, result="i32"))

    return vote(x) != 0


class Turns:
    """Of a role of warpgroups 0 and on, which issue products in turn; an interpreter needs none."""

    wg: Any
    simulate: bool

    @property
    def turns(self) -> int:
        """How many warpgroups take turns."""
        return 2

    def _take_turn(self) -> None:
        """Wait until the warpgroup before this one has given its turn."""
        if not self.simulate:
            sync(TURNS + self.wg, 256)

    def _give_turn(self) -> None:
        """Let the next warpgroup take its turn. It must, before it is given another."""
        if not self.simulate:
            following = (
                1 - self.wg if self.turns == 2 else lax.rem(self.wg + 1, jnp.int32(self.turns))
            )
            arrive(TURNS + following, 256)


def arrive(number, threads: int) -> None:
    """At a hardware barrier of so many threads: one instruction of a warp, and waiting ones wake
    sooner than at a barrier in shared memory.
    """
    _barrier("arrive", number, threads)


def sync(number, threads: int) -> None:
    """Arrive at a hardware barrier and wait until so many threads have."""
    _barrier("sync", number, threads)


def _barrier(verb: str, number, threads: int) -> None:
    @plgpu.inline_mgpu(arg_types=(inline.SCALAR,))
    def issue(_, number):
        code = f"barrier.cta.{verb} $0, {threads};"
        inline.asm(code, [number.registers.item()], "r,~{memory}")

    issue(number)


def fence(*, simulate: bool) -> None:
    """What a thread wrote to shared memory is there for products and copies that it lets go.

    Half of ``plgpu.commit_smem``: threads do not wait for each other. Enough before all of them
    arrive at a barrier.
    """
    if simulate:
        plgpu.commit_smem()
    else:
        issue("fence.proxy.async.shared::cta;")


def issue(text: str) -> None:
    """Run assembly that has no operands. The compiler moves no memory access across it."""

    @plgpu.inline_mgpu(arg_types=())
    def here(_):
        inline.asm(text, [], "~{memory}")

    here()


def any_of_warp_above(x: jax.Array, bound: float, *, simulate: bool) -> jax.Array:
    """Whether a value of a tile is above ``bound``; each warp asks for its own 16 rows."""
    if simulate:  # there are no warps: of the whole tile
        return jnp.where(x > bound, 1, 0).max() > 0

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=inline.NUMBER)
    def vote(_, x):
        words = [word for register in x.registers.flat for word in inline.words(register)]
        tests = inline.any_of("gt", repr(bound), len(words), first=1)
        return inline.any_lane(tests, words, ",".join("r" * len(words)))

    return vote(x) != 0


def lagging_top(
    x: jax.Array, top: jax.Array, factor: jax.Array | float, *, simulate: bool
) -> tuple[jax.Array, jax.Array]:
    """The running maximum of each row of ``x * factor``, and the factor of what came before.

    It rises only where a score is above it by ``LAG``, in base 2: in most blocks of keys no warp
    has anything to rescale.
    """

    def rise():
        found = x.max(axis=1) * factor
        found = jnp.where(found > top + LAG, found, top)
        return found, jnp.exp2(top - found)

    def stay():
        return top, row_vector(1.0, x.shape[0])

    above = fold_columns(x, 8, jnp.maximum) * factor - fill_rows(top, 8)
    return lax.cond(any_of_warp_above(above, LAG, simulate=simulate), rise, stay)


def any_below_one(x: jax.Array, layout=ROW) -> jax.Array:
    """Whether a value of one of a warp's rows is below one; each warp asks for its own rows.

    On the device only: the interpreter has no warps.
    """

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=inline.NUMBER)
    def vote(_, x):
        if layout == ROW:
            tests = "setp.lt.f32 p, $1, 0f3F800000; setp.lt.or.f32 p, $2, 0f3F800000, p;"
            return inline.any_lane(tests, list(x.registers.flat), "f,f")
        words = [word for register in x.registers.flat for word in inline.words(register)]
        tests = "setp.lt.f32 p, $1, 0f3F800000;" + "".join(
            f"setp.lt.or.f32 p, ${i}, 0f3F800000, p;" for i in range(2, 1 + len(words))
        )
        return inline.any_lane(tests, words, ",".join("r" * len(words)))

    return vote(x) != 0
