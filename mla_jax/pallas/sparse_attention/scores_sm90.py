"""The scores of the sparse kernel: ``S = Q K^T``, softmax, weights to shared memory."""

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
from mla_jax.pallas.mosaic_lib import LOWEST, ROW
from mla_jax.pallas.sparse_attention import stream_sm90 as shared
from mla_jax.pallas.sparse_attention.feed_sm90 import MARKS
from mla_jax.pallas.sparse_attention.rows_sm90 import BLOCK
from mla_jax.pallas.sparse_attention.stream_sm90 import HALF, ROWS, Buffers, Stream, ring

__all__ = ["Scores"]

REGISTERS = 80  # of a thread
COLUMN = plgpu.Layout.WGMMA.reduce(0)
I32 = jnp.int32
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Warpgroup 0."""

    stream: Stream
    buffers: Buffers
    scale: float  # of scores, base 2

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        self._load(self.stream.first_token)
        self.stream.walk(self._piece)
        plgpu.wait_smem_to_gmem(0)

    def _load(self, token) -> None:
        """The queries of a token."""
        of, b = self.stream, self.buffers
        size = min(of.live, of.queries[0].shape[0])
        for q_g, to in zip(of.queries, (b.q, b.q_rope), strict=False):
            these = q_g.at[pl.ds(of.row_of(token), size)]
            plgpu.copy_gmem_to_smem(these, to.at[0, pl.ds(0, size)], b.q_full)

    def _piece(self, token, g0, part) -> None:
        """Weights of all blocks of a token's piece, whose first one is block ``g0``."""
        of, b, scale = self.stream, self.buffers, self.scale
        n, _whole = of.piece_of(token)
        row, count = of.row_of(token), of.count
        plgpu.barrier_wait(b.q_full)

        def step(j, carry):
            top, total = carry
            g = g0 + j
            s = ring(g)
            x = self._products(g, s)
            top, shrink = lib.lagging_top(x, top, scale, simulate=of.simulate)
            w = jnp.exp2(x * scale - lib.fill_rows(top, BLOCK))
            b.stats[shared.ALPHA + s] = shrink
            b.weights[s] = w.astype(b.weights.dtype)
            lib.fence(simulate=of.simulate)
            plgpu.barrier_arrive(b.p_ready.at[s])
            return top, total * lib.fill_rows(shrink, 8) + lib.fold_columns(w, 8)

        top = lib.row_vector(LOWEST, ROWS)
        if of.live < ROWS:  # no weights in other rows: what they hold was never loaded
            number = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=ROW)
            top = jnp.where(number < count, top, lib.row_vector(-LOWEST, ROWS))
        top, total = lax.fori_loop(0, n, step, (top, lib.tile(0.0, (ROWS, 8), F32)))
        pl.when(token < of.last_token)(lambda: self._load(token + 1))
        total = total.sum(axis=1)
        i = of.parity(token)
        lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
        share = self._with_sinks(1.0 / total, lse2, part)
        b.stats[shared.INVERSE + i] = jnp.where(total > 0.0, share, 0.0)
        plgpu.barrier_arrive(b.inverse_ready.at[i])
        pl.when(part < 0)(lambda: self._store(lse2, row, count))

        @pl.when(part >= 0)
        def _():
            of.results[3][part, of.tile] = lse2

    def _products(self, g, s) -> jax.Array:
        """``Q K^T`` of block ``g`` in slot ``s``, minus infinity where there is no key."""
        b, simulate = self.buffers, self.stream.simulate
        i = lib.afresh(I32(0), simulate=simulate)

        def products(acc):
            plgpu.barrier_wait(b.full.at[s])
            for k, keys in enumerate((b.left, b.right)):
                columns = b.q.at[i, :, pl.ds(k * HALF, HALF)]
                lib.matmul(acc, columns, keys.at[s].T, simulate=simulate)
            if b.q_rope is not None:
                lib.matmul(acc, b.q_rope.at[i], b.weights.at[s].T, simulate=simulate)
            return acc[...]

        x = pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), F32))
        there = plgpu.load(b.marks.at[lax.rem(g, I32(MARKS))], layout=COLUMN)
        there = lax.broadcast_in_dim(there, (ROWS, BLOCK), [1])
        return jnp.where(there > 0.0, x, -jnp.inf)

    def _with_sinks(self, share, lse2, part) -> jax.Array:
        """``1 / sum``, with one more key of value zero for each head that has a sink.

        A part of a token has none: the kernel that merges the parts adds it.
        """
        for sinks_g in self.stream.sinks:
            these = sinks_g.at[pl.ds(pl.multiple_of(self.stream.tile * ROWS, ROWS), ROWS)]
            sink = plgpu.load(these, layout=ROW, optimized=False) * math.log2(math.e)
            # Finite: an infinite sink minus infinity would be NaN.
            absent = jnp.where(part < 0, jnp.float32(0.0), jnp.float32(-LOWEST))
            share = share / (1.0 + jnp.exp2(sink - lse2 - absent))
        return share

    def _store(self, lse2, row, count) -> None:
        """Of a token in one piece."""
        of, stats = self.stream, self.buffers.stats
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stats[shared.LSE] = lse2 * math.log(2.0)
        plgpu.commit_smem()
        lse = stats.at[shared.LSE, pl.ds(0, of.live)]
        lib.store_rows(lse, of.results[1], row, count, rows=of.live, step=of.step)
