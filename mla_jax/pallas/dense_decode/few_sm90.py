"""Dense absorbed decode of few query rows on Hopper: Pallas Mosaic GPU.

Computes ``ref.dense_decode`` for rank 512, rope 64 and up to 32 rows of queries, which the
products take as columns: a tile of 64 keys is the operand of 64 rows, and nothing is multiplied
or kept for rows that do not exist. Warpgroups walk the pieces of a thread block (``work_plan``)
as one stream of blocks of 64 keys::

  wg 0 scores    S^T = K Q^T, softmax over keys, P^T -> shared memory
  wg 1 values    O^T += V^T P^T
  wg 2 (3) feed  the keys of the blocks to come (``few_feed_sm90``)

  feed -> keys -> scores -> p_ready -> values -> freed -> feed

The bound of a block: 73,728 bytes of memory (e4m3 36,864) and products of 1088 cycles; e4m3
also 2240 cycles of shared memory. ``docs/kernels/dense_decode.md`` holds the measurements.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.few_feed_sm90 import Copied, Pages, Widened, feed_of, ring
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, ROWS, Sizes
from mla_jax.pallas.dense_decode.stream_sm90 import Arrays, Stream, launch, parity
from mla_jax.pallas.mosaic_lib import LAG, LOWEST

__all__ = ["REDUCTION", "attend", "scratch"]

TURNS = 2  # blocks whose weights are kept
REGISTERS = (128, 176, 104)  # of a thread: scores, values, feed; 16 rows need no such division
ALPHA, INVERSE, LSE = 0, TURNS, TURNS + 2  # rows of the statistics buffer
COLUMN = plgpu.Layout.WGMMA.reduce(0)
WIDEST = 256  # columns of one prefetch
REDUCTION = 1024  # bytes for maxima and sums of the four warps

F32 = jnp.float32


def scratch(dtype, sizes: Sizes, quantised: bool) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    rows, keys = sizes.live, feed_of(quantised)
    queries = keys.buffers(sizes)
    return {
        "q": lib.swizzled((queries, rows, RANK), dtype),
        "q_rope": lib.swizzled((queries, rows, ROPE), dtype),
        "weights": lib.swizzled((TURNS, rows, BLOCK), dtype),
        "stats": plgpu.SMEM((TURNS + 3, rows), F32),
        "q_full": lib.barrier(2, queries),  # copy engine -> scores
        "p_ready": lib.barrier(count=TURNS),  # scores -> values: P and its factor
        "freed": lib.barrier(count=keys.SLOTS),  # values -> feed: keys, P and factor were read
        "inverse_ready": lib.barrier(count=2),  # scores -> values: 1 / sum of a piece
        **keys.scratch(dtype, sizes),
    }


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Shared memory and barriers of a running thread block, under their names in ``scratch``."""

    simulate: bool
    quantised: bool
    keys: Widened | Copied
    q: Any
    q_rope: Any
    weights: Any
    stats: Any
    q_full: Any
    p_ready: Any
    freed: Any
    inverse_ready: Any

    @classmethod
    def of(cls, simulate: bool, quantised: bool, **refs: Any) -> "Buffers":
        """Those of its own, and the rest for the keys."""
        own = {f.name: refs.pop(f.name) for f in fields(cls) if f.name in refs and f.name != "keys"}
        keys = feed_of(quantised)(**refs)
        return cls(simulate=simulate, quantised=quantised, keys=keys, **own)

    def turn(self, g):
        """Of the weights of block ``g`` of the stream."""
        return ring(g, TURNS)

    def latent(self, g) -> list:
        """The latent columns of block ``g`` in order, and where each part begins."""
        parts = (part for _, found in self.keys.stages(g) for part in found)
        return [(column, ref) for column, ref in parts if column < RANK]


@lib.lowered_once("sizes", "scale", "early_launch", "interpret")
def attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array,
    cache_scale: jax.Array,
    page_table: jax.Array,
    plan: wp.WorkPlan,
    *,
    layer: jax.Array | None,
    sizes: Sizes,
    scale: float,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``mosaic_sm90.attend`` for at most 32 rows over an e4m3 cache, 16 over one in 16 bits."""
    simulate, quantised = interpret is not None, pages.dtype == widen.STORED
    scale = scale * math.log2(math.e)
    options = {"early_launch": early_launch, "simulate": simulate, "quantised": quantised}
    return launch(
        functools.partial(_body, sizes=sizes, scale=scale, **options),
        q_latent, q_rope, (pages, cache_scale), page_table, plan,
        layer=layer, sizes=sizes, interpret=interpret, grid_names=("worker",), reduction=REDUCTION,
        scratch_types=scratch(q_latent.dtype, sizes, quantised),
        num_threads=2 + feed_of(quantised).WARPGROUPS, kernel_name="mla_dense_decode_few",
    )  # fmt: skip


def _body(*arrays, sizes, scale, early_launch, simulate, quantised, **refs) -> None:
    """The roles of the warpgroups, on ``Arrays`` and the ``scratch``."""
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    of = Stream.of(Arrays(*arrays), sizes, worker, 0)
    b = Buffers.of(simulate, quantised, **refs)

    def feed(i: int):
        if sizes.live > 16:  # over e4m3 only
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
        pages = Pages(stream=replace(of, first_page=of.layer * of.num_pages))  # found here alone
        b.keys.run(i, pages, b.freed, simulate=simulate)

    pl.when(wg == 0)(Scores(stream=of, buffers=b, scale=scale).run)
    pl.when(wg == 1)(Values(stream=of, buffers=b, early_launch=early_launch).run)
    for i in range(b.keys.WARPGROUPS):
        pl.when(wg == 2 + i)(functools.partial(feed, i))


def fill(x: jax.Array, size: int) -> jax.Array:
    """A number for each query row, repeated over ``size`` keys or columns."""
    return lax.broadcast_in_dim(x, (size, x.shape[0]), [1])


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Warpgroup 0: ``S^T = K Q^T``, softmax over keys, ``P^T`` to shared memory."""

    stream: Stream
    buffers: Buffers
    scale: float  # of scores, base 2

    def run(self) -> None:
        of, b = self.stream, self.buffers
        unit = of.arrays.scales[of.layer] if b.quantised else 1.0
        factor = self.scale * unit
        token = of.task(wp.OF_TOKEN)
        pl.when(of.begin < of.end)(lambda: self._load_queries(of.begin, of.row_at(token)))

        def piece(p, g0):
            return self._piece(p, g0, unit, factor)

        lax.fori_loop(of.begin, of.end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, p, g0, unit, factor):
        """Weights of all blocks of piece ``p``, whose first is block ``g0`` of the stream."""
        of, b, rows = self.stream, self.buffers, self.stream.sizes.live
        n, first = of.blocks_of(p), of.piece(p, wp.FIRST)
        part, row = of.piece(p, wp.SLOT), of.row_of(p)
        count = of.piece(p, wp.QUERIES) * of.sizes.heads
        unmasked = of.seen_by_all(p)
        buffers = b.keys.buffers(of.sizes)
        i = lax.rem(p - of.begin, jnp.int32(buffers))
        plgpu.barrier_wait(b.q_full.at[i])

        @pl.when(p + 1 < of.end)
        def _():
            row = of.row_of(p + 1)
            self._load_queries(p + 1, row) if buffers > 1 else self._fetch_queries(row)

        def step(j, carry):
            top, total = carry
            s = b.turn(g0 + j)
            x = self._products(g0 + j, lib.afresh(i, simulate=b.simulate))
            block = first + j
            full = (block + 1) * BLOCK <= unmasked
            x = lax.cond(full, lambda: x, lambda: of.mask(x, p, block, keys=0))
            top, shrink, below = self._exponents(x * factor, top)
            w = jnp.exp2(below)
            b.stats[ALPHA + s] = shrink
            turned = w.astype(b.weights.dtype)
            b.weights.at[s].T[...] = plgpu.layout_cast(turned, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.barrier_arrive(b.p_ready.at[s])
            return top, total * fill(shrink, BLOCK) + w

        top = plgpu.layout_cast(jnp.full((rows,), LOWEST, F32), COLUMN)
        start = top, lib.tile(0.0, (BLOCK, rows), F32)
        top, total = lax.fori_loop(0, n, step, start)
        if buffers == 1:
            pl.when(p + 1 < of.end)(lambda: self._load_queries(p + 1, of.row_of(p + 1)))
        total = total.sum(axis=0)
        i = parity(p - of.begin)
        b.stats[INVERSE + i] = jnp.where(total > 0.0, unit / total, 0.0)
        plgpu.barrier_arrive(b.inverse_ready.at[i])
        lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
        self._store(lse2, part, row, count)
        return g0 + n

    def _products(self, g, k) -> jax.Array:
        """``K Q^T`` of block ``g`` of the stream, with the queries in buffer ``k``."""
        b = self.buffers

        def products(acc):
            for full, parts in b.keys.stages(g):
                plgpu.barrier_wait(full)
                for column, ref in parts:
                    columns = pl.ds(column, ref.shape[1])
                    of_q = b.q_rope.at[k] if column == RANK else b.q.at[k, :, columns]
                    lib.matmul(acc, ref, of_q.T, simulate=b.simulate)
            return acc[...]

        return pl.run_scoped(products, plgpu.ACC((BLOCK, self.stream.sizes.live), F32))

    def _exponents(self, x, top) -> tuple[jax.Array, ...]:
        """The running maximum, the factor of what came before, and the scores below it."""
        below = x - fill(top, BLOCK)

        def rise():
            found = jnp.maximum(top, x.max(axis=0))
            return found, jnp.exp2(top - found), x - fill(found, BLOCK)

        def stay():
            return top, plgpu.layout_cast(jnp.ones(top.shape, F32), COLUMN), below

        rises = lib.any_above(below, LAG, simulate=self.buffers.simulate)
        return lax.cond(rises, rise, stay)

    def _store(self, lse2, part, row, count) -> None:
        """Of a request in one piece, or of a part of one."""
        of, stats, sizes = self.stream, self.buffers.stats, self.stream.sizes
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stats[LSE] = lse2 * jnp.where(part < 0, math.log(2.0), 1.0)
        plgpu.commit_smem()
        lse = stats.at[LSE]

        @pl.when(part < 0)
        def _():
            lib.store_rows(lse, of.arrays.lse, row, count, rows=sizes.live, step=sizes.step)

        @pl.when(part >= 0)
        def _():
            to = of.arrays.part_lse.at[part, 0, pl.ds(0, sizes.live)]
            plgpu.copy_smem_to_gmem(lse, to)

    def _rows(self, row):
        size = min(self.stream.sizes.live, self.stream.arrays.q_latent.shape[0])
        return pl.ds(row, size), pl.ds(0, size)

    def _load_queries(self, p, row) -> None:
        of, b = self.stream, self.buffers
        i = lax.rem(p - of.begin, jnp.int32(b.keys.buffers(of.sizes)))
        these, to = self._rows(row)
        plgpu.copy_gmem_to_smem(of.arrays.q_latent.at[these], b.q.at[i, to], b.q_full.at[i])
        plgpu.copy_gmem_to_smem(of.arrays.q_rope.at[these], b.q_rope.at[i, to], b.q_full.at[i])

    def _fetch_queries(self, row) -> None:
        """Bring them to the L2 cache."""
        arrays, (these, _) = self.stream.arrays, self._rows(row)
        for first in range(0, RANK, WIDEST):
            plgpu.async_prefetch(arrays.q_latent.at[these, pl.ds(first, WIDEST)])
        plgpu.async_prefetch(arrays.q_rope.at[these])


@dataclass(frozen=True, kw_only=True)
class Values:
    """Warpgroup 1: ``O^T += V^T P^T``."""

    stream: Stream
    buffers: Buffers
    early_launch: bool  # the merge kernel is launched while this one ends

    def run(self) -> None:
        of = self.stream
        if of.sizes.live > 16:
            plgpu.set_max_registers(REGISTERS[1], action="increase")
        lax.fori_loop(of.begin, of.end, self._piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, p, g0):
        """Values of all blocks of piece ``p``, whose first is block ``g0`` of the stream."""
        of, b = self.stream, self.buffers
        n, first, length = of.blocks_of(p), of.piece(p, wp.FIRST), of.piece(p, wp.LENGTH)
        part, row = of.piece(p, wp.SLOT), of.row_of(p)
        count = of.piece(p, wp.QUERIES) * of.sizes.heads

        def step(j, o):
            g, s = g0 + j, b.turn(g0 + j)
            plgpu.barrier_wait(b.p_ready.at[s])
            o = self._rescale(o, plgpu.load(b.stats.at[ALPHA + s], layout=COLUMN))
            valid = length - (first + j) * BLOCK

            @pl.when(valid < BLOCK)
            def _():
                for _, ref in b.latent(g):
                    lib.clear_rows(ref, valid)

            def products(accs):
                for acc, (_, ref) in zip(accs, b.latent(g), strict=True):
                    lib.matmul(acc, ref.T, b.weights.at[s].T, simulate=b.simulate)

            o = lib.accumulate(o, products, simulate=b.simulate)
            pl.when(j < n - 1)(lambda: self._free(g))
            return o

        last = b.latent(g0 + n - 1)
        o = [lib.tile(0.0, (ref.shape[1], of.sizes.live), F32) for _, ref in last]
        o = lax.fori_loop(0, n, step, o)
        i = parity(p - of.begin)
        plgpu.barrier_wait(b.inverse_ready.at[i])
        inverse = plgpu.load(b.stats.at[INVERSE + i], layout=COLUMN)
        self._store(o, inverse, last, p, part, row, count)
        self._free(g0 + n - 1)
        return g0 + n

    def _free(self, g) -> None:
        """Keys, weights and factor of block ``g`` were read."""
        plgpu.barrier_arrive(self.buffers.freed.at[ring(g, self.buffers.keys.SLOTS)])

    def _rescale(self, o: list, shrink) -> list:
        """``o`` times a factor of each column; all are one in most blocks."""

        def scaled():
            return [x * fill(shrink, x.shape[0]) for x in o]

        if self.buffers.simulate:
            return scaled()
        return lax.cond(lib.any_below_one(shrink, COLUMN), scaled, lambda: o)

    def _store(self, o: list, inverse, last: list, p, part, row, count) -> None:
        """The result of piece ``p``, ``o`` times ``inverse``, by way of the ``last`` block."""
        of, sizes = self.stream, self.stream.sizes
        results = []
        for x, (column, ref) in zip(o, last, strict=True):
            x = (x * fill(inverse, x.shape[0])).astype(ref.dtype)
            result, turned = ref.at[pl.ds(0, sizes.live)], plgpu.Layout.WGMMA_TRANSPOSED
            result.T[...] = plgpu.layout_cast(x, turned)
            results.append((column, result))
        plgpu.commit_smem()

        def store(to, row):
            for column, result in results:
                columns = to.at[:, pl.ds(column, result.shape[1])]
                lib.store_rows(result, columns, row, count, rows=sizes.live, step=sizes.step)

        pl.when(part < 0)(lambda: store(of.arrays.out, row))
        pl.when(part >= 0)(lambda: store(of.arrays.part, part * ROWS))
        if self.early_launch:  # sooner, and the merge would only wait longer
            pl.when(p == of.end - 1)(plgpu.griddepcontrol_launch_dependents)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
