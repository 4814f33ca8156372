"""Sparse absorbed decode and prefill on Hopper: Pallas Mosaic GPU.

Computes ``ref.attend`` for rows of 576 or 512 columns, the first 512 of which are the value, over
the slots of one cache or of two, in one softmax. A thread block owns 64 heads of one piece of a
token at a time (``line_plan``). Four warpgroups walk its blocks of 64 keys as one stream::

  wg 0 scores   S = Q K^T, softmax, P -> shared memory
  wg 1 left     O[:, :256] += P V[:, :256]
  wg 2 right    O[:, 256:] += P V[:, 256:]
  wg 3 feed     gathers rows, widens records: the keys of the blocks to come (``feed_sm90``)

  feed -> full -> scores -> p_ready -> left, right -> freed -> feed

Two blocks of keys lie in shared memory; with 576 columns ``P`` takes the place of the rotary
columns of its own block, which were read by then. The result of a piece leaves through the slot of
its last block. The next token's queries are loaded when the last scores of this one are done.

The bound of a block: 2176 tensor-core cycles, and some 2450 of shared memory (all of ``Q`` is read
from there). ``docs/kernels/sparse_attention.md`` has the arithmetic.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode.combine_sm90 import CHAINS
from mla_jax.pallas.mosaic_lib import LAG, LOWEST, ROW
from mla_jax.pallas.sparse_attention.feed_sm90 import MARKS, SLOTS, Feed
from mla_jax.pallas.sparse_attention.line_plan import Line
from mla_jax.pallas.sparse_attention.rows_sm90 import BLOCK, Scope

__all__ = ["ROWS", "VALUE", "attend", "scratch"]

ROWS = 64  # heads of a tile
VALUE = 512  # columns of the value
HALF = VALUE // 2
PART = (
    128  # columns of one product of values: one of 256 takes more registers than the launch gives
)
REGISTERS = (80, 160, 112)  # of a thread: scores, halves, feed; 128 each at the launch
ALPHA, INVERSE, LSE = 0, SLOTS, SLOTS + 2  # rows of the statistics buffer
COLUMN = plgpu.Layout.WGMMA.reduce(0)

I32 = jnp.int32
F32 = jnp.float32


def scratch(dtype, width: int) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    more = width - VALUE
    buffers = {
        "q": lib.swizzled((1, ROWS, VALUE), dtype),
        "left": lib.swizzled((SLOTS, BLOCK, HALF), dtype),
        "right": lib.swizzled((SLOTS, BLOCK, HALF), dtype),
        "weights": lib.swizzled((SLOTS, ROWS, BLOCK), dtype),  # first: columns behind the value
        "stats": plgpu.SMEM((SLOTS + 3, ROWS), F32),
        "marks": plgpu.SMEM((MARKS, BLOCK), F32),  # which keys of a block there are
        "q_full": lib.barrier(1 + (more > 0)),  # copy engine -> scores
        "full": lib.barrier(count=SLOTS),  # feed -> scores: keys and marks
        "p_ready": lib.barrier(count=SLOTS),  # scores -> left, right: P and its factor
        "freed": lib.barrier(2, SLOTS),  # left, right -> feed: keys, P and factor were read
        "inverse_ready": lib.barrier(count=2),  # scores -> left, right: 1 / sum of a piece
    }
    return buffers | ({"q_rope": lib.swizzled((1, ROWS, more), dtype)} if more else {})


@lib.lowered_once("scopes", "line", "heads", "scale", "early_launch", "interpret")
def attend(
    queries: tuple[jax.Array, ...],
    layers: tuple[jax.Array, ...],
    first_slots: tuple[jax.Array, ...],
    lists: tuple[jax.Array, ...],
    pages: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    *,
    scopes: tuple[Scope, ...],
    line: Line,
    heads: int,
    scale: float,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``out`` [tokens * heads, 512] and ``lse`` [tokens * heads] of tokens in one piece, and the
    same ``[slots * tiles * 64, 512]``, base-2 ``[slots, tiles, 64]`` of the other pieces.

    Queries are ``[tokens * heads, 512]`` and, of columns behind the value, ``[tokens * heads,
    64]``; ``heads`` is a multiple of 8. ``layers`` are numbers, ``[1]`` of each stack among the
    caches; ``first_slots`` is that of the line, if anything is split. ``pages`` are the caches, all
    layers of each, ``[pages, bytes]`` of records and ``[rows, width]`` of elements. ``sinks`` are
    none, or one array of as many as there are rows of tiles, if no token has several pieces. Rows
    of tokens in several pieces are left as they were allocated.
    """
    count, width, dtype = queries[0].shape[0], sum(q.shape[1] for q in queries), queries[0].dtype
    tiles = -(-heads // ROWS)
    slots = line.slots + CHAINS  # the merge reads over the last
    body = functools.partial(
        _body,
        scopes=scopes,
        line=line,
        heads=heads,
        scale=scale * math.log2(math.e),
        early_launch=early_launch,
        simulate=interpret is not None,
        operands=len(queries),
    )
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((count, VALUE), dtype),
            shape((count,), F32),
            shape((slots * tiles * ROWS, VALUE), dtype),
            shape((slots, tiles, ROWS), F32),
        ),
        scratch_types=scratch(dtype, width),
        grid=(line.workers, tiles),  # tiles of a worker run side by side: one read of its rows
        grid_names=("worker", "tile"),
        num_threads=4,
        thread_name="wg",
        kernel_name="mla_sparse",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return kernel(*queries, *layers, *first_slots, *lists, *pages, *sinks)


def _body(
    *refs,
    scopes, line, heads, scale, early_launch, simulate, operands,
    q, left, right, weights, stats, marks, q_full, full, p_ready, freed, inverse_ready,
    q_rope=None,
):  # fmt: skip
    wg, worker, tile = (lax.axis_index(n) for n in ("wg", "worker", "tile"))
    n, rest = len(scopes), list(refs)
    queries = [rest.pop(0) for _ in range(operands)]
    layers = [
        jnp.clip(rest.pop(0)[0], 0, scope.layers - 1) if scope.layers else I32(0)
        for scope in scopes
    ]
    first_slot = rest.pop(0)[worker] if line.split else I32(-1)
    lists, pages, sinks = rest[:n], rest[n : 2 * n], rest[2 * n : -4]
    out_g, lse_g, part_g, part_lse_g = rest[-4:]
    tiles = part_lse_g.shape[1]
    live = min(1 << (heads - 1).bit_length(), ROWS)  # of a tile, at most
    step_of_rows = math.gcd(heads, ROWS)
    blocks = I32(line.blocks)
    start = worker * line.share
    stop = jnp.minimum(start + line.share, line.total)
    first_token, last_token = lax.div(start, blocks), lax.div(stop - 1, blocks)

    def piece_of(token):
        """Where a token's piece begins and ends among its blocks, and whether it is all of them."""
        begin = jnp.maximum(start - token * line.blocks, 0)
        end = jnp.minimum(stop - token * line.blocks, line.blocks)
        return end - begin, (begin == 0) & (end == line.blocks)

    def row_of(token):
        return pl.multiple_of(token * heads + tile * ROWS, 8)

    count = jnp.clip(heads - tile * ROWS, 0, ROWS)  # rows of this tile

    def walk(piece) -> None:
        """``piece(token, pieces before, blocks before, slot)`` for every token of the worker."""

        def turn(token, carry):
            g, part = carry
            blocks, whole = piece_of(token)
            piece(token, g, jnp.where(whole, -1, part))
            return g + blocks, part + jnp.where(whole, 0, 1)

        lax.fori_loop(first_token, last_token + 1, turn, (I32(0), first_slot))

    def ring(g):
        return lax.rem(g, I32(SLOTS))

    def parity(token):
        return lax.rem(token - first_token, I32(2))

    def scores():
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        size = min(live, queries[0].shape[0])

        def load(token):
            for q_g, to in zip(queries, (q, q_rope), strict=False):
                these = q_g.at[pl.ds(row_of(token), size)]
                plgpu.copy_gmem_to_smem(these, to.at[0, pl.ds(0, size)], q_full)

        def piece(token, g0, part):
            n, _ = piece_of(token)
            row = row_of(token)
            plgpu.barrier_wait(q_full)

            def step(j, carry):
                top, total = carry
                g = g0 + j
                s = ring(g)
                i = lib.afresh(I32(0), simulate=simulate)

                def products(acc):
                    plgpu.barrier_wait(full.at[s])
                    for k, keys in enumerate((left, right)):
                        columns = q.at[i, :, pl.ds(k * HALF, HALF)]
                        lib.matmul(acc, columns, keys.at[s].T, simulate=simulate)
                    if q_rope is not None:
                        lib.matmul(acc, q_rope.at[i], weights.at[s].T, simulate=simulate)
                    return acc[...]

                x = pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), F32))
                there = plgpu.load(marks.at[lax.rem(g, I32(MARKS))], layout=COLUMN)
                there = lax.broadcast_in_dim(there, (ROWS, BLOCK), [1])
                x = jnp.where(there > 0.0, x, -jnp.inf)

                def rise():
                    found = x.max(axis=1) * scale
                    found = jnp.where(found > top + LAG, found, top)
                    return found, jnp.exp2(top - found)

                def stay():
                    return top, lib.row_vector(1.0, ROWS)

                above = lib.fold_columns(x, 8, jnp.maximum) * scale - lib.fill_rows(top, 8)
                rises = lib.any_of_warp_above(above, LAG, simulate=simulate)
                top, shrink = lax.cond(rises, rise, stay)
                w = jnp.exp2(x * scale - lib.fill_rows(top, BLOCK))
                stats[ALPHA + s] = shrink
                weights[s] = w.astype(weights.dtype)
                lib.fence(simulate=simulate)
                plgpu.barrier_arrive(p_ready.at[s])
                return top, total * lib.fill_rows(shrink, 8) + lib.fold_columns(w, 8)

            top = lib.row_vector(LOWEST, ROWS)
            if live < ROWS:  # no weights in other rows: what they hold was never loaded
                number = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=ROW)
                top = jnp.where(number < count, top, lib.row_vector(-LOWEST, ROWS))
            start = top, lib.tile(0.0, (ROWS, 8), F32)
            top, total = lax.fori_loop(0, n, step, start)
            pl.when(token < last_token)(lambda: load(token + 1))
            total = total.sum(axis=1)
            i = parity(token)
            lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
            share = 1.0 / total
            for sinks_g in sinks:  # one more key, of value zero
                these = sinks_g.at[pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)]
                sink = plgpu.load(these, layout=ROW, optimized=False) * math.log2(math.e)
                share = share / (1.0 + jnp.exp2(sink - lse2))
            stats[INVERSE + i] = jnp.where(total > 0.0, share, 0.0)
            plgpu.barrier_arrive(inverse_ready.at[i])

            @pl.when(part < 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                stats[LSE] = lse2 * math.log(2.0)
                plgpu.commit_smem()
                lse = stats.at[LSE, pl.ds(0, live)]
                lib.store_rows(lse, lse_g, row, count, rows=live, step=step_of_rows)

            @pl.when(part >= 0)
            def _():
                part_lse_g[part, tile] = lse2

        load(first_token)
        walk(piece)
        plgpu.wait_smem_to_gmem(0)

    def half(keys, columns, *, last: bool):
        plgpu.set_max_registers(REGISTERS[1], action="increase")

        def rescale(o, shrink):
            """``o`` times a factor of each row; all of a warp's are one in most blocks."""

            def scaled():
                return [x * lib.fill_rows(shrink, PART) for x in o]

            if simulate:
                return scaled()
            return lax.cond(lib.any_below_one(shrink), scaled, lambda: o)

        def piece(token, g0, part):
            n, _ = piece_of(token)
            row = row_of(token)

            def step(j, o):
                s = ring(g0 + j)
                plgpu.barrier_wait(p_ready.at[s])
                o = rescale(o, plgpu.load(stats.at[ALPHA + s], layout=ROW))

                def products(acc):
                    for k, part in enumerate(acc):
                        values = keys.at[s, :, pl.ds(k * PART, PART)]
                        lib.matmul(part, weights.at[s], values, simulate=simulate)

                o = lib.accumulate(o, products, simulate=simulate)
                pl.when(j < n - 1)(lambda: plgpu.barrier_arrive(freed.at[s]))
                return o

            o = [lib.tile(0.0, (ROWS, PART), F32) for _ in range(HALF // PART)]
            o = lax.fori_loop(0, n, step, o)
            s, i = ring(g0 + n - 1), parity(token)
            plgpu.barrier_wait(inverse_ready.at[i])
            inverse = lib.fill_rows(plgpu.load(stats.at[INVERSE + i], layout=ROW), PART)
            for k, x in enumerate(o):  # the slot of the last block takes the result
                keys[s, :, pl.ds(k * PART, PART)] = (x * inverse).astype(keys.dtype)
            plgpu.commit_smem()

            def store(to, row):
                result = keys.at[s, pl.ds(0, live)]
                lib.store_rows(result, to.at[:, columns], row, count, rows=live, step=step_of_rows)

            pl.when(part < 0)(lambda: store(out_g, row))
            pl.when(part >= 0)(lambda: store(part_g, (part * tiles + tile) * ROWS))
            if last and early_launch:  # sooner, and the merge would only wait longer
                pl.when(token == last_token)(plgpu.griddepcontrol_launch_dependents)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(freed.at[s])

        walk(piece)
        plgpu.wait_smem_to_gmem(0)

    def feed():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        Feed(
            scopes=scopes,
            lists=lists,
            pages=pages,
            layers=layers,
            start=start,
            stop=stop,
            keys=(left, right),
            rotary=weights,
            marks=marks,
            full=full,
            freed=freed,
        ).run(simulate=simulate)

    pl.when(wg == 0)(scores)
    pl.when(wg == 1)(lambda: half(left, pl.ds(0, HALF), last=False))
    pl.when(wg == 2)(lambda: half(right, pl.ds(HALF, HALF), last=True))
    pl.when(wg == 3)(feed)
