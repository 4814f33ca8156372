"""The loader of the prefill kernel: the tiles of a thread block as one stream of blocks of keys.

It loads K(g+1), V(g), K(g+2), ... and tells the others of each tile before its first keys.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportAbstractUsage=false
# pyright: reportAssignmentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_prefill import inline_sm90 as inline
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.dense_prefill.buffers_sm90 import CHUNK, HALF, HEAD, STEPS, Buffers

__all__ = ["load"]

REGISTERS = 24  # of a thread
I32 = jnp.int32


def load(buffers: Buffers, worker, q_g, kv_g, rope_g, tiles_g, with_keys, drawn_g) -> None:
    """By one warp: four would do all of it four times. A second one draws numbers."""
    plgpu.set_max_registers(REGISTERS, action="decrease")
    sizes, simulate, facts = buffers.sizes, buffers.simulate, buffers.facts
    block, stages, heads = sizes.block, sizes.stages, q_g.shape[1]
    items, dynamic = with_keys * heads, sizes.dynamic and not simulate

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
            plgpu.barrier_wait(buffers.wanted)
            inline.draw(drawn_g, facts.at[buffers.draw_slot(t)])
            plgpu.barrier_arrive(buffers.drawn)

    def want():
        if dynamic:
            plgpu.barrier_arrive(buffers.wanted)

    def number_after(t, number):
        if not dynamic:
            return number + sizes.workers
        plgpu.barrier_arrive(buffers.drawn)  # of all four warps: none falls behind by a phase
        plgpu.barrier_wait(buffers.drawn)
        return facts[buffers.draw_slot(t), 0] + sizes.workers

    def locate(number):
        """Tile and head of an item: the dearest tiles of a few heads, then the next heads."""
        together = sizes.heads_together
        full = max((heads - sizes.heads_last) // together, 0)  # then a wider section
        group = with_keys * together
        section = jnp.minimum(lax.div(number, group), full)
        first = section * together
        width = jnp.where(section < full, together, heads - full * together)
        rest = number - section * group
        tile = lax.div(rest, width)
        return tile, first + rest - tile * width

    def load_k(row, head, s):
        for c in range(sizes.k_chunks):
            src = (
                kv_g.at[pl.ds(row, block), head, pl.ds(c * CHUNK, CHUNK)]
                if c * CHUNK < sizes.nope
                else rope_g.at[pl.ds(row, block), pl.ds(c * CHUNK - sizes.nope, CHUNK)]
            )
            plgpu.copy_gmem_to_smem(src, buffers.k_rows.at[s, c], buffers.k_full.at[s])

    def load_v(row, head, s, barrier):
        for c in range(sizes.v_chunks):
            columns = pl.ds(sizes.nope + c * CHUNK, CHUNK)
            src = kv_g.at[pl.ds(row, block), head, columns]
            plgpu.copy_gmem_to_smem(src, buffers.v_rows.at[s, c], barrier)

    def load_queries(row, head, w):
        for c in range(sizes.k_chunks):
            src = q_g.at[pl.ds(row + w * HALF, HALF), head, pl.ds(c * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(src, buffers.q_rows.at[w, c], buffers.q_full.at[w])

    def clear_v(s, valid):
        """Zero the rows behind the keys: a weight of zero times NaN would be NaN."""
        plgpu.barrier_wait(buffers.v_partial)
        for c in range(sizes.v_chunks):
            if not simulate:
                inline.clear_rows(buffers.v.at[s, c], valid)
                continue
            row = lax.broadcasted_iota(I32, (block, CHUNK), 0)
            buffers.v[s, c] = jnp.where(row < valid, buffers.v[s, c], jnp.zeros((), q_g.dtype))
        if simulate:
            plgpu.commit_smem()
        for _ in range(sizes.v_chunks):
            plgpu.barrier_arrive(buffers.v_full.at[s])

    def load_values(g, row, head, valid):
        """Values of block ``g``, ``valid`` of whose keys are the request's."""
        s = buffers.slot(g)
        pl.when(g >= stages)(lambda: buffers.await_free("v", s))

        @pl.when(valid >= block)
        def _():
            load_v(row, head, s, buffers.v_full.at[s])

        @pl.when(valid < block)
        def _():
            load_v(row, head, s, buffers.v_partial.at[0])
            clear_v(s, valid)

    def tell(t, told):
        """Facts of tile ``t`` for the others: no blocks mean that there is no such tile."""
        s = buffers.step_slot(t)
        pl.when(t >= STEPS)(lambda: plgpu.barrier_wait(buffers.facts_free.at[s]))
        for i, fact in told:
            facts[s, i] = fact
        plgpu.barrier_arrive(buffers.facts_full.at[s])

    def facts_of(tile, head):
        for i in range(tp.BLOCKS + 1):
            yield i, tiles_g[tile, i]
        yield HEAD, head

    def tile_body(carry):
        t, number, g, last_row, last_head, last_valid = carry
        tile, head = locate(number)
        row, first, keys, n = (tiles_g[tile, i] for i in (tp.ROW, tp.FIRST_KEY, tp.KEYS, tp.BLOCKS))

        def feed():
            tell(t, facts_of(tile, head))

            def block_body(j, carry):
                last_row, last_head, last_valid = carry
                s, here = buffers.slot(g + j), first + j * block
                pl.when(g + j >= stages)(lambda: buffers.await_free("k", s))
                load_k(here, head, s)
                pl.when(g + j > 0)(lambda: load_values(g + j - 1, last_row, last_head, last_valid))

                @pl.when(j == 0)
                def _():
                    for w in range(2):
                        pl.when(t > 0)(lambda w=w: buffers.await_free("q", w))
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
        tell(t, [(tp.BLOCKS, jnp.int32(0))])

        # Await what was never reused.
        @pl.loop(jnp.maximum(g - stages, 0), g)
        def _(i):
            buffers.await_free("k", buffers.slot(i))
            buffers.await_free("v", buffers.slot(i))

        @pl.loop(jnp.maximum(t - 1, 0), t + 1)
        def _(i):
            plgpu.barrier_wait(buffers.facts_free.at[buffers.step_slot(i)])

        @pl.when(t > 0)
        def _():
            for w in range(2):
                buffers.await_free("q", w)

    by_warps(end)
