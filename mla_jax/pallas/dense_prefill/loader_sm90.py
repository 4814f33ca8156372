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

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_prefill import steps_sm90 as steps
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.dense_prefill.buffers_sm90 import CHUNK, HALF, HEAD, STEPS, Buffers, Sizes

__all__ = ["Loader"]

REGISTERS = 24  # of a thread
I32 = jnp.int32


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Warpgroup 2. One warp loads: four would do all of it four times. Another draws numbers."""

    buffers: Buffers
    worker: Any
    q: Any  # arrays in global memory
    kv: Any
    k_rope: Any
    tiles: Any
    with_keys: Any  # tiles that have keys
    drawn: Any  # how many items were drawn

    @property
    def sizes(self) -> Sizes:
        return self.buffers.sizes

    @property
    def dynamic(self) -> bool:
        """Whether the next tile is drawn."""
        return self.sizes.dynamic and not self.buffers.simulate

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        items, zero = self.with_keys * self.q.shape[1], jnp.int32(0)
        t, _, g, *last = lax.while_loop(
            lambda c: c[1] < items,
            self._tile,
            (zero, jnp.asarray(self.worker, I32), zero, zero, zero, zero),
        )
        self._by_warps(lambda: self._end(t, g, last))

    def _tile(self, carry):
        """Tile ``t``, item ``number``, from block ``g`` on, and values of the block ``before``."""
        t, number, g, *before = carry
        b, block = self.buffers, self.sizes.block
        tile, head = self._locate(number)
        fields = tp.ROW, tp.FIRST_KEY, tp.KEYS, tp.BLOCKS
        row, first, keys, n = (self.tiles[tile, i] for i in fields)

        def block_body(j, before):
            s, here = b.slot(g + j), first + j * block
            pl.when(g + j >= self.sizes.stages)(lambda: b.await_free("k", s))
            self._load_k(here, head, s)
            pl.when(g + j > 0)(lambda: self._load_values(g + j - 1, *before))

            @pl.when(j == 0)
            def _():
                for w in range(2):
                    pl.when(t > 0)(lambda w=w: b.await_free("q", w))
                    self._load_queries(row, head, w)

            # Late: who draws early holds a tile that others, who are free sooner, lack.
            pl.when(j == jnp.maximum(n - 2, 0))(self._want)
            return here, head, keys - j * block

        def feed():
            self._tell(t, self._facts(tile, head))
            lax.fori_loop(0, n, block_body, tuple(before))

        self._by_warps(feed, lambda: self._draw(t))
        last = n - 1
        return (
            t + 1, self._number_after(t, number), g + n,
            first + last * block, head, keys - last * block,
        )  # fmt: skip

    def _end(self, t, g, last) -> None:
        """The last values, and the end told as a tile without blocks."""
        b = self.buffers
        pl.when(g > 0)(lambda: self._load_values(g - 1, *last))
        self._tell(t, [(tp.BLOCKS, jnp.int32(0))])

        # Await what was never reused.
        @pl.loop(jnp.maximum(g - self.sizes.stages, 0), g)
        def _(i):
            b.await_free("k", b.slot(i))
            b.await_free("v", b.slot(i))

        @pl.loop(jnp.maximum(t - 1, 0), t + 1)
        def _(i):
            plgpu.barrier_wait(b.facts_free.at[b.step_slot(i)])

        @pl.when(t > 0)
        def _():
            for w in range(2):
                b.await_free("q", w)

    def _by_warps(self, *jobs) -> None:
        """Each job by a warp of its own; the interpreter has no warps."""
        if self.buffers.simulate:
            for job in jobs:
                job()
            return

        @plgpu.warp_map
        def _(warp):
            for i, job in enumerate(jobs):
                pl.when(warp == i)(job)

    def _draw(self, t) -> None:
        """The number of the tile after tile ``t``, once it is wanted."""
        if self.dynamic:
            b = self.buffers
            plgpu.barrier_wait(b.wanted)
            steps.draw(self.drawn, b.facts.at[b.draw_slot(t)])
            plgpu.barrier_arrive(b.drawn)

    def _want(self) -> None:
        if self.dynamic:
            plgpu.barrier_arrive(self.buffers.wanted)

    def _number_after(self, t, number):
        b = self.buffers
        if not self.dynamic:
            return number + self.sizes.workers
        plgpu.barrier_arrive(b.drawn)  # of all four warps: none falls behind by a phase
        plgpu.barrier_wait(b.drawn)
        return b.facts[b.draw_slot(t), 0] + self.sizes.workers

    def _locate(self, number):
        """Tile and head of an item: the costliest tiles of a few heads, then the next heads."""
        heads, together = self.q.shape[1], self.sizes.heads_together
        full = max((heads - self.sizes.heads_last) // together, 0)  # then a wider section
        group = self.with_keys * together
        section = jnp.minimum(lax.div(number, group), full)
        first = section * together
        width = jnp.where(section < full, together, heads - full * together)
        rest = number - section * group
        tile = lax.div(rest, width)
        return tile, first + rest - tile * width

    def _load_k(self, row, head, s) -> None:
        rows, nope, b = pl.ds(row, self.sizes.block), self.sizes.nope, self.buffers
        for c in range(self.sizes.k_chunks):
            src = (
                self.kv.at[rows, head, pl.ds(c * CHUNK, CHUNK)]
                if c * CHUNK < nope
                else self.k_rope.at[rows, pl.ds(c * CHUNK - nope, CHUNK)]
            )
            plgpu.copy_gmem_to_smem(src, b.k_rows.at[s, c], b.k_full.at[s])

    def _load_v(self, row, head, s, barrier) -> None:
        for c in range(self.sizes.v_chunks):
            columns = pl.ds(self.sizes.nope + c * CHUNK, CHUNK)
            src = self.kv.at[pl.ds(row, self.sizes.block), head, columns]
            plgpu.copy_gmem_to_smem(src, self.buffers.v_rows.at[s, c], barrier)

    def _load_queries(self, row, head, w) -> None:
        b = self.buffers
        for c in range(self.sizes.k_chunks):
            src = self.q.at[pl.ds(row + w * HALF, HALF), head, pl.ds(c * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(src, b.q_rows.at[w, c], b.q_full.at[w])

    def _load_values(self, g, row, head, valid) -> None:
        """Values of block ``g``, ``valid`` of whose keys are the request's."""
        b = self.buffers
        s = b.slot(g)
        pl.when(g >= self.sizes.stages)(lambda: b.await_free("v", s))

        @pl.when(valid >= self.sizes.block)
        def _():
            self._load_v(row, head, s, b.v_full.at[s])

        @pl.when(valid < self.sizes.block)
        def _():
            self._load_v(row, head, s, b.v_partial.at[0])
            self._clear_v(s, valid)

    def _clear_v(self, s, valid) -> None:
        """Zero the rows behind the keys: a weight of zero times NaN would be NaN."""
        b = self.buffers
        plgpu.barrier_wait(b.v_partial)
        for c in range(self.sizes.v_chunks):
            if not b.simulate:
                steps.zero_rows_from(b.v.at[s, c], valid)
                continue
            row = lax.broadcasted_iota(I32, (self.sizes.block, CHUNK), 0)
            b.v[s, c] = jnp.where(row < valid, b.v[s, c], jnp.zeros((), self.q.dtype))
        if b.simulate:
            plgpu.commit_smem()
        for _ in range(self.sizes.v_chunks):
            plgpu.barrier_arrive(b.v_full.at[s])

    def _tell(self, t, told) -> None:
        """Facts of tile ``t`` for the others: no blocks mean that there is no such tile."""
        b = self.buffers
        s = b.step_slot(t)
        pl.when(t >= STEPS)(lambda: plgpu.barrier_wait(b.facts_free.at[s]))
        for i, fact in told:
            b.facts[s, i] = fact
        plgpu.barrier_arrive(b.facts_full.at[s])

    def _facts(self, tile, head):
        for i in range(tp.BLOCKS + 1):
            yield i, self.tiles[tile, i]
        yield HEAD, head
