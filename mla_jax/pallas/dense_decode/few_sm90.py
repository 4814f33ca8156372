"""Dense absorbed decode of few query rows over an e4m3 cache on Hopper: Pallas Mosaic GPU.

Computes ``ref.dense_decode`` for rank 512, rope 64 and up to 32 rows of queries, which the
products take as columns: a tile of 64 keys is the operand of 64 rows, and nothing is multiplied
or kept for rows that do not exist. Four warpgroups walk the pieces of a thread block
(``work_plan``) as one stream of blocks of 64 keys::

  wg 0 scores    S^T = K Q^T, softmax over keys, P^T -> shared memory
  wg 1 values    O^T += V^T P^T
  wg 2, 3 widen  32 keys of every block: e4m3 -> registers -> 16 bits; load what comes next

  bytes of a unit (32 keys)   keys: two slots of 64 x 576      P: with its slot
  copy engine -> widen  ->  keys_full -> scores -> p_ready -> values -> freed -> widen

A thread takes its bytes of a unit into registers at once, so the next load is issued before they
are widened, and waits for neither product. The scale of the cache goes into factors.

The bound: 36,864 bytes of memory a block, and shared memory: 2240 cycles, products 1088.
``docs/kernels/dense_decode.md`` holds the measurements.
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
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, ROWS, Sizes
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["attend", "scratch"]

SLOTS = 2
ROW = RANK + ROPE
KEYS = BLOCK // 2  # of a unit: what a warpgroup widens of a block
REGISTERS = (128, 176, 104)  # of a thread: scores, values, widen; with 16 rows 128 suffice
LOWEST = -1.0e30  # first running maximum: finite, so that exp2(-inf - LOWEST) = 0
LAG = 8.0  # powers of two that a maximum may lag behind: it is searched for in few blocks
ALPHA, INVERSE, LSE = 0, SLOTS, SLOTS + 2  # rows of the statistics buffer
COLUMN = plgpu.Layout.WGMMA.reduce(0)
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a contiguous copy a bulk copy
REDUCTION = 1024  # bytes for maxima and sums of the four warps

I32 = jnp.int32
F32 = jnp.float32


def depths(rows: int) -> tuple[int, int]:
    """Units of bytes in flight, and buffers of queries: what fits beside the keys."""
    return {8: (3, 2), 16: (2, 2), 32: (2, 1)}[rows]


def scratch(dtype, sizes: Sizes) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    rows = sizes.live
    units, queries = depths(rows)

    return {
        "raw": plgpu.SMEM((units, KEYS, ROW), widen.STORED),
        "keys": lib.swizzled((SLOTS, BLOCK, RANK), dtype),
        "k_rope": lib.swizzled((SLOTS, BLOCK, ROPE), dtype),
        "q": lib.swizzled((queries, rows, RANK), dtype),
        "q_rope": lib.swizzled((queries, rows, ROPE), dtype),
        "weights": lib.swizzled((SLOTS, rows, BLOCK), dtype),
        "stats": plgpu.SMEM((SLOTS + 3, rows), F32),
        "raw_full": lib.barrier(_copies(sizes.page), 2 * units),  # copy engine -> each of widen
        "keys_full": lib.barrier(2, SLOTS),  # widen -> scores
        "q_full": lib.barrier(2, queries),  # copy engine -> scores
        "p_ready": lib.barrier(count=SLOTS),  # scores -> values: P and its factor
        "freed": lib.barrier(count=SLOTS),  # values -> widen: keys, P and factor were read
        "inverse_ready": lib.barrier(count=2),  # scores -> values: 1 / sum of a piece
    }


def _copies(page: int) -> int:
    """Pages that a unit touches."""
    return max(KEYS // page, 1)


def attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array,
    cache_scale: jax.Array,
    page_table: jax.Array,
    plan: wp.WorkPlan,
    *,
    sizes: Sizes,
    scale: float,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``mosaic_sm90.attend`` for an e4m3 cache and at most 32 rows."""
    rows, dtype = q_latent.shape[0], q_latent.dtype
    slots = plan.slots + CHAINS  # the merge reads over the last
    body = functools.partial(
        _body,
        sizes=sizes,
        scale=scale * math.log2(math.e),
        early_launch=early_launch,
        simulate=interpret is not None,
    )
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((rows, RANK), dtype),
            shape((rows,), F32),
            shape((slots * ROWS, RANK), dtype),
            shape((slots, 1, ROWS), F32),
        ),
        scratch_types=scratch(dtype, sizes),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=4,
        thread_name="wg",
        kernel_name="mla_dense_decode_few",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=REDUCTION
        ),
    )
    scales = cache_scale.reshape(1)
    return kernel(q_latent, q_rope, pages, scales, page_table, plan.pieces, plan.tasks)


def _body(
    ql_g, qr_g, pages_g, scales_g, table_g, work_g, tasks_g,
    out_g, lse_g, part_g, part_lse_g,
    *, sizes, scale, early_launch, simulate,
    raw, keys, k_rope, q, q_rope, weights, stats,
    raw_full, keys_full, q_full, p_ready, freed, inverse_ready,
):  # fmt: skip
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    begin, end = tasks_g[worker, wp.BEGIN], tasks_g[worker, wp.STOP]
    rows, (units, buffers) = sizes.live, depths(sizes.live)

    def blocks_of(p):
        return work_g[p, wp.END] - work_g[p, wp.FIRST]

    def row_of(p):
        return pl.multiple_of(work_g[p, wp.TOKEN] * sizes.heads, 8)

    def live_rows(p):
        return work_g[p, wp.QUERIES] * sizes.heads

    def fill(x, size):
        return lax.broadcast_in_dim(x, (size, rows), [1])

    def slot(g):
        return lax.rem(g, jnp.int32(SLOTS))

    def scores():
        unit = scales_g[0]
        factor = scale * unit

        def load_queries(p):
            i = lax.rem(p - begin, jnp.int32(buffers))
            size = min(rows, ql_g.shape[0])
            to, these = pl.ds(0, size), pl.ds(row_of(p), size)
            plgpu.copy_gmem_to_smem(ql_g.at[these], q.at[i, to], q_full.at[i])
            plgpu.copy_gmem_to_smem(qr_g.at[these], q_rope.at[i, to], q_full.at[i])

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
            if buffers > 1:
                pl.when(p + 1 < end)(lambda: load_queries(p + 1))

            def step(j, carry):
                top, total = carry
                s = slot(g0 + j)
                k = lib.afresh(i, simulate=simulate)
                plgpu.barrier_wait(keys_full.at[s])

                def products(acc):
                    lib.matmul(acc, keys.at[s], q.at[k].T, simulate=simulate)
                    lib.matmul(acc, k_rope.at[s], q_rope.at[k].T, simulate=simulate)
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
                pl.when(p + 1 < end)(lambda: load_queries(p + 1))
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

        pl.when(begin < end)(lambda: load_queries(begin))
        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def values():
        if rows > 16:
            plgpu.set_max_registers(REGISTERS[1], action="increase")

        def rescale(o, shrink):
            """``o`` times a factor of each column; all are one in most blocks."""

            def scaled():
                return o * fill(shrink, RANK)

            if simulate:
                return scaled()
            return lax.cond(lib.any_below_one(shrink, COLUMN), scaled, lambda: o)

        def piece(p, g0):
            n, first, length = blocks_of(p), work_g[p, wp.FIRST], work_g[p, wp.LENGTH]
            part, row, count = work_g[p, wp.SLOT], row_of(p), live_rows(p)

            def step(j, o):
                s = slot(g0 + j)
                plgpu.barrier_wait(p_ready.at[s])
                shrink = plgpu.load(stats.at[ALPHA + s], layout=COLUMN)
                o = rescale(o, shrink)
                valid = length - (first + j) * BLOCK
                pl.when(valid < BLOCK)(lambda: lib.clear_rows(keys.at[s], valid))

                def products(acc):
                    lib.matmul(acc, keys.at[s].T, weights.at[s].T, simulate=simulate)

                o = lib.accumulate(o, products, simulate=simulate)
                pl.when(j < n - 1)(lambda: plgpu.barrier_arrive(freed.at[s]))
                return o

            o = lax.fori_loop(0, n, step, lib.tile(0.0, (RANK, rows), F32))
            s, i = slot(g0 + n - 1), lax.rem(p - begin, jnp.int32(2))
            plgpu.barrier_wait(inverse_ready.at[i])
            o = o * fill(plgpu.load(stats.at[INVERSE + i], layout=COLUMN), RANK)
            result = keys.at[s, pl.ds(0, rows)]  # the last block's slot takes the result
            turned = plgpu.layout_cast(o.astype(keys.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            result.T[...] = turned
            plgpu.commit_smem()

            def store(to, row):
                lib.store_rows(result, to, row, count, rows=rows, step=sizes.step)

            pl.when(part < 0)(lambda: store(out_g, row))
            pl.when(part >= 0)(lambda: store(part_g, part * ROWS))
            if early_launch:  # sooner, and the merge would only wait longer
                pl.when(p == end - 1)(plgpu.griddepcontrol_launch_dependents)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(freed.at[s])
            return g0 + n

        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def widen_keys(half: int):
        """Units ``half, half + 2, ...`` of the stream: keys 32 ``half`` on of every block.

        Unit ``h`` lies in buffer ``h % units``; whoever took it there loads unit ``h + units``,
        always of the same half of a block.
        """
        if rows > 16:
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
        ahead, of = divmod(half + units, 2)
        num_pages, width, page = pages_g.shape[0], table_g.shape[1], sizes.page
        copies = _copies(page)

        def ids_of(request, block):
            """Page ids of a unit as the table has them: nothing waits for them yet."""
            if page > KEYS:
                columns = [lax.div(block, jnp.int32(page // BLOCK))]
            else:
                columns = [(2 * block + of) * copies + i for i in range(copies)]
            return [table_g[request, jnp.clip(c, 0, width - 1)] for c in columns]

        def load(block, ids, u):
            row, size = 0, KEYS // copies
            if page > KEYS:
                row = lax.rem(block, jnp.int32(page // BLOCK)) * BLOCK + of * KEYS
            for i, page_id in enumerate(ids):
                src = pages_g.at[jnp.clip(page_id, 0, num_pages - 1), pl.ds(row, size)]
                dst = raw.at[u, pl.ds(i * size, size)]
                plgpu.copy_gmem_to_smem(src, dst, raw_full.at[of * units + u], oob_mode=IN_BOUNDS)

        def advance(p, request, block, last):
            """The block behind one of piece ``p``: its piece, request, number and piece's end."""

            def beyond():
                q = p + 1
                return q, work_g[q, wp.REQUEST], work_g[q, wp.FIRST], work_g[q, wp.END]

            def within():
                return p, request, block + 1, last

            return lax.cond((block + 1 < last) | (p >= end), within, beyond)

        def issue(cursor, u):
            """Load the unit of ``cursor`` if there is one; whether there is, and the next one."""
            p, request, block, last, *ids = cursor
            pl.when(p < end)(lambda: load(block, ids, u))
            place = advance(p, request, block, last)
            return p < end, (*place, *ids_of(place[1], place[2]))

        request, first, last = (tasks_g[worker, c] for c in (wp.OF_REQUEST, wp.FROM, wp.TO))
        cursor = begin, request, first, last, *ids_of(request, first)
        found = []
        for k in range(ahead):
            there, cursor = issue(cursor, (2 * k + of) % units)
            found.append(there)

        def step(carry):
            g, found, cursor = carry
            u, s = lax.rem(2 * g + half, jnp.int32(units)), slot(g)
            plgpu.barrier_wait(raw_full.at[half * units + u])
            taken = widen.take(raw.at[u], simulate=simulate)
            plgpu.commit_smem()
            there, cursor = issue(cursor, u)
            pl.when(g >= SLOTS)(lambda: plgpu.barrier_wait(freed.at[s]))
            widen.put(taken, keys.at[s], k_rope.at[s], half, simulate=simulate)
            plgpu.commit_smem()
            plgpu.barrier_arrive(keys_full.at[s])
            return g + 1, (*found[1:], there), cursor

        start = jnp.int32(0), tuple(found), cursor
        g, *_ = lax.while_loop(lambda carry: carry[1][0], step, start)
        for k in range(SLOTS, 0, -1):
            pl.when(g >= k)(lambda k=k: plgpu.barrier_wait(freed.at[slot(g - k)]))

    pl.when(wg == 0)(scores)
    pl.when(wg == 1)(values)
    pl.when(wg == 2)(lambda: widen_keys(0))
    pl.when(wg == 3)(lambda: widen_keys(1))
