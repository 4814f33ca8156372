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
which one runs it.

Thread blocks of a cluster have tiles of one expert under the same block of columns, and each loads
its part of the weights for all of them. Where an expert has too few tiles, one without rows fills
the cluster: its thread block waits for weights and frees them, and computes nothing.

The bound: 4096 FLOP a cycle; a tile of 128 rows reads 48 bytes a cycle from L2, one of a pair 32.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.grouped_matmul import tiles as tt
from mla_jax.types import Array, cdiv

__all__ = [
    "BLOCK", "CHUNK", "F32", "GROUPS", "Item", "Loader", "Multiplier", "Sizes", "launch",
    "multiply", "scratch",
]  # fmt: skip

CHUNK = 64  # channels of a step, and columns of a square of weights
GROUPS = 2  # warpgroups that multiply
BLOCK = 2 * GROUPS * CHUNK  # columns of weights in a step, of both products
AHEAD = 2  # items that the loader tells of
MEMBER = "member"  # the axis of a cluster's thread blocks
REGISTERS = (24, 240)  # of a thread of the loader, and of a multiplier: 504 of three warpgroups

I32 = jnp.int32
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a kernel is compiled for, besides dtypes and array shapes."""

    most: int  # rows of a tile
    step: int  # of which rows of tiles are multiples
    stages: int  # steps in shared memory
    workers: int  # thread blocks: as many as there are multiprocessors
    cluster: int = 1  # of which so many share weights
    limit: float | None = None  # V4's clamp

    @property
    def clusters(self) -> int:
        """That take turns."""
        return self.workers // self.cluster

    @property
    def axis(self) -> str | None:
        """Of a cluster's thread blocks; None: each is alone."""
        return None if self.cluster == 1 else MEMBER

    @property
    def menu(self) -> tuple[int, ...]:
        """Rows that a tile may have."""
        return tuple(range(self.step, self.most + 1, self.step))


def scratch(sizes: Sizes, dtype: Any, out: Any) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    channels = 128 // jnp.dtype(dtype).itemsize  # of a step
    return {
        "w": lib.swizzled((sizes.stages, 2 * GROUPS, CHUNK, channels), dtype),
        "x": lib.swizzled((sizes.stages, sizes.most, channels), dtype),
        "y": lib.swizzled((GROUPS, sizes.most, CHUNK), out),
        "facts": plgpu.SMEM((AHEAD, len(Item._fields)), I32),
        "full": lib.barrier(2 * GROUPS + 1, sizes.stages),  # copy engine -> both
        "free": lib.barrier(GROUPS, sizes.stages, axis=sizes.axis),  # both, of all -> loader
        "told": lib.barrier(count=AHEAD),  # loader -> both
        "heard": lib.barrier(GROUPS, AHEAD),  # both -> loader
    }


@lib.lowered_once("sizes", "interpret")
def multiply(
    x: jax.Array, weights: tuple[Array, ...], table: jax.Array, used: jax.Array, *, sizes: Sizes,
    interpret: object = None,
) -> jax.Array:  # fmt: skip
    """The product of every tile with its expert's ``weights``: down, or (gate, up) and SwiGLU.

    ``x`` [rows, channels]; ``weights`` [experts, channels, columns] each; ``table`` and ``used``
    are a plan's. Rows of no tile are not written.
    """
    _, channels, columns = weights[0].shape
    return launch(
        (x, *weights, table, used),
        functools.partial(_roles, count=len(weights)),
        sizes=sizes,
        buffers=scratch(sizes, x.dtype, x.dtype),
        out=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        steps=channels // CHUNK,
        gated=len(weights) == 2,
        name="mla_experts_gate_up" if len(weights) == 2 else "mla_experts_down",
        sliced=range(1, 1 + len(weights)),
        interpret=interpret,
    )


def _roles(x_g, *rest, count, facts, **places):
    loader = Loader(x=x_g, weights=rest[:count], table=rest[count], **places, **facts)
    return loader, Multiplier, {}


def launch(
    operands: tuple[jax.Array, ...], roles: Callable, *, sizes: Sizes, buffers: dict, out: Any,
    steps: int, gated: bool, name: str, sliced: Sequence[int], interpret: object, told: int = 3,
) -> jax.Array:  # fmt: skip
    """Run the two roles, ``roles(*operands) -> loader, multiplier's class and its own facts``.

    The last operand is the number of tiles; items have ``steps`` steps.
    """
    columns = BLOCK // (2 if gated else 1)
    blocks = cdiv(out.shape[1], columns)

    def body(*refs, **scratch):
        *given, used, result = refs
        simulate = interpret is not None

        def parts():
            """What both roles are made of; each reads it, so that no register holds it before."""
            worker = lax.axis_index("worker")
            all_items = lax.div(used[0], jnp.int32(sizes.cluster)) * blocks
            rest = jnp.maximum(all_items - worker + (sizes.clusters - 1), 0)
            facts: dict[str, Any] = dict(
                sizes=sizes, items=lax.div(rest, jnp.int32(sizes.clusters)), steps=steps,
                simulate=simulate, told=told, refs=scratch,
            )  # fmt: skip
            member = 0 if sizes.axis is None else lax.axis_index(sizes.axis)
            places = dict(blocks=blocks, columns=columns, worker=worker, member=member)
            return facts, *roles(*given, facts=facts, **places)

        def multiplier(wg):
            facts, _, role, own = parts()
            return role(wg=wg, out=result, gated=gated, **own, **facts)

        lib.multipliers_and_loader(
            GROUPS, registers=REGISTERS, multiplier=multiplier, loader=lambda: parts()[1],
            simulate=simulate,
        )  # fmt: skip

    kernel = lib.kernel(
        body,
        sliced=sliced,
        out_type=out,
        scratch_types=buffers,
        grid=(sizes.clusters,),
        grid_names=("worker",),
        cluster=() if sizes.axis is None else (sizes.cluster,),
        cluster_names=() if sizes.axis is None else (sizes.axis,),
        num_threads=GROUPS + 1,
        thread_name="wg",
        kernel_name=name,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return kernel(*operands)


class Item(NamedTuple):
    """A tile under a block of columns."""

    row: Any  # the first one, in eights
    column: Any  # of the result, the first one
    choice: Any  # which multiple of a step its rows are; -1: it has none
    expert: Any  # None where only the loader needs it


@dataclass(frozen=True, kw_only=True)
class Role:
    """What both roles know."""

    sizes: Sizes
    items: Any  # of the thread block
    steps: int  # of an item
    simulate: bool
    told: int  # fields of an item that the loader tells the others
    refs: dict[str, Any]

    def slot(self, g):
        """Of step ``g`` of the thread block."""
        return lax.rem(g, jnp.int32(self.sizes.stages))

    def place(self, t):
        """Of the facts of item ``t``."""
        return lax.rem(t, jnp.int32(AHEAD))


@dataclass(frozen=True, kw_only=True)
class Loader(Role):
    """One warp of the last warpgroup."""

    x: Any
    weights: Any  # of one product, or of two that are gated
    table: Any
    blocks: int  # of columns
    columns: int  # of a block
    worker: Any  # the number of the cluster
    member: Any  # of the thread block in it

    def run(self) -> None:
        pl.loop(0, self.items)(self._item)
        lib.await_uses(self.refs["free"], self.items * self.steps)
        lib.await_uses(self.refs["heard"], self.items)

    def _item(self, t) -> None:
        number, g = self.worker + t * self.sizes.clusters, t * self.steps
        # The tiles of a group take turns under each block of columns, a cluster's together.
        cluster = jnp.int32(self.sizes.cluster)
        own = lax.div(number, jnp.int32(self.blocks)) * cluster
        first, together = (lax.div(self.table[own, i], cluster) for i in (tt.FIRST, tt.TOGETHER))
        local = number - first * self.blocks
        block = lax.div(local, together)
        tile = (first + local - block * together) * cluster + self.member
        expert, row, choice = (self.table[tile, i] for i in (tt.EXPERT, tt.ROW, tt.CHOICE))
        item = Item(row, block * self.columns, choice, expert)
        self._tell(t, item)

        @pl.loop(0, self.steps)
        def _(k):
            s = self.slot(g + k)
            pl.when(g + k >= self.sizes.stages)(lambda: plgpu.barrier_wait(self.refs["free"].at[s]))
            self._load_weights(s, k, item)
            for i, n in enumerate(self.sizes.menu):  # of no rows any, so that as much arrives
                mine = item.choice == i if i else item.choice <= 0
                pl.when(mine)(functools.partial(self._load_rows, s, k, item, n))

    def _tell(self, t, item: Item) -> None:
        """The others of item ``t``."""
        s = self.place(t)
        pl.when(t >= AHEAD)(lambda: plgpu.barrier_wait(self.refs["heard"].at[s]))
        for i, fact in enumerate(item[: self.told]):
            self.refs["facts"][s, i] = fact
        plgpu.barrier_arrive(self.refs["told"].at[s])

    def _squares(self, item: Item):
        """Weights and first column of each square of a step: two of each warpgroup."""
        for j in range(2 * GROUPS):
            one = len(self.weights) == 1
            source, square = (self.weights[0], j) if one else (self.weights[j % 2], j // 2)
            yield j, source.at[item.expert], item.column + square * CHUNK

    def _square(self, source, k, column):
        """One of step ``k`` in memory."""
        return source.at[pl.ds(k * CHUNK, CHUNK), pl.ds(column, CHUNK)]

    def _load_weights(self, s, k, item: Item) -> None:
        for j, source, column in self._squares(item):
            piece = self._square(source, k, column)
            to, full = self.refs["w"].at[s, j], self.refs["full"].at[s]
            plgpu.copy_gmem_to_smem(piece, to, full, collective_axes=self.sizes.axis)

    def _load_rows(self, s, k, item: Item, n: int) -> None:
        piece = self.x.at[pl.ds(item.row * tt.EIGHT, n), pl.ds(k * CHUNK, CHUNK)]
        to = self.refs["x"].at[s, pl.ds(0, n)]
        plgpu.copy_gmem_to_smem(piece, to, self.refs["full"].at[s])


@dataclass(frozen=True, kw_only=True)
class Multiplier(Role):
    """Warpgroup 0 or 1: half of the columns of every item's block."""

    wg: Any
    out: Any
    gated: bool

    def run(self) -> None:
        pl.loop(0, self.items)(self._item)
        plgpu.wait_smem_to_gmem(0)

    def _item(self, t) -> None:
        s = self.place(t)
        plgpu.barrier_wait(self.refs["told"].at[s])
        facts = [self.refs["facts"][s, i] for i in range(self.told)]
        item = Item(*facts, *(None for _ in Item._fields[self.told :]))
        plgpu.barrier_arrive(self.refs["heard"].at[s])
        for i, n in enumerate(self.sizes.menu):
            pl.when(item.choice == i)(functools.partial(self._tile, n, t * self.steps, item))
        if self.sizes.cluster > 1:
            pl.when(item.choice < 0)(lambda: self._nothing(t * self.steps))

    def _nothing(self, g) -> None:
        """The steps of a tile that has no rows."""

        @pl.loop(0, self.steps)
        def _(k):
            s = self.slot(g + k)
            plgpu.barrier_wait(self.refs["full"].at[s])
            plgpu.barrier_arrive(self.refs["free"].at[s])

    def _tile(self, n: int, g, item: Item) -> None:
        """The products of ``n`` rows, steps ``g`` and on, and their way to memory."""
        a, b = self._sums(n, g, item)
        if self.gated:
            results = ((_swiglu(a, b, self.sizes.limit), self.wg),)
        else:
            results = ((a, 2 * self.wg), (b, 2 * self.wg + 1))
        for value, square in results:
            self._store(value, n, item.row, item.column + square * CHUNK)

    def _sums(self, n: int, g, item: Item):
        """Both products of all channels, [64 columns, n] each."""
        del item
        return pl.run_scoped(functools.partial(self._accumulate, n, g), *2 * [_accumulator(n)])

    def _accumulate(self, n: int, g, *accumulators):
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
            buffer.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(column, CHUNK), CHUNK)
        plgpu.copy_smem_to_gmem(buffer, self.out.at[pl.ds(row * tt.EIGHT, n), columns])


def _accumulator(n: int):
    return plgpu.ACC((CHUNK, n), F32)


def _swiglu(g, u, limit: float | None):
    """``ref.swiglu``; NaN stays NaN."""
    if limit is not None:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    return g / (1.0 + jnp.exp(-g)) * u
