"""Dense absorbed decode on Hopper: Pallas Mosaic GPU, queries in registers.

Computes ``ref.dense_decode`` for rank 512, rope 64. A thread block owns 64 query rows of one
piece of a request at a time (``work_plan``): rows are ``(query, head)`` pairs, so few heads
and several queries share a tile. Three warpgroups walk the piece in blocks of 64 keys::

  wg 0 scores   S = Q K^T, softmax, P -> shared memory; columns 0..447 of Q are the register
                operand of its products, 448..575 stay in shared memory
  wg 1 left     O[:, :256] += P V[:, :256]    loads Q and K columns 0..255
  wg 2 right    O[:, 256:] += P V[:, 256:]    loads columns 256..511, the rotary columns, Q's tail

Queries and blocks of all pieces of a block form one stream through a ring of three slots, so
the next piece is on its way while the present one ends::

  slot   0   1   2   0   1   2   0   1        Q of piece p, its blocks, Q of p + 1, ...
         Q   k0  k1  k2  k3  Q'  k0' k1'

  scores      wait full -> QK(i+1) -> softmax -> P ----.
                |             `-- go(i) -> left:  PV(i) -> consumed -> reload slot
                |                            `-- issued(i) -> right: the same
                `-- P_ready(i), behind the first products of QK(i+1)

Scores read the left half of a slot first, so its products are queued first too: it is free, and
loaded again, half of a ``PV`` sooner than the right one.

Bytes of an e4m3 cache come into the slot that their keys will have, two elements ahead. The
halves widen them while their products run (``widen_sm90``), scores the rotary columns under the
first products of a block; the scale goes into factors.

The bound: 64 rows need 2176 tensor-core cycles a block (QK 1152, PV 1024), and 73,728 bytes.
With all of Q in shared memory its traffic alone would take 2368 cycles; so 232 KB, 1856.
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
from mla_jax.pallas.mosaic_lib import LAG, LOWEST, ROW, WGMMA

__all__ = ["attend", "scratch"]

HALF = RANK // 2
TAIL = 64  # latent columns of Q that stay in shared memory, beside the rotary ones
EARLY = 64  # columns whose products are issued before the last block's weights are published
SLOTS = 3
REGISTERS = (184, 160)  # of a thread: scores, halves; with less, products are serialised
ALPHA, INVERSE, LSE = 0, SLOTS, SLOTS + 2  # rows of the statistics buffer

I32 = jnp.int32
F32 = jnp.float32


def scratch(dtype, copies: int, simulate: bool, quantised: bool = False) -> dict:
    """Shared memory and barriers of one thread block; an element of keys comes in ``copies``.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    parts = 1 if quantised else copies

    apart = simulate and quantised  # the interpreter takes a union as one place, not as slots

    def keys(slots, columns):
        numbers = lib.swizzled((slots, BLOCK, columns), dtype)
        if not quantised or apart:
            return numbers
        return plgpu.RefUnion(numbers, widen.raw(slots, columns))

    buffers = {
        "left": keys(SLOTS, HALF),
        "right": keys(SLOTS, HALF),
        "k_rope": keys(2, ROPE),  # then P of the same block
        "q_tail": lib.swizzled((2, ROWS, 64), dtype),
        "stats": plgpu.SMEM((SLOTS + 3, ROWS), F32),
        "left_full": lib.barrier(parts, SLOTS),  # copy engine, or left if quantised -> scores
        "right_full": lib.barrier(parts, SLOTS),  # copy engine, or right -> scores
        "rope_full": lib.barrier(copies, 2),  # copy engine -> scores, which widen bytes
        "tail_full": lib.barrier(2),  # copy engine -> scores
        "q_taken": lib.barrier(count=SLOTS),  # scores -> left, right: the slot of Q is free
        "p_ready": lib.barrier(count=SLOTS),  # scores -> left, right: P and its factor
        "go": lib.barrier(count=SLOTS),  # scores -> left, or both: QK of the next block is done
        "left_issued": lib.barrier(count=SLOTS),  # left -> right: products of PV are queued
        "left_done": lib.barrier(count=SLOTS),  # left -> right: P was read
        "inverse_ready": lib.barrier(count=2),  # scores -> left, right: 1 / sum of a piece
    }
    if quantised:
        buffers["left_raw"] = lib.barrier(copies, SLOTS)  # copy engine -> left: bytes of a block
        buffers["right_raw"] = lib.barrier(copies, SLOTS)  # copy engine -> right
    if apart:
        buffers |= {f"{half}_bytes": widen.raw(SLOTS, HALF) for half in ("left", "right")}
        buffers["rope_bytes"] = widen.raw(2, ROPE)
    if simulate:
        buffers["q_spill"] = plgpu.SMEM((ROWS, HALF), dtype)
    return buffers


@lib.lowered_once("sizes", "scale", "defer", "prefetch", "early_launch", "interpret")
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
    defer: bool,
    prefetch: bool,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``out`` [tokens * heads, 512] and ``lse`` [tokens * heads] of requests in one piece, and
    the same ``[slots * tiles * 64, 512]``, base-2 ``[slots, tiles, 64]`` of the other pieces.

    Queries are ``[tokens * heads, columns]``; ``cache_scale`` counts where pages are e4m3. Rows
    that no piece of a whole request covers are left as they were allocated.
    """
    rows, dtype = q_latent.shape[0], q_latent.dtype
    tiles, simulate = sizes.tiles, interpret is not None
    slots = plan.slots + CHAINS  # the merge reads over the last
    quantised = pages.dtype == widen.STORED
    body = functools.partial(
        _body,
        sizes=sizes,
        scale=scale * math.log2(math.e),
        defer=defer,
        prefetch=prefetch,
        early_launch=early_launch,
        simulate=simulate,
        quantised=quantised,
    )
    body, of_layer = lib.with_layer(body, layer)
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((rows, RANK), dtype),
            shape((rows,), F32),
            shape((slots * tiles * ROWS, RANK), dtype),
            shape((slots, tiles, ROWS), F32),
        ),
        scratch_types=scratch(dtype, sizes.copies, simulate, quantised),
        grid=(sizes.workers, tiles),  # tiles of a worker run side by side: one read of its keys
        grid_names=("worker", "tile"),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_dense_decode",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    cache = pages.reshape(-1, *pages.shape[-2:]), cache_scale.reshape(-1)
    return kernel(*of_layer, q_latent, q_rope, *cache, page_table, plan.pieces, plan.tasks)


def _body(
    layer_g, ql_g, qr_g, pages_g, scales_g, table_g, work_g, tasks_g,
    out_g, lse_g, part_g, part_lse_g,
    *, sizes, scale, defer, prefetch, early_launch, simulate, quantised,
    left, right, k_rope, q_tail, stats,
    left_full, right_full, rope_full, tail_full,
    q_taken, p_ready, go, left_issued, left_done, inverse_ready,
    left_raw=None, right_raw=None,
    left_bytes=None, right_bytes=None, rope_bytes=None, q_spill=None,
):  # fmt: skip
    wg, worker, tile = (lax.axis_index(n) for n in ("wg", "worker", "tile"))
    begin, end = tasks_g[worker, wp.BEGIN], tasks_g[worker, wp.STOP]
    live = sizes.live
    if quantised and not simulate:
        (left, left_bytes), (right, right_bytes), (k_rope, rope_bytes) = left, right, k_rope
    page, copies, width = sizes.page, sizes.copies, table_g.shape[1]
    layer, num_pages = (
        lib.layer_of(layer_g, scales_g.shape[0]),
        pages_g.shape[0] // scales_g.shape[0],
    )
    first_page = layer * num_pages

    def blocks_of(p):
        return work_g[p, wp.END] - work_g[p, wp.FIRST]

    def row_of(p):
        return row_at(work_g[p, wp.TOKEN])

    def row_at(token):
        return pl.multiple_of(token * sizes.heads + tile * ROWS, 8)

    def live_rows(p):
        return jnp.clip(work_g[p, wp.QUERIES] * sizes.heads - tile * ROWS, 0, ROWS)

    def element(p, n, e, queries=1):
        """Piece and element ``e`` elements behind the queries of piece ``p`` of ``n`` blocks.

        Element 0 of a piece is its queries, element 1 its first block; if ``queries`` is 0 those
        of later pieces do not count. A piece has two or more elements, so three steps reach the
        piece after the next one at most, and so do two steps without queries.
        """
        after = e - 1 - n
        third = (after >= 0) & (after >= blocks_of(p + 1) + queries)
        q = p + (after >= 0).astype(I32) + third.astype(I32)
        return q, jnp.where(after < 0, e, jnp.where(third, 0, after) + 1 - queries)

    def ids_of(request, block):
        """Page ids of a block as the table has them: nothing waits for them yet."""
        if copies > 1:
            columns = [block * copies + i for i in range(copies)]
        else:
            columns = [lax.div(block, jnp.int32(page // BLOCK))]
        return [table_g[request, jnp.clip(c, 0, width - 1)] for c in columns]

    def place_of(block, ids):
        """Page ids of a block, and its first row in a page of several blocks."""
        parts, row = page // BLOCK, 0
        if parts > 1:
            row = pl.multiple_of(lax.rem(block, jnp.int32(parts)) * BLOCK, BLOCK)
        return [first_page + jnp.clip(i, 0, num_pages - 1) for i in ids], row

    def find(p, n, e, here, queries=1):
        """``element``, its block and its page ids; ``here()`` says so of one of piece ``p``."""

        def later():
            q, i = element(p, n, e, queries)
            block = work_g[q, wp.FIRST] + jnp.maximum(i - 1, 0)
            return q, i, block, *ids_of(work_g[q, wp.REQUEST], block)

        return lax.cond(e <= n, here, later)

    def load_block(block, ids, columns, buffer, stored, barrier):
        """Columns of a block to ``buffer``, or their bytes to where they are widened."""
        ids, row = place_of(block, ids)
        size = BLOCK // copies
        buffer = stored.at[1] if quantised else buffer
        for i, page_id in enumerate(ids):
            src = pages_g.at[page_id, pl.ds(row, size), columns]
            plgpu.copy_gmem_to_smem(src, buffer.at[pl.ds(i * size, size)], barrier)

    def load_queries(first, columns, buffer, barrier):
        parts = 1 if quantised else copies  # as many arrivals as a block has
        size = min(max(live // parts, 8), ql_g.shape[0])
        for i in range(parts):
            rows = pl.ds(pl.multiple_of(first + i * size, 8), size)
            plgpu.copy_gmem_to_smem(
                ql_g.at[rows, columns], buffer.at[pl.ds(i * size, size)], barrier
            )

    def at(refs, i):
        return None if refs is None else refs.at[i]

    def slot(g):
        return lax.rem(g, jnp.int32(SLOTS))

    def parity(x):
        return lax.rem(x, jnp.int32(2))

    def turn(s, r):
        """Slot and buffer of rotary columns of the next block: sooner known than by a division."""
        return jnp.where(s == SLOTS - 1, 0, s + 1), 1 - r

    def turn_of_first(p, g0):
        return slot(g0 + 1), parity(g0 - (p - begin))

    def scores():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        unit = scales_g[layer] if quantised else 1.0
        factor = scale * unit

        def mask(x, p, block):
            """Minus infinity where a row may not see a key of this block."""
            seen = work_g[p, wp.LENGTH] - block * BLOCK
            column = plgpu.broadcasted_iota(I32, (ROWS, BLOCK), 1, layout=WGMMA)
            if sizes.queries > 1:
                row = plgpu.broadcasted_iota(I32, (ROWS, BLOCK), 0, layout=WGMMA) + tile * ROWS
                seen = seen - work_g[p, wp.QUERIES] + 1
                for k in range(1, sizes.queries):
                    seen = seen + (row >= k * sizes.heads).astype(I32)
            return jnp.where(column < seen, x, -jnp.inf)

        def piece(p, g0):
            n, first = blocks_of(p), work_g[p, wp.FIRST]
            whole, part = work_g[p, wp.SLOT] < 0, work_g[p, wp.SLOT]
            row, count = row_of(p), live_rows(p)
            unmasked = work_g[p, wp.LENGTH] - work_g[p, wp.QUERIES] + 1
            plgpu.barrier_wait(left_full.at[slot(g0)])
            plgpu.barrier_wait(right_full.at[slot(g0)])
            ql = plgpu.load(left.at[slot(g0)], layout=WGMMA)
            qr = plgpu.load(right.at[slot(g0), :, pl.ds(0, HALF - TAIL)], layout=WGMMA)
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_taken.at[slot(g0)])
            plgpu.barrier_wait(tail_full)

            def spill(columns):
                return None if q_spill is None else q_spill.at[:, pl.ds(0, columns)]

            def publish(s):
                """Weights and their factor, of the block in slot ``s``: each thread its own."""
                lib.fence(simulate=simulate)
                plgpu.barrier_arrive(p_ready.at[s])

            def step(j, carry):
                top, total, s, r = carry  # s, r: the block's slot, and buffer of rotary columns
                kl, kr = left.at[s], right.at[s]
                previous = jnp.where(s == 0, SLOTS - 1, s - 1)

                def products(acc):
                    def multiply(q, keys):
                        lib.matmul_registers(acc, q, keys.T, spill(q.shape[1]))

                    plgpu.barrier_wait(left_full.at[s])
                    multiply(ql[:, :EARLY], kl.at[:, pl.ds(0, EARLY)])
                    if defer:  # while the tensor cores have these; PV of that block waits anyway
                        pl.when(j > 0)(lambda: publish(previous))
                    multiply(ql[:, EARLY:], kl.at[:, pl.ds(EARLY, HALF - EARLY)])
                    plgpu.barrier_wait(right_full.at[s])
                    multiply(qr, kr.at[:, pl.ds(0, HALF - TAIL)])
                    last = kr.at[:, pl.ds(HALF - TAIL, TAIL)].T
                    lib.matmul(acc, q_tail.at[0], last, simulate=simulate)
                    plgpu.barrier_wait(rope_full.at[r])
                    if quantised:
                        widen.keys(k_rope.at[r], at(rope_bytes, r), simulate=simulate)
                        plgpu.commit_smem()
                    lib.matmul(acc, q_tail.at[1], k_rope.at[r].T, simulate=simulate)
                    if defer:  # sooner, and the other products would delay these
                        plgpu.wgmma_wait(1)
                        pl.when(j > 0)(lambda: plgpu.barrier_arrive(go.at[previous]))
                    return acc[...]

                x = pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), F32))
                block = first + j
                full = (block + 1) * BLOCK <= unmasked
                x = lax.cond(full, lambda: x, lambda: mask(x, p, block))

                def rise():
                    found = x.max(axis=1) * factor
                    found = jnp.where(found > top + LAG, found, top)
                    return found, jnp.exp2(top - found)

                def stay():
                    return top, lib.row_vector(1.0, ROWS)

                above = lib.fold_columns(x, 8, jnp.maximum) * factor - lib.fill_rows(top, 8)
                rises = lib.any_of_warp_above(above, LAG, simulate=simulate)
                top, shrink = lax.cond(rises, rise, stay)
                w = jnp.exp2(x * factor - lib.fill_rows(top, BLOCK))
                stats[ALPHA + s] = shrink
                k_rope[r] = w.astype(k_rope.dtype)
                if not defer:
                    publish(s)
                total = total * lib.fill_rows(shrink, 8) + lib.fold_columns(w, 8)
                return top, total, *turn(s, r)

            top = lib.row_vector(LOWEST, ROWS)
            if live < ROWS:  # no weights in other rows: a product with zeros takes less power
                row_of_tile = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=ROW)
                top = jnp.where(row_of_tile < count, top, lib.row_vector(-LOWEST, ROWS))
            carry = top, lib.tile(0.0, (ROWS, 8), F32), *turn_of_first(p, g0)
            top, total, *_rest = lax.fori_loop(0, n, step, carry)
            if defer:
                publish(slot(g0 + n))
                plgpu.barrier_arrive(go.at[slot(g0 + n)])
            total = total.sum(axis=1)
            i = parity(p - begin)
            stats[INVERSE + i] = jnp.where(total > 0.0, unit / total, 0.0)
            plgpu.barrier_arrive(inverse_ready.at[i])
            lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)

            @pl.when(whole)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                stats[LSE] = lse2 * math.log(2.0)
                plgpu.commit_smem()
                lse = stats.at[LSE, pl.ds(0, live)]
                lib.store_rows(lse, lse_g, row, count, rows=live, step=sizes.step)

            @pl.when(jnp.logical_not(whole))
            def _():
                part_lse_g[part, tile] = lse2

            return g0 + n + 1

        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def half(is_right: bool, keys, full, stored, raw):
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        columns = pl.ds(HALF if is_right else 0, HALF)
        rope = pl.ds(RANK, ROPE)

        def load(found, s):
            p, e, block, *ids = found
            pl.when((p < end) & (e == 0))(lambda: load_rows(row_of(p), s))
            pl.when((p < end) & (e > 0))(lambda: load_keys(block, ids, s))

        def load_rows(first, s):
            load_queries(first, columns, keys.at[s], full.at[s])

        def load_keys(block, ids, s):
            to = raw if quantised else full
            load_block(block, ids, columns, keys.at[s], at(stored, s), to.at[s])

        def convert(p, e, g):
            """Bytes of element ``g`` of the stream, ``e`` of piece ``p``, to keys."""
            if not quantised:
                return

            @pl.when((p < end) & (e > 0))
            def _():
                s = slot(g)
                plgpu.barrier_wait(raw.at[s])
                widen.keys(keys.at[s], stored.at[s], simulate=simulate)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[s])

        def load_tail(first):
            size = min(live, ql_g.shape[0])
            rows, to = pl.ds(first, size), pl.ds(0, size)
            plgpu.copy_gmem_to_smem(
                ql_g.at[rows, pl.ds(RANK - TAIL, TAIL)], q_tail.at[0, to], tail_full
            )
            plgpu.copy_gmem_to_smem(qr_g.at[rows], q_tail.at[1, to], tail_full)

        def load_rope(found, r):
            p, _, block, *ids = found
            to = k_rope.at[r], at(rope_bytes, r), rope_full.at[r]
            pl.when(p < end)(lambda: load_block(block, ids, rope, *to))

        def fetch(found, which, of_tile=0):
            """Bring columns of a block to the L2 cache: one tile does so for all."""
            p, e, block, *ids = found

            @pl.when((p < end) & (e > 0) & (tile == of_tile))
            def _():
                pages, row = place_of(block, ids)
                for page_id in pages:
                    plgpu.async_prefetch(pages_g.at[page_id, pl.ds(row, BLOCK // copies), which])

        def refill(found, s):
            """``load``, and fetch the rotary columns: their buffer is free one block later."""
            load(found, s)
            if is_right:
                fetch(found, rope)

        @pl.when(begin < end)
        def _():
            request, token = tasks_g[worker, wp.OF_REQUEST], tasks_g[worker, wp.OF_TOKEN]
            first, last = tasks_g[worker, wp.FROM], tasks_g[worker, wp.TO]
            load_rows(row_at(token), 0)
            if is_right:
                load_tail(row_at(token))
            found = begin, 1, first, *ids_of(request, first)
            load(found, 1)
            if is_right:
                load_rope(found, 0)

            @pl.when(first + 1 < last)
            def _():
                found = begin, 2, first + 1, *ids_of(request, first + 1)
                load(found, 2)
                if is_right:
                    load_rope(found, 1)

            @pl.when((first + 1 == last) & (begin + 1 < end))
            def _():
                load_rows(row_of(begin + 1), 2)
                if is_right:
                    block = work_g[begin + 1, wp.FIRST]
                    ids = ids_of(work_g[begin + 1, wp.REQUEST], block)
                    load_rope((begin + 1, 1, block, *ids), 1)

            convert(begin, 1, jnp.int32(1))

        def rescale(o, shrink):
            """``o`` times a factor of each row; all of a warp's are one in most blocks."""

            def scaled():
                return o * lib.fill_rows(shrink, HALF)

            if simulate:
                return scaled()
            return lax.cond(lib.any_below_one(shrink), scaled, lambda: o)

        def piece(p, g0):
            n, first, request = blocks_of(p), work_g[p, wp.FIRST], work_g[p, wp.REQUEST]
            length = work_g[p, wp.LENGTH]
            part, row, count = work_g[p, wp.SLOT], row_of(p), live_rows(p)  # memory is far: early

            def ahead(e):
                def here():
                    block = first + jnp.maximum(e - 1, 0)
                    return p, e, block, *ids_of(request, block)

                return find(p, n, e, here)

            found = ahead(jnp.int32(SLOTS))
            second = element(p, n, jnp.int32(2))
            convert(*second, g0 + 2)
            plgpu.barrier_wait(q_taken.at[slot(g0)])
            refill(found, slot(g0))

            def step(j, carry):
                o, before, found, s, r = carry  # the last step loads ``before``, this one ``found``
                g = g0 + 1 + j
                following = ahead(j + 2 + SLOTS)
                soon = element(p, n, j + 3)
                if is_right:
                    next_rope = find(p, n, j + 3, lambda: before, queries=0)
                plgpu.barrier_wait(p_ready.at[s])
                if is_right:
                    pl.when((j == n - 1) & (p + 1 < end))(lambda: load_tail(row_of(p + 1)))
                o = rescale(o, plgpu.load(stats.at[ALPHA + s], layout=ROW))
                valid = length - (first + j) * BLOCK
                pl.when(valid < BLOCK)(lambda: lib.clear_rows(keys.at[s], valid))
                if defer:
                    plgpu.barrier_wait(left_issued.at[s] if is_right else go.at[s])

                def products(acc):
                    lib.matmul(acc, k_rope.at[r], keys.at[s], simulate=simulate)
                    if defer and not is_right:
                        plgpu.barrier_arrive(left_issued.at[s])
                    if prefetch:
                        fetch(following, columns, min(int(is_right), sizes.tiles - 1))
                    convert(*soon, g + 2)

                o = lib.accumulate(o, products, simulate=simulate)
                if is_right:
                    plgpu.barrier_wait(left_done.at[s])
                    load_rope(next_rope, r)
                else:
                    plgpu.barrier_arrive(left_done.at[s])
                pl.when(j < n - 1)(lambda: refill(found, s))
                return o, found, following, *turn(s, r)

            o = plgpu.layout_cast(jnp.zeros((ROWS, HALF), F32), WGMMA)
            carry = o, found, ahead(jnp.int32(1 + SLOTS)), *turn_of_first(p, g0)
            o, found, *_ = lax.fori_loop(0, n, step, carry)
            s, i = slot(g0 + n), parity(p - begin)
            plgpu.barrier_wait(inverse_ready.at[i])
            o = o * lib.fill_rows(plgpu.load(stats.at[INVERSE + i], layout=ROW), HALF)

            keys[s] = o.astype(keys.dtype)  # the slot of the last block takes the result
            plgpu.commit_smem()

            def store(to, row):
                result = keys.at[s, pl.ds(0, live)]
                lib.store_rows(result, to.at[:, columns], row, count, rows=live, step=sizes.step)

            pl.when(part < 0)(lambda: store(out_g, row))
            pl.when(part >= 0)(lambda: store(part_g, (part * sizes.tiles + tile) * ROWS))
            if is_right and early_launch:  # sooner, and the merge would only wait longer
                pl.when(p == end - 1)(plgpu.griddepcontrol_launch_dependents)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refill(found, s)
            return g0 + n + 1

        lax.fori_loop(begin, end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    pl.when(wg == 0)(scores)
    pl.when(wg == 1)(lambda: half(False, left, left_full, left_bytes, left_raw))
    pl.when(wg == 2)(lambda: half(True, right, right_full, right_bytes, right_raw))
