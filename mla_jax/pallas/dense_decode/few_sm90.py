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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.combine_sm90 import CHAINS
from mla_jax.pallas.dense_decode.few_feed_sm90 import Pages, feed_of, ring
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, ROWS, Sizes
from mla_jax.pallas.mosaic_lib import LAG, LOWEST, WGMMA

__all__ = ["attend", "scratch"]

TURNS = 2  # blocks whose weights are kept
REGISTERS = (128, 176, 104)  # of a thread: scores, values, feed; 16 rows need no such division
ALPHA, INVERSE, LSE = 0, TURNS, TURNS + 2  # rows of the statistics buffer
COLUMN = plgpu.Layout.WGMMA.reduce(0)
WIDEST = 256  # columns of one prefetch
REDUCTION = 1024  # bytes for maxima and sums of the four warps

I32 = jnp.int32
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
    rows, dtype = q_latent.shape[0], q_latent.dtype
    quantised = pages.dtype == widen.STORED
    slots = plan.slots + CHAINS  # the merge reads over the last
    body = functools.partial(
        _body,
        sizes=sizes,
        scale=scale * math.log2(math.e),
        early_launch=early_launch,
        simulate=interpret is not None,
        quantised=quantised,
    )
    body, of_layer = lib.with_layer(body, layer)
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((rows, RANK), dtype),
            shape((rows,), F32),
            shape((slots * ROWS, RANK), dtype),
            shape((slots, 1, ROWS), F32),
        ),
        scratch_types=scratch(dtype, sizes, quantised),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=2 + feed_of(quantised).WARPGROUPS,
        thread_name="wg",
        kernel_name="mla_dense_decode_few",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=REDUCTION
        ),
    )
    cache = pages.reshape(-1, *pages.shape[-2:]), cache_scale.reshape(-1)
    return kernel(*of_layer, q_latent, q_rope, *cache, page_table, plan.pieces, plan.tasks)


def _body(
    layer_g, ql_g, qr_g, pages_g, scales_g, table_g, work_g, tasks_g,
    out_g, lse_g, part_g, part_lse_g,
    *, sizes, scale, early_launch, simulate, quantised,
    q, q_rope, weights, stats, q_full, p_ready, freed, inverse_ready, **of_keys,
):  # fmt: skip
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    begin, end = tasks_g[worker, wp.BEGIN], tasks_g[worker, wp.STOP]
    keys = feed_of(quantised)(**of_keys)
    layer = lib.layer_of(layer_g, scales_g.shape[0])
    rows, buffers = sizes.live, keys.buffers(sizes)
    divided = rows > 16  # over e4m3 only

    def blocks_of(p):
        return work_g[p, wp.END] - work_g[p, wp.FIRST]

    def row_of(p):
        return row_at(work_g[p, wp.TOKEN])

    def row_at(token):
        return pl.multiple_of(token * sizes.heads, 8)

    def live_rows(p):
        return work_g[p, wp.QUERIES] * sizes.heads

    def fill(x, size):
        return lax.broadcast_in_dim(x, (size, rows), [1])

    def turn(g):
        return ring(g, TURNS)

    def slot(g):
        return ring(g, keys.SLOTS)

    def latent(g):
        """The latent columns of block ``g`` in order, and where each part begins."""
        parts = (part for _, found in keys.stages(g) for part in found)
        return [(column, ref) for column, ref in parts if column < RANK]

    def scores():
        unit = scales_g[layer] if quantised else 1.0
        factor = scale * unit
        size = min(rows, ql_g.shape[0])

        def load_queries(p, row):
            i = lax.rem(p - begin, jnp.int32(buffers))
            to, these = pl.ds(0, size), pl.ds(row, size)
            plgpu.copy_gmem_to_smem(ql_g.at[these], q.at[i, to], q_full.at[i])
            plgpu.copy_gmem_to_smem(qr_g.at[these], q_rope.at[i, to], q_full.at[i])

        def fetch_queries(row):
            these = pl.ds(row, size)
            for first in range(0, RANK, WIDEST):
                plgpu.async_prefetch(ql_g.at[these, pl.ds(first, WIDEST)])
            plgpu.async_prefetch(qr_g.at[these])

        def mask(x, p, block):
            """Minus infinity where a row may not see a key of this block."""
            seen = work_g[p, wp.LENGTH] - block * BLOCK
            key = plgpu.broadcasted_iota(I32, (BLOCK, rows), 0, layout=WGMMA)
            if sizes.queries > 1:
                row = plgpu.broadcasted_iota(I32, (BLOCK, rows), 1, layout=WGMMA)
                seen = seen - work_g[p, wp.QUERIES] + 1
                for k in range(1, sizes.queries):
                    seen = seen + (row >= k * sizes.heads).astype(I32)
            return jnp.where(key < seen, x, -jnp.inf)

        def piece(p, g0):
            n, first = blocks_of(p), work_g[p, wp.FIRST]
            part, row, count = work_g[p, wp.SLOT], row_of(p), live_rows(p)
            unmasked = work_g[p, wp.LENGTH] - work_g[p, wp.QUERIES] + 1
            i = lax.rem(p - begin, jnp.int32(buffers))
            plgpu.barrier_wait(q_full.at[i])

            @pl.when(p + 1 < end)
            def _():
                row = row_of(p + 1)
                load_queries(p + 1, row) if buffers > 1 else fetch_queries(row)

            def step(j, carry):
                top, total = carry
                s = turn(g0 + j)
                k = lib.afresh(i, simulate=simulate)

                def products(acc):
                    for full, parts in keys.stages(g0 + j):
                        plgpu.barrier_wait(full)
                        for column, ref in parts:
                            columns = pl.ds(column, ref.shape[1])
                            of_q = q_rope.at[k] if column == RANK else q.at[k, :, columns]
                            lib.matmul(acc, ref, of_q.T, simulate=simulate)
                    return acc[...]

                x = pl.run_scoped(products, plgpu.ACC((BLOCK, rows), F32))
                block = first + j
                full = (block + 1) * BLOCK <= unmasked
                x = lax.cond(full, lambda: x, lambda: mask(x, p, block))
                x = x * factor
                below = x - fill(top, BLOCK)

                def rise():
                    found = jnp.maximum(top, x.max(axis=0))
                    return found, jnp.exp2(top - found), x - fill(found, BLOCK)

                def stay():
                    return top, plgpu.layout_cast(jnp.ones((rows,), F32), COLUMN), below

                rises = lib.any_above(below, LAG, simulate=simulate)
                new_top, shrink, below = lax.cond(rises, rise, stay)
                w = jnp.exp2(below)
                stats[ALPHA + s] = shrink
                turned = plgpu.layout_cast(w.astype(weights.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                weights.at[s].T[...] = turned
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[s])
                return new_top, total * fill(shrink, BLOCK) + w

            top = plgpu.layout_cast(jnp.full((rows,), LOWEST, F32), COLUMN)
            start = top, lib.tile(0.0, (BLOCK, rows), F32)
            top, total = lax.fori_loop(0, n, step, start)
            if buffers == 1:
                pl.when(p + 1 < end)(lambda: load_queries(p + 1, row_of(p + 1)))
            total = total.sum(axis=0)
            i = lax.rem(p - begin, jnp.int32(2))
            stats[INVERSE + i] = jnp.where(total > 0.0, unit / total, 0.0)
            plgpu.barrier_arrive(inverse_ready.at[i])
            lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stats[LSE] = lse2 * jnp.where(part < 0, math.log(2.0), 1.0)
            plgpu.commit_smem()
            lse = stats.at[LSE]

            @pl.when(part < 0)
            def _():
                lib.store_rows(lse, lse_g, row, count, rows=rows, step=sizes.step)

            @pl.when(part >= 0)
            def _():
                plgpu.copy_smem_to_gmem(lse, part_lse_g.at[part, 0, pl.ds(0, rows)])

            return g0 + n

        token = tasks_g[worker, wp.OF_TOKEN]  # one read less than that of the piece
        pl.when(begin < end)(lambda: load_queries(begin, row_at(token)))
        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def values():
        if divided:
            plgpu.set_max_registers(REGISTERS[1], action="increase")

        def rescale(o, shrink):
            """``o`` times a factor of each column; all are one in most blocks."""

            def scaled():
                return [x * fill(shrink, x.shape[0]) for x in o]

            if simulate:
                return scaled()
            return lax.cond(lib.any_below_one(shrink, COLUMN), scaled, lambda: o)

        def piece(p, g0):
            n, first, length = blocks_of(p), work_g[p, wp.FIRST], work_g[p, wp.LENGTH]
            part, row, count = work_g[p, wp.SLOT], row_of(p), live_rows(p)

            def step(j, o):
                g, s = g0 + j, turn(g0 + j)
                plgpu.barrier_wait(p_ready.at[s])
                shrink = plgpu.load(stats.at[ALPHA + s], layout=COLUMN)
                o = rescale(o, shrink)
                valid = length - (first + j) * BLOCK

                @pl.when(valid < BLOCK)
                def _():
                    for _, ref in latent(g):
                        lib.clear_rows(ref, valid)

                def products(accs):
                    for acc, (_, ref) in zip(accs, latent(g), strict=True):
                        lib.matmul(acc, ref.T, weights.at[s].T, simulate=simulate)

                o = lib.accumulate(o, products, simulate=simulate)
                pl.when(j < n - 1)(lambda: plgpu.barrier_arrive(freed.at[slot(g)]))
                return o

            last = latent(g0 + n - 1)
            o = [lib.tile(0.0, (ref.shape[1], rows), F32) for _, ref in last]
            o = lax.fori_loop(0, n, step, o)
            i = lax.rem(p - begin, jnp.int32(2))
            plgpu.barrier_wait(inverse_ready.at[i])
            inverse = plgpu.load(stats.at[INVERSE + i], layout=COLUMN)
            results = []
            for x, (column, ref) in zip(o, last, strict=True):  # into the slot of the last block
                x = (x * fill(inverse, x.shape[0])).astype(ref.dtype)
                result = ref.at[pl.ds(0, rows)]
                result.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
                results.append((column, result))
            plgpu.commit_smem()

            def store(to, row):
                for column, result in results:
                    columns = to.at[:, pl.ds(column, result.shape[1])]
                    lib.store_rows(result, columns, row, count, rows=rows, step=sizes.step)

            pl.when(part < 0)(lambda: store(out_g, row))
            pl.when(part >= 0)(lambda: store(part_g, part * ROWS))
            if early_launch:  # sooner, and the merge would only wait longer
                pl.when(p == end - 1)(plgpu.griddepcontrol_launch_dependents)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(freed.at[slot(g0 + n - 1)])
            return g0 + n

        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def feed(i: int):
        if divided:
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
        num_pages = pages_g.shape[0] // scales_g.shape[0]
        pages = Pages(
            pages=pages_g,
            first_page=layer * num_pages,
            num_pages=num_pages,
            table=table_g,
            work=work_g,
            tasks=tasks_g,
            worker=worker,
            begin=begin,
            end=end,
            sizes=sizes,
        )
        keys.run(i, pages, freed, simulate=simulate)

    pl.when(wg == 0)(scores)
    pl.when(wg == 1)(values)
    for i in range(keys.WARPGROUPS):
        pl.when(wg == 2 + i)(lambda i=i: feed(i))
