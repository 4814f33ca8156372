"""The scores of the sparse kernel: ``S = Q K^T``, softmax, weights to shared memory.

``Scores`` is the role over records; ``pair_sm90`` has the one over elements.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

__all__ = ["Scorer", "Scores"]

REGISTERS = 80  # of a thread
COLUMN = plgpu.Layout.WGMMA.reduce(0)
I32 = jnp.int32
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """What a warpgroup does that makes weights of scores."""

    stream: Stream
    buffers: Buffers
    scale: float  # of scores, base 2

    def _load(self, token) -> None:
        """The queries of a token."""
        of, b = self.stream, self.buffers
        size = min(of.live, of.queries[0].shape[0])
        for q_g, to in zip(of.queries, (b.q, b.q_rope), strict=False):
            these = q_g.at[pl.ds(of.row_of(token), size)]
            plgpu.copy_gmem_to_smem(these, to.at[0, pl.ds(0, size)], b.q_full)

    def _start(self) -> tuple[jax.Array, jax.Array]:
        """The maximum and the sums of a piece before its first block."""
        of, top = self.stream, lib.row_vector(LOWEST, ROWS)
        if of.live < ROWS:  # no weights in other rows: what they hold was never loaded
            number = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=ROW)
            top = jnp.where(number < of.count, top, lib.row_vector(-LOWEST, ROWS))
        return top, lib.tile(0.0, (ROWS, 8), F32)

    def _products(
        self, s, steps: Sequence[Callable[[], None]], behind: Callable[[], Any]
    ) -> tuple[jax.Array, Any]:
        """``Q K^T`` in slot ``s``, and what ``behind()`` finds while the products run.

        There are as many parts of the columns as ``steps``; each is multiplied behind its step.
        """
        b, simulate = self.buffers, self.stream.simulate
        i = lib.afresh(I32(0), simulate=simulate)
        size = HALF // len(steps)

        def products(acc):
            for part, step in enumerate(steps):
                step()
                for k, keys in enumerate((b.left, b.right)):
                    here = pl.ds(part * size, size)
                    columns = b.q.at[i, :, pl.ds(k * HALF + part * size, size)]
                    lib.matmul(acc, columns, keys.at[s, :, here].T, simulate=simulate)
            if b.q_rope is not None:
                lib.matmul(acc, b.q_rope.at[i], b.weights.at[s].T, simulate=simulate)
            found = behind()
            return acc[...], found

        return pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), F32))

    def _masked(self, x, mark) -> jax.Array:
        """Scores ``x``, minus infinity where there is no key."""
        there = self._there(mark)
        there = lax.broadcast_in_dim(there, (ROWS, BLOCK), [1])
        return jnp.where(there > 0.0, x, -jnp.inf)

    def _there(self, mark) -> jax.Array:
        """1 of each key that there is, else 0."""
        return plgpu.load(self.buffers.marks.at[mark], layout=COLUMN)

    def _publish(self, x, top, shrink, s) -> jax.Array:
        """The weights of scores ``x`` relative to ``top``, for the values; and their sums."""
        b = self.buffers
        w = jnp.exp2(x * self.scale - lib.fill_rows(top, BLOCK))
        b.stats[shared.ALPHA + s] = shrink
        b.weights[s] = w.astype(b.weights.dtype)
        lib.fence(simulate=self.stream.simulate)
        plgpu.barrier_arrive(b.p_ready.at[s])
        return lib.fold_columns(w, 8)

    def _close(self, top, total, token, part, line) -> None:
        """A piece: ``1 / sum`` for the values, and its lse through ``line`` of the statistics."""
        of, b = self.stream, self.buffers
        i, row = of.parity(token), of.row_of(token)
        lse2 = jnp.where(total > 0.0, top + jnp.log2(total), -jnp.inf)
        share = self._with_sinks(1.0 / total, lse2, part)
        b.stats[shared.INVERSE + i] = jnp.where(total > 0.0, share, 0.0)
        plgpu.barrier_arrive(b.inverse_ready.at[i])
        pl.when(part < 0)(lambda: self._store(lse2, row, line))

        @pl.when(part >= 0)
        def _():
            of.results[3][part, of.tile] = lse2

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

    def _store(self, lse2, row, line) -> None:
        """Of a token in one piece."""
        of, stats = self.stream, self.buffers.stats
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stats[line] = lse2 * math.log(2.0)
        plgpu.commit_smem()
        lse = stats.at[line, pl.ds(0, of.live)]
        lib.store_rows(lse, of.results[1], row, of.count, rows=of.live, step=of.step)


@dataclass(frozen=True, kw_only=True)
class Scores(Scorer):
    """Warpgroup 0 over records: all blocks."""

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        self._load(self.stream.first_token)
        self.stream.walk(self._piece)
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, token, g0, part, _) -> None:
        """Weights of all blocks of a token's piece, whose first one is block ``g0``."""
        of, b = self.stream, self.buffers
        n, _whole = of.piece_of(token)
        plgpu.barrier_wait(b.q_full)

        def step(j, carry):
            top, total = carry
            g = g0 + j
            s = ring(g)
            mark = lax.rem(g, I32(MARKS))
            wait = [lambda: plgpu.barrier_wait(b.full.at[s])]
            x, _ = self._products(s, wait, lambda: None)
            x = self._masked(x, mark)
            top, shrink = lib.lagging_top(x, top, self.scale, simulate=of.simulate)
            more = self._publish(x, top, shrink, s)
            return top, total * lib.fill_rows(shrink, 8) + more

        top, total = lax.fori_loop(0, n, step, self._start())
        pl.when(token < of.last_token)(lambda: self._load(token + 1))
        self._close(top, total.sum(axis=1), token, part, shared.LSE)
