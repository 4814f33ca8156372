"""The experts' products of many rows on Hopper: Pallas Mosaic GPU, two warpgroups and a loader.

Rows lie in order of their experts (``rows_triton``). A *tile* is up to ``most`` rows of one expert,
a *block* the columns of weights that a thread block multiplies with at a time: 128 of gate and of
up, or 256 of down. Columns are the rows of the tensor core's product, and a tile's rows its
columns, which come in eights: an expert's last tile costs what its rows do::

  loader        one warp: for every item (tile, block) and 64 channels, four squares of
                weights, 64 x 64, and the tile's rows
  warpgroups    0 and 1: half of the block's columns each, two products [64, rows] that
                accumulate over all channels; then SwiGLU, or nothing, and rows to memory

A warpgroup's two products are gate and up of the same columns. Items go to thread blocks in turn,
the tiles of one expert under one block of columns one after the other: those weights come from
memory once. There is code for each multiple of ``step`` rows; nothing that a row meets depends on
which one runs it. The bound: 4096 FLOP a cycle; a tile of 128 rows reads 48 bytes a cycle from L2.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.grouped_matmul import tiles as tt
from mla_jax.types import Array

__all__ = ["BLOCK", "Sizes", "multiply", "scratch"]

CHUNK = 64  # channels of a step, and columns of a square of weights
GROUPS = 2  # warpgroups that multiply
BLOCK = 2 * GROUPS * CHUNK  # columns of weights in a step, of both products
AHEAD = 2  # items that the loader tells of
LOADER, MULTIPLIER = 40, 232  # registers of a thread

ROW, COLUMN, CHOICE = 0, 1, 2  # facts of an item: first row, first column, which size
FACTS = 4

I32 = jnp.int32
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a kernel is compiled for, besides dtypes and array shapes."""

    most: int  # rows of a tile
    step: int  # of which rows of tiles are multiples
    stages: int  # steps in shared memory
    workers: int  # thread blocks: as many as there are multiprocessors
    limit: float | None = None  # V4's clamp

    @property
    def menu(self) -> tuple[int, ...]:
        """Rows that a tile may have."""
        return tuple(range(self.step, self.most + 1, self.step))


def scratch(sizes: Sizes, dtype: Any) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    return {
        "w": lib.swizzled((sizes.stages, 2 * GROUPS, CHUNK, CHUNK), dtype),
        "x": lib.swizzled((sizes.stages, sizes.most, CHUNK), dtype),
        "y": lib.swizzled((GROUPS, sizes.most, CHUNK), dtype),
        "facts": plgpu.SMEM((AHEAD, FACTS), I32),
        "full": lib.barrier(2 * GROUPS + 1, sizes.stages),  # copy engine -> both
        "free": lib.barrier(GROUPS, sizes.stages),  # both -> loader
        "told": lib.barrier(count=AHEAD),  # loader -> both
        "heard": lib.barrier(GROUPS, AHEAD),  # both -> loader
    }


@lib.lowered_once("sizes", "interpret")
def multiply(
    x: jax.Array, weights: tuple[Array, ...], table: jax.Array, count: jax.Array, *, sizes: Sizes,
    interpret: object = None,
) -> jax.Array:  # fmt: skip
    """The product of every tile with its expert's ``weights``: down, or (gate, up) and SwiGLU.

    ``x`` [rows, channels]; ``weights`` [experts, channels, columns] each; ``table`` and ``count``
    are a plan's. Rows of no tile are not written.
    """
    body = functools.partial(_body, sizes=sizes, simulate=interpret is not None)
    kernel = lib.kernel(
        body if len(weights) == 2 else functools.partial(_alone, body),
        sliced=range(1, 1 + len(weights)),
        out_type=jax.ShapeDtypeStruct((x.shape[0], weights[0].shape[2]), x.dtype),
        scratch_types=scratch(sizes, x.dtype),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        kernel_name="mla_experts_gate_up" if len(weights) == 2 else "mla_experts_down",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return kernel(x, *weights, table, count)


def _alone(body, x_g, w_g, *rest, **refs) -> None:
    body(x_g, w_g, None, *rest, **refs)


def _body(x_g, w_g, up_g, table_g, count_g, out_g, *, sizes, simulate, **refs) -> None:
    """The roles of the three warpgroups."""
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    steps, columns = w_g.shape[1] // CHUNK, BLOCK // (1 if up_g is None else 2)
    blocks = w_g.shape[2] // columns
    items = count_g[0] * blocks
    own = lax.div(jnp.maximum(items - worker + (sizes.workers - 1), 0), jnp.int32(sizes.workers))
    facts = {"sizes": sizes, "steps": steps, "simulate": simulate, "refs": refs, "items": own}

    @pl.when(wg < GROUPS)
    def _():
        _Multiplier(wg=wg, out=out_g, gated=up_g is not None, **facts).run()

    @pl.when(wg == GROUPS)
    def _():
        plgpu.set_max_registers(LOADER, action="decrease")
        loader = _Loader(
            x=x_g, w=w_g, up=up_g, table=table_g, blocks=blocks, columns=columns, worker=worker,
            **facts,
        )  # fmt: skip
        if simulate:  # there are no warps
            loader.run()
            return

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(loader.run)


@dataclass(frozen=True, kw_only=True)
class _Role:
    sizes: Sizes
    items: Any  # of the thread block
    steps: int  # of an item
    simulate: bool
    refs: dict[str, Any]

    def slot(self, g):
        """Of step ``g`` of the thread block."""
        return lax.rem(g, jnp.int32(self.sizes.stages))

    def place(self, t):
        """Of the facts of item ``t``."""
        return lax.rem(t, jnp.int32(AHEAD))


@dataclass(frozen=True, kw_only=True)
class _Loader(_Role):
    """One warp of the last warpgroup."""

    x: Any
    w: Any
    up: Any
    table: Any
    blocks: int  # of columns
    columns: int  # of a block
    worker: Any

    def run(self) -> None:
        pl.loop(0, self.items)(self._item)
        g = self.items * self.steps

        # Await what was never reused.
        @pl.loop(jnp.maximum(g - self.sizes.stages, 0), g)
        def _(i):
            plgpu.barrier_wait(self.refs["free"].at[self.slot(i)])

        @pl.loop(jnp.maximum(self.items - AHEAD, 0), self.items)
        def _(t):
            plgpu.barrier_wait(self.refs["heard"].at[self.place(t)])

    def _item(self, t) -> None:
        number, g = self.worker + t * self.sizes.workers, t * self.steps
        # The tiles of a group take turns under each block of columns.
        own = lax.div(number, jnp.int32(self.blocks))
        first, together = self.table[own, tt.FIRST], self.table[own, tt.TOGETHER]
        local = number - first * self.blocks
        block = lax.div(local, together)
        tile = first + local - block * together
        expert, row, choice = (self.table[tile, i] for i in (tt.EXPERT, tt.ROW, tt.CHOICE))
        column = block * self.columns
        self._tell(t, ((ROW, row), (COLUMN, column), (CHOICE, choice)))

        @pl.loop(0, self.steps)
        def _(k):
            s = self.slot(g + k)
            pl.when(g + k >= self.sizes.stages)(
                lambda: plgpu.barrier_wait(self.refs["free"].at[s])
            )
            self._load(s, k * CHUNK, expert, column, row, choice)

    def _load(self, s, channel, expert, column, row, choice) -> None:
        full, channels = self.refs["full"].at[s], pl.ds(channel, CHUNK)
        for j in range(2 * GROUPS):
            source, square = (self.w, j) if self.up is None else ((self.w, self.up)[j % 2], j // 2)
            piece = source.at[expert, channels, pl.ds(column + square * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(piece, self.refs["w"].at[s, j], full)
        for i, n in enumerate(self.sizes.menu):

            @pl.when(choice == i)
            def _(n=n):
                rows = pl.ds(0, n)
                piece = self.x.at[pl.ds(row * tt.EIGHT, n), channels]
                plgpu.copy_gmem_to_smem(piece, self.refs["x"].at[s, rows], full)

    def _tell(self, t, told) -> None:
        """Facts of item ``t`` for the others."""
        s = self.place(t)
        pl.when(t >= AHEAD)(lambda: plgpu.barrier_wait(self.refs["heard"].at[s]))
        for i, fact in told:
            self.refs["facts"][s, i] = fact
        plgpu.barrier_arrive(self.refs["told"].at[s])


@dataclass(frozen=True, kw_only=True)
class _Multiplier(_Role):
    """Warpgroup 0 or 1: half of the columns of every item's block."""

    wg: Any
    out: Any
    gated: bool

    def run(self) -> None:
        plgpu.set_max_registers(MULTIPLIER, action="increase")
        pl.loop(0, self.items)(self._item)
        plgpu.wait_smem_to_gmem(0)

    def _item(self, t) -> None:
        s = self.place(t)
        plgpu.barrier_wait(self.refs["told"].at[s])
        row, column, choice = (self.refs["facts"][s, i] for i in (ROW, COLUMN, CHOICE))
        plgpu.barrier_arrive(self.refs["heard"].at[s])
        for i, n in enumerate(self.sizes.menu):
            pl.when(choice == i)(functools.partial(self._tile, n, t * self.steps, row, column))

    def _tile(self, n: int, g, row, column) -> None:
        """The products of ``n`` rows, steps ``g`` and on, and their way to memory."""
        accumulators = (plgpu.ACC((CHUNK, n), F32), plgpu.ACC((CHUNK, n), F32))
        a, b = pl.run_scoped(functools.partial(self._sum, n, g), *accumulators)
        if self.gated:
            results = ((_swiglu(a, b, self.sizes.limit), self.wg),)
        else:
            results = ((a, 2 * self.wg), (b, 2 * self.wg + 1))
        for value, square in results:
            self._store(value, n, row, column + square * CHUNK)

    def _sum(self, n: int, g, *accumulators):
        free, w, x = self.refs["free"], self.refs["w"], self.refs["x"]

        @pl.loop(0, self.steps)
        def _(k):
            s = self.slot(g + k)
            plgpu.barrier_wait(self.refs["full"].at[s])
            for i, acc in enumerate(accumulators):
                rows = x.at[s, pl.ds(0, n)]
                lib.matmul(acc, w.at[s, 2 * self.wg + i].T, rows.T, simulate=self.simulate)
            plgpu.wgmma_wait(len(accumulators))
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[self.slot(g + k - 1)]))

        found = tuple(acc[...] for acc in accumulators)
        plgpu.barrier_arrive(free.at[self.slot(g + self.steps - 1)])
        return found

    def _store(self, value, n: int, row, column) -> None:
        """``value`` [64 columns, n] to rows of the result, once the buffer's last store is read."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = self.refs["y"].at[self.wg, pl.ds(0, n)]
        value = value.astype(self.out.dtype)
        if self.simulate:
            buffer[...] = value.T
        else:
            turned = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
            buffer.T[...] = turned
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(column, CHUNK), CHUNK)
        to = self.out.at[pl.ds(row * tt.EIGHT, n), columns]
        plgpu.copy_smem_to_gmem(buffer, to)


def _swiglu(g, u, limit: float | None):
    """``ref.swiglu``; NaN stays NaN."""
    if limit is not None:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    return g / (1.0 + jnp.exp(-g)) * u
