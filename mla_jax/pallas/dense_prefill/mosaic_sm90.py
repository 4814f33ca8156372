"""Expanded prefill on Hopper: Pallas Mosaic GPU, two warpgroups of queries and a loader.

Computes ``ref.dense_prefill``. A tile is 128 queries of one request and one head; each of two
warpgroups owns 64 of them and the third loads. Keys are read where the up-projection left them
(``kv [keys, heads, nope + v]``) and the shared rotary key from its own array::

  scores, values   S(j+1) = Q K(j+1)^T, then O += P(j) V(j): two groups of products; the
                   softmax of S(j+1) runs under the second and under the other's products
  loader           tiles of a thread block are one stream: K(g+1), V(g), K(g+2), ...

The two warpgroups take turns in issuing products: without, they drift into step, and the tensor
cores wait while both are in their softmax. A row's weights are relative to a maximum that may lag
behind, so that O is seldom rescaled. The first scores of a tile are issued behind the last values
of the tile before, whose result goes from registers to memory under them. Some columns of the
queries may stay in registers, which relieves shared memory.

Tiles begin at the first query of their request, and blocks at its first key: a view of shared
memory tiled by single rows lets the copy engine start anywhere. So the bits of a request do not
depend on its neighbours. The bound: 2560 tensor-core cycles for 128 keys. ``tile_plan`` orders
the tiles, ``loader_sm90`` brings what they need into the ``buffers_sm90``, ``softmax_sm90`` is
between the products, ``inline_sm90`` holds the instructions that Pallas lacks, and
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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import inline_sm90 as inline
from mla_jax.pallas.dense_prefill import softmax_sm90 as softmax
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.dense_prefill.buffers_sm90 import CHUNK, HALF, HEAD, Buffers, Sizes, scratch
from mla_jax.pallas.dense_prefill.loader_sm90 import load
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["attend"]

REGISTERS = 240  # of a thread of products
I32 = jnp.int32
F32 = jnp.float32


@lib.lowered_once("sizes", "scale", "causal", "out_dtype", "interpret")
def attend(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    plan: tp.TilePlan,
    *,
    sizes: Sizes,
    scale: float,
    causal: bool,
    out_dtype: DTypeLike,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """``out`` [tokens, heads, v] and ``lse`` [tokens, heads] over the tiles of a plan.

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
    return kernel(q, kv, k_rope, plan.tiles, plan.counts, drawn)


def _body(
    q_g, kv_g, rope_g, tiles_g, counts_g, drawn_g, out_g, lse_g,
    *, sizes, scale, causal, simulate, **refs,
):  # fmt: skip
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    buffers = Buffers.of(sizes, simulate, **refs)
    facts, slot, step_slot, free = buffers.facts, buffers.slot, buffers.step_slot, buffers.free
    block, heads, dtype = sizes.block, q_g.shape[1], q_g.dtype
    k_chunks, v_chunks = sizes.k_chunks, sizes.v_chunks
    with_keys, in_all = counts_g[0], counts_g[1]

    def store(x, lse, row, live, head):
        """``x`` [64, v] and ``lse`` [64] to the ``live`` rows from ``row`` on."""
        if not simulate:
            inline.store_rows(x.astype(out_g.dtype), lse, out_g, lse_g, row, live, head)
            return
        buffers.o[wg] = x.astype(buffers.o.dtype)
        buffers.small[wg] = lse
        plgpu.commit_smem()
        lib.store_rows(buffers.o.at[wg], out_g.at[:, head], row, live, rows=HALF, step=1)

        @pl.loop(0, live)
        def _(i):
            lse_g[row + i, head] = buffers.small[wg, i]

        plgpu.wait_smem_to_gmem(0)

    def attention():
        plgpu.set_max_registers(REGISTERS, action="increase")
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
            plgpu.barrier_wait(buffers.k_full.at[slot(g)])

        def hold():
            """Columns of the queries of a tile for registers, in a tuple that may be empty."""
            chunks = range(k_chunks - sizes.held, k_chunks)
            parts = [plgpu.load(buffers.q.at[wg, c], layout=WGMMA) for c in chunks]
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
            k_ref = buffers.k.at[slot(g), :, pl.ds(0, width)]
            if not simulate:
                return inline.scores(buffers.q.at[wg], k_ref, *held)

            def f(acc):
                for c in range(k_chunks):
                    lib.matmul(acc, buffers.q.at[wg, c], k_ref.at[c].T, simulate=True)
                return acc[...]

            return pl.run_scoped(f, plgpu.ACC((HALF, width), F32))

        def add_values(values, p, g):
            """``values + p V(g)``, in flight."""
            plgpu.barrier_wait(buffers.v_full.at[slot(g)])
            if not simulate:
                return inline.add_values(values, p, buffers.v.at[slot(g)])

            def f(acc):
                for c in range(v_chunks):
                    part = acc.at[:, pl.ds(c * CHUNK, CHUNK)]
                    lib.matmul_registers(part, p, buffers.v.at[slot(g), c], buffers.spill.at[wg])

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
            n, keys, offset = (fact(t, i) for i in (tp.BLOCKS, tp.KEYS, tp.OFFSET))
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
                x = mask(x, j + 1, keys, offset)
                w, y, top, shrink, sums, grew = soften(x, top, sums)
                # A wait here also keeps the assembler from moving the softmax behind the
                # products that it is to run under.
                pl.when(j + 2 < n)(lambda: await_k(g + j + 2))
                values = landed(values)
                free_v(g + j)
                w, sums = softmax.complete(w, y, sums, dtype)
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
                row = fact(t, tp.ROW) + wg * HALF
                live = jnp.clip(fact(t, tp.LIVE) - wg * HALF, 0, HALF)
                store(values * lib.fill_rows(inverse, sizes.v), lse, row, live, fact(t, HEAD))

            def add_last():
                take_turn()
                return add_values(rescale(values, shrink, grew), p, g + n - 1)

            def with_next():
                done = add_last()
                give_turn()
                plgpu.barrier_wait(buffers.q_full.at[wg])
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

            plgpu.barrier_wait(buffers.facts_full.at[step_slot(t + 1)])
            more = fact(t + 1, tp.BLOCKS) > 0
            x, held = lax.cond(more, with_next, without)
            plgpu.barrier_arrive(buffers.facts_free.at[step_slot(t)])
            return t + 1, g + n, x, held, more

        plgpu.barrier_wait(buffers.facts_full.at[0])
        some = fact(jnp.int32(0), tp.BLOCKS) > 0

        def first():
            pl.when(wg == 1)(give_turn)  # the first one is that of warpgroup 0
            plgpu.barrier_wait(buffers.q_full.at[wg])
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
        plgpu.barrier_arrive(buffers.facts_free.at[step_slot(t)])

        # Tiles without keys.
        @pl.loop(with_keys * heads + worker, in_all * heads, step=sizes.workers)
        def _(i):
            tile = lax.div(i, jnp.int32(heads))
            row = tiles_g[tile, tp.ROW] + wg * HALF
            live = jnp.clip(tiles_g[tile, tp.LIVE] - wg * HALF, 0, HALF)
            zeros = plgpu.layout_cast(jnp.zeros((HALF, sizes.v), F32), WGMMA)
            none = lib.row_vector(-math.inf, HALF)
            store(zeros, none, row, live, i - tile * heads)

    pl.when(wg < 2)(attention)
    pl.when(wg == 2)(lambda: load(buffers, worker, q_g, kv_g, rope_g, tiles_g, with_keys, drawn_g))
