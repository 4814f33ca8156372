"""Expanded prefill on Hopper: Pallas Mosaic GPU, two warpgroups of queries and a loader.

Computes ``ref.dense_prefill``. A tile is 128 queries of one request and one head; each of two
warpgroups owns 64 of them and the third loads. Keys are read where the up-projection left them
(``kv [keys, heads, nope + v]``) and the shared rotary key from its own array::

  scores, values   S(j+1) = Q K(j+1)^T, then O += P(j) V(j): two groups of products; the
                   softmax of S(j+1) runs under the second and under the other's products
  loader           tiles of a thread block are one stream: K(g+1), V(g), K(g+2), ...

The two warpgroups take turns in issuing products: without, they drift into step, and the tensor
cores wait while both are in their softmax. A row's weights are relative to a maximum that may lag
behind by a factor of 2**LAG, so that O is seldom rescaled. The first scores of a tile are issued
behind the last values of the tile before, whose result goes from registers to memory under them.
Some columns of the queries may stay in registers, which relieves shared memory.

Tiles begin at the first query of their request, and blocks at its first key: a view of shared
memory tiled by single rows lets the copy engine start anywhere. So the bits of a request do not
depend on its neighbours. The bound: 2560 tensor-core cycles for 128 keys. ``schedule`` orders
the tiles, ``inline_sm90`` holds the instructions that Pallas lacks, and
``docs/kernels/dense_prefill.md`` the measurements.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportAbstractUsage=false
# pyright: reportAssignmentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import inline_sm90 as inline
from mla_jax.pallas.dense_prefill import schedule as sc
from mla_jax.pallas.dense_prefill import softmax_sm90 as softmax
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["Sizes", "attend", "scratch"]

HALF = sc.ROWS // 2  # queries of a warpgroup
CHUNK = 64  # columns of one 16-bit buffer in shared memory
REGISTERS = (240, 24)  # of a thread: products, loader
STEPS = 2  # tiles whose facts are in shared memory
DRAWS = 2  # numbers drawn: one may be drawn before a slow warp has read what came before

I32 = jnp.int32
F32 = jnp.float32

K_FREE, Q_FREE, V_FREE = 4, 10, 12  # first hardware barriers; turns have 8 and 9, Mosaic 0 to 3
BOTH, ONE = 2 * 128 + 32, 128 + 32  # threads at such a barrier: warpgroups, and the loading warp

ITEM_HEAD = sc.FIELDS - 1  # column of a tile's facts in shared memory that holds its head


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the kernel is compiled for, besides dtypes and array shapes."""

    nope: int
    rope: int
    v: int
    block: int  # keys of one step
    stages: int  # blocks in shared memory, a power of two
    heads_together: int  # heads whose tiles are interleaved: their keys share the L2 cache
    workers: int
    held: int  # chunks of 64 columns of the queries that stay in registers
    hardware: bool  # buffers are freed by hardware barriers, not by those in shared memory
    dynamic: bool  # a thread block takes the next tile when it is free; else every 132nd

    @property
    def k_chunks(self) -> int:
        return (self.nope + self.rope) // CHUNK

    @property
    def v_chunks(self) -> int:
        return self.v // CHUNK


def scratch(sizes: Sizes, dtype: DTypeLike, out_dtype: DTypeLike, simulate: bool) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """

    def barrier(arrivals: int = 1, count: int = 1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    def views(*shape: int, dtype=dtype):
        """``[..., rows, 128 bytes]`` for products and registers, and to start at any row."""
        shape = *shape, 128 // jnp.dtype(dtype).itemsize
        swizzle = plgpu.SwizzleTransform(128)
        return [
            plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((n, shape[-1])), swizzle))
            for n in (8, 1)
        ]

    def buffer(*shape: int):
        if simulate:  # the interpreter keeps the views of a union apart
            return plgpu.SMEM((*shape, CHUNK), dtype)
        return plgpu.RefUnion(*views(*shape))

    stages = sizes.stages
    buffers = {
        "q": buffer(2, sizes.k_chunks, HALF),
        "k": buffer(stages, sizes.k_chunks, sizes.block),
        "v": buffer(stages, sizes.v_chunks, sizes.block),
        "facts": plgpu.SMEM((STEPS + DRAWS, sc.FIELDS), I32),
        "q_full": barrier(sizes.k_chunks, 2),  # copy engine -> one warpgroup
        "k_full": barrier(sizes.k_chunks, stages),  # copy engine -> both
        "v_full": barrier(sizes.v_chunks, stages),  # copy engine, or loader -> both
        "v_partial": barrier(sizes.v_chunks),  # copy engine -> loader: rows to clear
        "facts_full": barrier(count=STEPS),  # loader -> both
        "facts_free": barrier(2, STEPS),  # both -> loader
        "wanted": barrier(),  # loader -> warp that draws
        "drawn": barrier(2),  # warp that draws, and all -> all: the number of the next tile
    }
    if simulate or not sizes.hardware:
        buffers["q_free"] = barrier(count=2)  # one warpgroup -> loader: its last scores are there
        buffers["k_free"] = barrier(2, stages)  # both -> loader
        buffers["v_free"] = barrier(2, stages)  # both -> loader
    if simulate:
        buffers["o"] = plgpu.SMEM((2, HALF, sizes.v), out_dtype)
        buffers["small"] = plgpu.SMEM((2, HALF), F32)
        buffers["spill"] = plgpu.SMEM((2, HALF, sizes.block), dtype)
    return buffers


def attend(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    schedule: sc.Schedule,
    *,
    sizes: Sizes,
    scale: float,
    causal: bool,
    out_dtype: DTypeLike,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """``out`` [tokens, heads, v] and ``lse`` [tokens, heads] over the tiles of a schedule.

    At least 64 tokens and ``sizes.block`` keys. ``scale > 0``.
    """
    tokens, heads, _ = q.shape
    simulate = interpret is not None
    body = functools.partial(
        _body, sizes=sizes, scale=scale * math.log2(math.e), causal=causal, simulate=simulate
    )
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(shape((tokens, heads, sizes.v), out_dtype), shape((tokens, heads), F32)),
        scratch_types=scratch(sizes, q.dtype, out_dtype, simulate),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_dense_prefill",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    drawn = jax.new_ref(jnp.zeros((1,), I32))
    return kernel(q, kv, k_rope, schedule.tiles, schedule.counts, drawn)


def _body(
    q_g, kv_g, rope_g, tiles_g, counts_g, drawn_g,
    out_g, lse_g,
    *, sizes, scale, causal, simulate,
    q, k, v, facts,
    q_full, k_full, v_full, v_partial, facts_full, facts_free, wanted, drawn,
    q_free=None, k_free=None, v_free=None, o=None, small=None, spill=None,
):  # fmt: skip
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    # Views for products and registers, and for the copy engine.
    if simulate:
        q_m = q_c = q
        k_m = k_c = k
        v_m = v_c = v
    else:
        (q_m, q_c), (k_m, k_c), (v_m, v_c) = q, k, v
    block, stages, heads, dtype = sizes.block, sizes.stages, q_g.shape[1], q_g.dtype
    k_chunks, v_chunks = sizes.k_chunks, sizes.v_chunks
    with_keys, in_all = counts_g[0], counts_g[1]
    items, dynamic = with_keys * heads, sizes.dynamic and not simulate

    def slot(g):
        return g & (stages - 1)

    frees = {"q": (q_free, Q_FREE, ONE), "k": (k_free, K_FREE, BOTH), "v": (v_free, V_FREE, BOTH)}

    def free(what, i):
        """Products that read buffer ``i`` are complete."""
        barriers, first, threads = frees[what]
        if barriers is None:
            inline.arrive(first + i, threads)
        else:
            plgpu.barrier_arrive(barriers.at[i])

    def await_free(what, i):
        """Once for each ``free`` of each warpgroup: none can run ahead, for it awaits a refill."""
        barriers, first, threads = frees[what]
        if barriers is None:
            inline.sync(first + i, threads)
        else:
            plgpu.barrier_wait(barriers.at[i])

    def step_slot(t):
        return t & (STEPS - 1)

    def draw_slot(t):
        return STEPS + (t & (DRAWS - 1))

    def load():
        """By one warp: four would do all of it four times. A second one draws numbers."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def by_warps(*jobs):
            """Each job by a warp of its own; the interpreter has no warps."""
            if simulate:
                for job in jobs:
                    job()
                return

            @plgpu.warp_map
            def _(warp):
                for i, job in enumerate(jobs):
                    pl.when(warp == i)(job)

        def draw(t):
            """The number of the tile after tile ``t``, once it is wanted."""
            if dynamic:
                plgpu.barrier_wait(wanted)
                inline.draw(drawn_g, facts.at[draw_slot(t)])
                plgpu.barrier_arrive(drawn)

        def want():
            if dynamic:
                plgpu.barrier_arrive(wanted)

        def number_after(t, number):
            if not dynamic:
                return number + sizes.workers
            plgpu.barrier_arrive(drawn)  # of all four warps: none falls behind by a phase
            plgpu.barrier_wait(drawn)
            return facts[draw_slot(t), 0] + sizes.workers

        def locate(number):
            """Tile and head of an item: the dearest tiles of a few heads, then the next heads."""
            group = with_keys * sizes.heads_together
            section = lax.div(number, group)
            first = section * sizes.heads_together
            width = jnp.minimum(heads - first, sizes.heads_together)
            rest = number - section * group
            tile = lax.div(rest, width)
            return tile, first + rest - tile * width

        def load_k(row, head, s):
            for c in range(k_chunks):
                src = (
                    kv_g.at[pl.ds(row, block), head, pl.ds(c * CHUNK, CHUNK)]
                    if c * CHUNK < sizes.nope
                    else rope_g.at[pl.ds(row, block), pl.ds(c * CHUNK - sizes.nope, CHUNK)]
                )
                plgpu.copy_gmem_to_smem(src, k_c.at[s, c], k_full.at[s])

        def load_v(row, head, s, barrier):
            for c in range(v_chunks):
                columns = pl.ds(sizes.nope + c * CHUNK, CHUNK)
                src = kv_g.at[pl.ds(row, block), head, columns]
                plgpu.copy_gmem_to_smem(src, v_c.at[s, c], barrier)

        def load_queries(row, head, w):
            for c in range(k_chunks):
                src = q_g.at[pl.ds(row + w * HALF, HALF), head, pl.ds(c * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(src, q_c.at[w, c], q_full.at[w])

        def clear_v(s, valid):
            """Zero the rows behind the keys: a weight of zero times NaN would be NaN."""
            plgpu.barrier_wait(v_partial)
            for c in range(v_chunks):
                if not simulate:
                    inline.clear_rows(v_m.at[s, c], valid)
                    continue
                row = lax.broadcasted_iota(I32, (block, CHUNK), 0)
                v_m[s, c] = jnp.where(row < valid, v_m[s, c], jnp.zeros((), dtype))
            if simulate:
                plgpu.commit_smem()
            for _ in range(v_chunks):
                plgpu.barrier_arrive(v_full.at[s])

        def load_values(g, row, head, valid):
            """Values of block ``g``, ``valid`` of whose keys are the request's."""
            s = slot(g)
            pl.when(g >= stages)(lambda: await_free("v", s))

            @pl.when(valid >= block)
            def _():
                load_v(row, head, s, v_full.at[s])

            @pl.when(valid < block)
            def _():
                load_v(row, head, s, v_partial.at[0])
                clear_v(s, valid)

        def tell(t, tile, head):
            """Facts of a tile for the others: no blocks mean that there is no further tile."""
            s = step_slot(t)
            pl.when(t >= STEPS)(lambda: plgpu.barrier_wait(facts_free.at[s]))
            for i in range(sc.BLOCKS + 1):
                facts[s, i] = tiles_g[tile, i]
            facts[s, ITEM_HEAD] = head
            plgpu.barrier_arrive(facts_full.at[s])

        def tile_body(carry):
            t, number, g, last_row, last_head, last_valid = carry
            tile, head = locate(number)
            row, first, keys, n = (
                tiles_g[tile, i] for i in (sc.ROW, sc.FIRST_KEY, sc.KEYS, sc.BLOCKS)
            )

            def feed():
                tell(t, tile, head)

                def block_body(j, carry):
                    last_row, last_head, last_valid = carry
                    s, here = slot(g + j), first + j * block
                    pl.when(g + j >= stages)(lambda: await_free("k", s))
                    load_k(here, head, s)
                    pl.when(g + j > 0)(
                        lambda: load_values(g + j - 1, last_row, last_head, last_valid)
                    )

                    @pl.when(j == 0)
                    def _():
                        for w in range(2):
                            pl.when(t > 0)(lambda w=w: await_free("q", w))
                            load_queries(row, head, w)

                    # Late: who draws early holds a tile that others, who are free sooner, lack.
                    pl.when(j == jnp.maximum(n - 2, 0))(want)
                    return here, head, keys - j * block

                lax.fori_loop(0, n, block_body, (last_row, last_head, last_valid))

            by_warps(feed, lambda: draw(t))
            last = n - 1
            return (
                t + 1, number_after(t, number), g + n,
                first + last * block, head, keys - last * block,
            )  # fmt: skip

        zero = jnp.int32(0)
        t, _, g, *last = lax.while_loop(
            lambda c: c[1] < items,
            tile_body,
            (zero, jnp.asarray(worker, I32), zero, zero, zero, zero),
        )

        def end():
            """The last values, and the end told as a tile without blocks."""
            pl.when(g > 0)(lambda: load_values(g - 1, *last))
            s = step_slot(t)
            pl.when(t >= STEPS)(lambda: plgpu.barrier_wait(facts_free.at[s]))
            facts[s, sc.BLOCKS] = jnp.int32(0)
            plgpu.barrier_arrive(facts_full.at[s])

            # Await what was never reused.
            @pl.loop(jnp.maximum(g - stages, 0), g)
            def _(i):
                await_free("k", slot(i))
                await_free("v", slot(i))

            @pl.loop(jnp.maximum(t - 1, 0), t + 1)
            def _(i):
                plgpu.barrier_wait(facts_free.at[step_slot(i)])

            @pl.when(t > 0)
            def _():
                for w in range(2):
                    await_free("q", w)

        by_warps(end)

    def store(x, lse, row, live, head):
        """``x`` [64, v] and ``lse`` [64] to the ``live`` rows from ``row`` on."""
        if not simulate:
            inline.store_rows(x.astype(out_g.dtype), lse, out_g, lse_g, row, live, head)
            return
        o[wg] = x.astype(o.dtype)
        small[wg] = lse
        plgpu.commit_smem()
        lib.store_rows(o.at[wg], out_g.at[:, head], row, live, rows=HALF, step=1)

        @pl.loop(0, live)
        def _(i):
            lse_g[row + i, head] = small[wg, i]

        plgpu.wait_smem_to_gmem(0)

    def attention():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        soften = functools.partial(softmax.proceed, scale=scale, simulate=simulate)
        rescale = functools.partial(softmax.rescale, simulate=simulate)

        def take_turn():
            if not simulate:
                inline.take_turn(wg)

        def give_turn():
            if not simulate:
                inline.give_turn(wg)

        def fact(t, i):
            return facts[step_slot(t), i]

        def await_k(g):
            plgpu.barrier_wait(k_full.at[slot(g)])

        def hold():
            """Columns of the queries of a tile for registers, in a tuple that may be empty."""
            chunks = range(k_chunks - sizes.held, k_chunks)
            parts = [plgpu.load(q_m.at[wg, c], layout=WGMMA) for c in chunks]
            if parts:
                plgpu.commit_smem()  # before the copy engine writes there
            return (jnp.concatenate(parts, axis=1),) if parts and not simulate else ()

        def nothing():
            """Scores and registers of no tile."""
            shape = HALF, sizes.held * CHUNK
            held = () if simulate or not sizes.held else (lib.tile(0, shape, dtype),)
            return lib.tile(0.0, (HALF, block), F32), held

        def scores(g, held, width=block):
            """Scores of the first keys of block ``g``, in flight."""
            k_ref = k_m.at[slot(g), :, pl.ds(0, width)]
            if not simulate:
                return inline.scores(q_m.at[wg], k_ref, *held)

            def f(acc):
                for c in range(k_chunks):
                    lib.matmul(acc, q_m.at[wg, c], k_ref.at[c].T, simulate=True)
                return acc[...]

            return pl.run_scoped(f, plgpu.ACC((HALF, width), F32))

        def add_values(values, p, g):
            """``values + p V(g)``, in flight."""
            plgpu.barrier_wait(v_full.at[slot(g)])
            if not simulate:
                return inline.add_values(values, p, v_m.at[slot(g)])

            def f(acc):
                for c in range(v_chunks):
                    part = acc.at[:, pl.ds(c * CHUNK, CHUNK)]
                    lib.matmul_registers(part, p, v_m.at[slot(g), c], spill.at[wg])

            return lib.accumulate(values, f, simulate=True)

        def landed(x, later=0):
            """``x``, complete, while the ``later`` products issued behind it may go on."""
            return x if simulate else inline.landed(x, later)

        def free_k(g):
            free("k", slot(g))

        def free_v(g):
            free("v", slot(g))

        def free_queries():
            free("q", wg)

        def mask(x, j, keys, offset):
            seen = {"seen": wg * HALF + offset + 1} if causal else {}
            return softmax.mask(x, first=j * block, keys=keys, **seen)

        def tile_body(carry):
            t, g, x, held, _ = carry
            n, keys, offset = (fact(t, i) for i in (sc.BLOCKS, sc.KEYS, sc.OFFSET))
            pl.when(n == 1)(free_queries)
            w, top, sums = softmax.start(mask(x, 0, keys, offset), scale=scale)
            pl.when(n > 1)(lambda: await_k(g + 1))
            values = plgpu.layout_cast(jnp.zeros((HALF, sizes.v), F32), WGMMA)

            def block_body(j, carry, width=block):
                values, p, top, shrink, sums, grew = carry
                take_turn()
                x = scores(g + j + 1, held, width)
                values = rescale(values, shrink, grew)  # under the scores
                values = add_values(values, p, g + j)
                give_turn()
                x = landed(x, 1)
                free_k(g + j + 1)
                pl.when(j + 2 == n)(free_queries)
                w, top, shrink, sums, grew = soften(mask(x, j + 1, keys, offset), top, shrink, sums)
                # A wait here also keeps the assembler from moving the softmax behind the
                # products that it is to run under.
                pl.when(j + 2 < n)(lambda: await_k(g + j + 2))
                values = landed(values)
                free_v(g + j)
                w = w.astype(dtype)
                if width < block:
                    rest = plgpu.layout_cast(jnp.zeros((HALF, block - width), dtype), WGMMA)
                    w = jnp.concatenate([w, rest], axis=1)
                return values, w, top, shrink, sums, grew

            # The last block of the upper queries of a causal tile is seen to its middle only.
            seen = jnp.minimum(keys, (wg + 1) * HALF + offset) if causal else keys
            short = (n > 1) & (seen <= (n - 1) * block + block // 2)
            last = n - 1 - short.astype(I32)
            ones, grew = lib.row_vector(1.0, HALF), jnp.bool_(simulate)
            carry = values, w.astype(dtype), top, ones, sums, grew
            carry = lax.fori_loop(0, last, block_body, carry)
            values, p, top, shrink, sums, grew = lax.cond(
                short, lambda: block_body(n - 2, carry, block // 2), lambda: carry
            )

            def finish(values):
                inverse, lse = softmax.close(top, sums)
                row = fact(t, sc.ROW) + wg * HALF
                live = jnp.clip(fact(t, sc.LIVE) - wg * HALF, 0, HALF)
                store(values * lib.fill_rows(inverse, sizes.v), lse, row, live, fact(t, ITEM_HEAD))

            def add_last():
                take_turn()
                return add_values(rescale(values, shrink, grew), p, g + n - 1)

            def with_next():
                done = add_last()
                give_turn()
                plgpu.barrier_wait(q_full.at[wg])
                held = hold()
                await_k(g + n)
                x = scores(g + n, held)
                done = landed(done, 1)
                free_v(g + n - 1)
                finish(done)
                x = landed(x)
                free_k(g + n)
                return x, held

            def without():
                done = landed(add_last())
                pl.when(wg == 0)(give_turn)  # nobody would await the last one
                free_v(g + n - 1)
                finish(done)
                return nothing()

            plgpu.barrier_wait(facts_full.at[step_slot(t + 1)])
            more = fact(t + 1, sc.BLOCKS) > 0
            x, held = lax.cond(more, with_next, without)
            plgpu.barrier_arrive(facts_free.at[step_slot(t)])
            return t + 1, g + n, x, held, more

        plgpu.barrier_wait(facts_full.at[0])
        some = fact(jnp.int32(0), sc.BLOCKS) > 0

        def first():
            pl.when(wg == 1)(give_turn)  # the first one is that of warpgroup 0
            plgpu.barrier_wait(q_full.at[wg])
            held = hold()
            await_k(zero)
            take_turn()
            x = scores(zero, held)
            give_turn()
            x = landed(x)
            free_k(zero)
            return x, held

        zero = jnp.int32(0)
        start = lax.cond(some, first, nothing)
        t, *_ = lax.while_loop(lambda c: c[-1], tile_body, (zero, zero, *start, some))
        plgpu.barrier_arrive(facts_free.at[step_slot(t)])

        # Tiles without keys.
        @pl.loop(items + worker, in_all * heads, step=sizes.workers)
        def _(i):
            tile = lax.div(i, jnp.int32(heads))
            row = tiles_g[tile, sc.ROW] + wg * HALF
            live = jnp.clip(tiles_g[tile, sc.LIVE] - wg * HALF, 0, HALF)
            zeros = plgpu.layout_cast(jnp.zeros((HALF, sizes.v), F32), WGMMA)
            none = lib.row_vector(-math.inf, HALF)
            store(zeros, none, row, live, i - tile * heads)

    pl.when(wg < 2)(attention)
    pl.when(wg == 2)(load)
