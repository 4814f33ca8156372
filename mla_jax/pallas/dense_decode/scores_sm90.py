"""The scores of the main decode kernel: ``S = Q K^T``, softmax, weights to shared memory."""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.buffers_sm90 import ALPHA, HALF, INVERSE, LSE, SLOTS, TAIL, Buffers
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, ROWS
from mla_jax.pallas.dense_decode.stream_sm90 import Stream, parity
from mla_jax.pallas.mosaic_lib import LOWEST, ROW, WGMMA

__all__ = ["Scores"]

EARLY = 64  # columns whose products are issued before the last block's weights are published
REGISTERS = 184  # of a thread; with less, products are serialised
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Warpgroup 0."""

    stream: Stream
    buffers: Buffers
    scale: float  # of scores, base 2
    defer: bool  # PV of a block waits for QK of the next one

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        of, b = self.stream, self.buffers
        unit = of.arrays.scales[of.layer] if b.quantised else 1.0
        factor = self.scale * unit

        def piece(p, g0):
            return self._piece(p, g0, unit, factor)

        lax.fori_loop(of.begin, of.end, piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, p, g0, unit, factor):
        """Weights of all blocks of piece ``p``, whose queries are element ``g0`` of the stream."""
        of, b = self.stream, self.buffers
        n, first = of.blocks_of(p), of.piece(p, wp.FIRST)
        whole, part = of.piece(p, wp.SLOT) < 0, of.piece(p, wp.SLOT)
        row, count = of.row_of(p), of.live_rows(p)
        unmasked = of.seen_by_all(p)
        held = self._take_queries(g0)

        def step(j, carry):
            top, total, s, r = carry  # s, r: the block's slot, and buffer of rotary columns
            x = self._products(held, j, s, r)
            block = first + j
            full = (block + 1) * BLOCK <= unmasked
            x = lax.cond(full, lambda: x, lambda: of.mask(x, p, block, keys=1))
            top, shrink = lib.lagging_top(x, top, factor, simulate=b.simulate)
            w = jnp.exp2(x * factor - lib.fill_rows(top, BLOCK))
            b.stats[ALPHA + s] = shrink
            b.k_rope[r] = w.astype(b.k_rope.dtype)
            if not self.defer:
                self._publish(s)
            total = total * lib.fill_rows(shrink, 8) + lib.fold_columns(w, 8)
            return top, total, *b.turn(s, r)

        top = lib.row_vector(LOWEST, ROWS)
        if of.sizes.live < ROWS:  # no weights in other rows: a product with zeros takes less power
            row_of_tile = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
            top = jnp.where(row_of_tile < count, top, lib.row_vector(-LOWEST, ROWS))
        carry = top, lib.tile(0.0, (ROWS, 8), F32), b.slot(g0 + 1), parity(g0 - (p - of.begin))
        top, total, *_rest = lax.fori_loop(0, n, step, carry)
        if self.defer:
            self._publish(b.slot(g0 + n))
            plgpu.barrier_arrive(b.go.at[b.slot(g0 + n)])
        total = total.sum(axis=1)
        i = parity(p - of.begin)
        b.stats[INVERSE + i] = jnp.where(total > 0.0, unit / total, 0.0)
        plgpu.barrier_arrive(b.inverse_ready.at[i])
        lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
        pl.when(whole)(lambda: self._store(lse2, row, count))

        @pl.when(jnp.logical_not(whole))
        def _():
            of.arrays.part_lse[part, of.tile] = lse2

        return g0 + n + 1

    def _take_queries(self, g0) -> tuple[jax.Array, jax.Array]:
        """Columns 0 to 255 and 256 to 447 of the queries, in registers."""
        b, s = self.buffers, self.buffers.slot(g0)
        plgpu.barrier_wait(b.left_full.at[s])
        plgpu.barrier_wait(b.right_full.at[s])
        left = plgpu.load(b.left.at[s], layout=WGMMA)
        right = plgpu.load(b.right.at[s, :, pl.ds(0, HALF - TAIL)], layout=WGMMA)
        plgpu.commit_smem()
        plgpu.barrier_arrive(b.q_taken.at[s])
        plgpu.barrier_wait(b.tail_full)
        return left, right

    def _products(self, held, j, s, r) -> jax.Array:
        """``Q K^T`` of block ``j`` of a piece, in slot ``s`` and buffer ``r``."""
        b, simulate = self.buffers, self.buffers.simulate
        (left, right), kl, kr = held, b.left.at[s], b.right.at[s]
        previous = jnp.where(s == 0, SLOTS - 1, s - 1)

        def multiply(acc, q, keys):
            spill = None if b.q_spill is None else b.q_spill.at[:, pl.ds(0, q.shape[1])]
            lib.matmul_registers(acc, q, keys.T, spill)

        def products(acc):
            plgpu.barrier_wait(b.left_full.at[s])
            multiply(acc, left[:, :EARLY], kl.at[:, pl.ds(0, EARLY)])
            if self.defer:  # while the tensor cores have these; PV of that block waits anyway
                pl.when(j > 0)(lambda: self._publish(previous))
            multiply(acc, left[:, EARLY:], kl.at[:, pl.ds(EARLY, HALF - EARLY)])
            plgpu.barrier_wait(b.right_full.at[s])
            multiply(acc, right, kr.at[:, pl.ds(0, HALF - TAIL)])
            last = kr.at[:, pl.ds(HALF - TAIL, TAIL)].T
            lib.matmul(acc, b.q_tail.at[0], last, simulate=simulate)
            plgpu.barrier_wait(b.rope_full.at[r])
            if b.quantised:
                widen.keys(b.k_rope.at[r], b.bytes_of_rope(r), simulate=simulate)
                plgpu.commit_smem()
            lib.matmul(acc, b.q_tail.at[1], b.k_rope.at[r].T, simulate=simulate)
            if self.defer:  # sooner, and the other products would delay these
                plgpu.wgmma_wait(1)
                pl.when(j > 0)(lambda: plgpu.barrier_arrive(b.go.at[previous]))
            return acc[...]

        return pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), F32))

    def _publish(self, s) -> None:
        """Weights and their factor, of the block in slot ``s``: each thread its own."""
        lib.fence(simulate=self.buffers.simulate)
        plgpu.barrier_arrive(self.buffers.p_ready.at[s])

    def _store(self, lse2, row, count) -> None:
        """Of a request in one piece."""
        stats, sizes = self.buffers.stats, self.stream.sizes
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stats[LSE] = lse2 * math.log(2.0)
        plgpu.commit_smem()
        lse = stats.at[LSE, pl.ds(0, sizes.live)]
        to = self.stream.arrays.lse
        lib.store_rows(lse, to, row, count, rows=sizes.live, step=sizes.step)
