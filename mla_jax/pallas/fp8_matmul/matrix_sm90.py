"""Products of many e4m3 rows with one block-scaled e4m3 matrix on Hopper: Pallas Mosaic GPU.

A *tile* is 64 rows of each multiplier under 128 columns, a *step* 128 channels of it: one block of
scales. Rows are the rows of the tensor core's product, so a thread has two of them, and two factors
in a step::

  loader        one warp: for every tile and step the rows, their scales, and the weights
  multipliers   two or three warpgroups: the product of a step has a sum of its own, as the tensor
                core adds e4m3 products with 13 bits or so, and goes times the scales of its rows
                and of its block of weights to the sum in float32

The multipliers issue products in turn: one scales its product while those of others run. Tiles go
to thread blocks in turn, ``together`` tiles of rows one after the other under the same columns.

The bound: 8192 FLOP a cycle. A step of three multipliers takes 768 cycles, in which shared memory,
128 bytes a cycle, gives 72 KiB to the products and takes 40 KiB.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.types import SCALE_BLOCK, BlockScaled, cdiv

__all__ = ["COLUMNS", "ROWS", "Sizes", "multiply"]

ROWS = 64  # of a multiplier
COLUMNS = 128  # of a tile: one block of scales
SQUARE = 64  # columns that go to memory at a time
REGISTERS = 24, {2: 240, 3: 160}  # of a thread of the loader, and of one of so many multipliers

I32, F32 = jnp.int32, jnp.float32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a kernel is compiled for, besides dtypes and array shapes."""

    multipliers: int
    stages: int  # steps in shared memory
    workers: int  # thread blocks: as many as there are multiprocessors
    together: int  # tiles of rows

    @property
    def rows(self) -> int:
        """Of a tile."""
        return ROWS * self.multipliers


def scratch(sizes: Sizes, out: Any) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    stages, f8 = sizes.stages, jnp.float8_e4m3fn
    return {
        "w": lib.swizzled((stages, COLUMNS, SCALE_BLOCK), f8),
        "x": lib.swizzled((stages, sizes.rows, SCALE_BLOCK), f8),
        "x_scale": plgpu.SMEM((stages, sizes.rows), F32),
        "y": lib.swizzled((sizes.multipliers, COLUMNS // SQUARE, ROWS, SQUARE), out),
        "full": lib.barrier(3, stages),  # copy engine -> multipliers
        "free": lib.barrier(sizes.multipliers, stages),  # multipliers -> loader
    }


@lib.lowered_once("sizes", "out_dtype", "interpret")
def multiply(
    x: jax.Array, x_scale: jax.Array, weight: BlockScaled, *, sizes: Sizes, out_dtype: Any,
    interpret: object = None,
) -> jax.Array:  # fmt: skip
    """``x weight^T``, rounded once.

    ``x`` [rows, channels] e4m3, ``x_scale`` [channels / 128, rows], ``weight`` [columns, channels].
    """
    (rows, channels), columns = x.shape, weight.values.shape[0]
    down, across = cdiv(rows, sizes.rows), cdiv(columns, COLUMNS)
    workers = min(sizes.workers, down * across)

    def body(x_g, x_scale_g, w_g, scale_g, y_g, **refs):
        simulate = interpret is not None

        def facts() -> dict[str, Any]:
            """What both roles know; each reads it, so that no register holds it before."""
            worker = lax.axis_index("worker")
            rest = jnp.int32(down * across + workers - 1) - worker
            return dict(
                sizes=sizes, down=down, across=across, workers=workers, worker=worker,
                tiles=lax.div(rest, jnp.int32(workers)), steps=channels // SCALE_BLOCK, refs=refs,
                simulate=simulate,
            )  # fmt: skip

        lib.multipliers_and_loader(
            sizes.multipliers,
            registers=(REGISTERS[0], REGISTERS[1][sizes.multipliers]),
            multiplier=lambda wg: _Multiplier(wg=wg, scale=scale_g, out=y_g, **facts()),
            loader=lambda: _Loader(x=x_g, x_scale=x_scale_g, weight=w_g, **facts()),
            simulate=simulate,
        )

    kernel = lib.kernel(
        body,
        sliced=(2, 3),
        out_type=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        scratch_types=scratch(sizes, out_dtype),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=sizes.multipliers + 1,
        thread_name="wg",
        kernel_name="mla_fp8_matmul",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return kernel(x, x_scale, weight.values, weight.scale)


@dataclass(frozen=True, kw_only=True)
class _Role:
    """What both roles know."""

    sizes: Sizes
    down: int  # tiles of rows
    across: int  # and of columns
    workers: int  # thread blocks
    worker: Any  # the number of this one
    tiles: Any  # of the thread block
    steps: int  # of a tile
    refs: dict[str, Any]
    simulate: bool

    def place(self, t):
        """``(first row, number of the tile of columns)`` of the thread block's tile ``t``."""
        number, whole = self.worker + t * self.workers, jnp.int32(self.sizes.together)
        first = lax.div(number, whole * self.across) * whole
        together = jnp.minimum(whole, self.down - first)
        local = number - first * self.across
        block = lax.div(local, together)
        return (first + local - block * together) * self.sizes.rows, block

    def slot(self, g):
        """Of step ``g`` of the thread block."""
        return lax.rem(g, jnp.int32(self.sizes.stages))


@dataclass(frozen=True, kw_only=True)
class _Loader(_Role):
    """One warp of the last warpgroup."""

    x: Any
    x_scale: Any
    weight: Any

    def run(self) -> None:
        pl.loop(0, self.tiles)(self._tile)
        lib.await_uses(self.refs["free"], self.tiles * self.steps)

    def _tile(self, t) -> None:
        row, block = self.place(t)
        rows = pl.ds(row, self.sizes.rows)
        columns = pl.ds(block * COLUMNS, COLUMNS)

        @pl.loop(0, self.steps)
        def _(k):
            g = t * self.steps + k
            s = self.slot(g)
            full, free = (self.refs[name].at[s] for name in ("full", "free"))
            pl.when(g >= self.sizes.stages)(lambda: plgpu.barrier_wait(free))
            channels = pl.ds(k * SCALE_BLOCK, SCALE_BLOCK)
            w, x, x_scale = (self.refs[name].at[s] for name in ("w", "x", "x_scale"))
            plgpu.copy_gmem_to_smem(self.weight.at[columns, channels], w, full)
            plgpu.copy_gmem_to_smem(self.x.at[rows, channels], x, full)
            plgpu.copy_gmem_to_smem(self.x_scale.at[k, rows], x_scale, full)


@dataclass(frozen=True, kw_only=True)
class _Multiplier(_Role, lib.Turns):
    """64 rows of every tile."""

    wg: Any
    scale: Any  # of the weight
    out: Any

    @property
    def turns(self) -> int:
        return self.sizes.multipliers

    def run(self) -> None:
        last = self.wg == self.sizes.multipliers - 1
        pl.when(last)(self._give_turn)  # the first one is that of warpgroup 0
        lax.fori_loop(0, self.tiles, self._tile, jnp.int32(0))
        pl.when(self.wg == 0)(self._take_turn)  # the last warpgroup has given one more
        plgpu.wait_smem_to_gmem(0)

    def _tile(self, t, s):
        """Tile ``t``, whose first step is in slot ``s``; gives the slot behind its last step."""
        row, block = self.place(t)

        def step(k, carry):
            total, here, s = carry
            after = self.scale[block, jnp.minimum(k + 1, self.steps - 1)]
            plgpu.barrier_wait(self.refs["full"].at[s])
            mine = pl.ds(self.wg * ROWS, ROWS)
            by_row = plgpu.load(self.refs["x_scale"].at[s, mine], layout=lib.ROW)
            product = self._product(self.refs["x"].at[s, mine], self.refs["w"].at[s])
            plgpu.barrier_arrive(self.refs["free"].at[s])
            total += product * lib.fill_rows(by_row * here, COLUMNS)
            return total, after, jnp.where(s + 1 == self.sizes.stages, 0, s + 1)

        zeros = lib.tile(0.0, (ROWS, COLUMNS), F32)
        total, _, s = lax.fori_loop(0, self.steps, step, (zeros, self.scale[block, 0], s))
        self._store(total, row + self.wg * ROWS, block * COLUMNS)
        return s

    def _product(self, x, w):
        """Of a step, complete."""

        def multiply(product):
            lib.matmul(product, x, w.T, simulate=self.simulate)
            self._give_turn()
            if self.simulate:
                return product[...]
            return lib.landed(plgpu.wgmma_accumulator_load(product, wait_n=None), 0)

        self._take_turn()
        return pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), F32))

    def _store(self, total, row, column) -> None:
        """``total`` to the result, once the buffer's last store is read."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer, value = self.refs["y"].at[self.wg], total.astype(self.out.dtype)
        squares = range(COLUMNS // SQUARE)
        for i in squares:
            buffer[i] = value[:, i * SQUARE : (i + 1) * SQUARE]
        plgpu.commit_smem()
        for i in squares:
            first = pl.multiple_of(column + i * SQUARE, SQUARE)
            to = self.out.at[pl.ds(row, ROWS), pl.ds(first, SQUARE)]
            there = (row < self.out.shape[0]) & (first < self.out.shape[1])
            pl.when(there)(lambda i=i, to=to: plgpu.copy_smem_to_gmem(buffer.at[i], to))
