"""The two warpgroups of the prefill kernel that multiply: scores, softmax, values, results.

``mosaic_sm90`` says how they work together with the loader.
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import softmax_sm90 as softmax
from mla_jax.pallas.dense_prefill import steps_sm90 as steps
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.dense_prefill.buffers_sm90 import CHUNK, HALF, HEAD, Buffers, Sizes
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["Attention"]

REGISTERS = 240  # of a thread
I32 = jnp.int32
F32 = jnp.float32


@dataclass(frozen=True, kw_only=True)
class Attention(lib.Turns):
    """Warpgroup 0 or 1: 64 queries of every tile."""

    wg: jax.Array
    buffers: Buffers
    out: Any  # [tokens, heads, v] in global memory
    lse: Any  # [tokens, heads]
    dtype: Any  # of queries, keys and weights
    scale: float  # of scores, base 2
    causal: bool

    @property
    def sizes(self) -> Sizes:
        return self.buffers.sizes

    @property
    def simulate(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.buffers.simulate

    def run(self) -> None:
        """All tiles with keys of the thread block, as the loader tells them."""
        plgpu.set_max_registers(REGISTERS, action="increase")
        b, zero = self.buffers, jnp.int32(0)
        plgpu.barrier_wait(b.facts_full.at[0])
        some = self._fact(zero, tp.BLOCKS) > 0

        def first():
            pl.when(self.wg == 1)(self._give_turn)  # the first one is that of warpgroup 0
            plgpu.barrier_wait(b.q_full.at[self.wg])
            held = self._hold()
            self._await_k(zero)
            self._take_turn()
            x = self._scores(zero, held)
            self._give_turn()
            x = self._landed(x)
            b.free("k", b.slot(zero))
            return x, held

        start = lax.cond(some, first, self._nothing)
        t, *_ = lax.while_loop(lambda c: c[-1], self._tile, (zero, zero, *start, some))
        plgpu.barrier_arrive(b.facts_free.at[b.step_slot(t)])

    def clear(self, tiles, begin, end) -> None:
        """Results of the tiles without keys: items ``begin``, and on in steps, below ``end``."""
        heads = self.out.shape[1]

        @pl.loop(begin, end, step=self.sizes.workers)
        def _(i):
            tile = lax.div(i, jnp.int32(heads))
            row = tiles[tile, tp.ROW] + self.wg * HALF
            live = jnp.clip(tiles[tile, tp.LIVE] - self.wg * HALF, 0, HALF)
            zeros = plgpu.layout_cast(jnp.zeros((HALF, self.sizes.v), F32), WGMMA)
            none = lib.row_vector(-math.inf, HALF)
            self._store(zeros, none, row, live, i - tile * heads)

    def _tile(self, carry):
        """Tile ``t``, whose first block is ``g`` of the stream, with its first scores ``x``."""
        t, g, x, held, _ = carry
        b, block = self.buffers, self.sizes.block
        n, keys, offset = (self._fact(t, i) for i in (tp.BLOCKS, tp.KEYS, tp.OFFSET))
        mask = functools.partial(self._mask, keys=keys, offset=offset)
        pl.when(n == 1)(self._free_queries)
        w, top, sums = softmax.start(mask(x, 0), scale=self.scale)
        pl.when(n > 1)(lambda: self._await_k(g + 1))
        values = plgpu.layout_cast(jnp.zeros((HALF, self.sizes.v), F32), WGMMA)
        step = functools.partial(self._block, g=g, n=n, held=held, mask=mask)

        # The last block of the upper queries of a causal tile is seen to its middle only.
        seen = jnp.minimum(keys, (self.wg + 1) * HALF + offset) if self.causal else keys
        short = (n > 1) & (seen <= (n - 1) * block + block // 2)
        last = n - 1 - short.astype(I32)
        ones, grew = lib.row_vector(1.0, HALF), jnp.bool_(self.simulate)
        carry = values, w.astype(self.dtype), top, ones, sums, grew
        carry = lax.fori_loop(0, last, step, carry)
        values, p, top, shrink, sums, grew = lax.cond(
            short, lambda: step(n - 2, carry, width=block // 2), lambda: carry
        )
        finish = functools.partial(self._finish, t=t, top=top, sums=sums)

        def add_last():
            self._take_turn()
            return self._add_values(self._rescale(values, shrink, grew), p, g + n - 1)

        def with_next():
            done = add_last()
            self._give_turn()
            plgpu.barrier_wait(b.q_full.at[self.wg])
            held = self._hold()
            self._await_k(g + n)
            x = self._scores(g + n, held)
            done = self._landed(done, 1)
            b.free("v", b.slot(g + n - 1))
            finish(done)
            x = self._landed(x)
            b.free("k", b.slot(g + n))
            return x, held

        def without():
            done = self._landed(add_last())
            pl.when(self.wg == 0)(self._give_turn)  # no warpgroup would wait for the last one
            b.free("v", b.slot(g + n - 1))
            finish(done)
            return self._nothing()

        plgpu.barrier_wait(b.facts_full.at[b.step_slot(t + 1)])
        more = self._fact(t + 1, tp.BLOCKS) > 0
        x, held = lax.cond(more, with_next, without)
        plgpu.barrier_arrive(b.facts_free.at[b.step_slot(t)])
        return t + 1, g + n, x, held, more

    def _block(self, j, carry, *, g, n, held, mask, width=None):
        """Values of block ``j`` of ``n`` and scores of the next one, or of its first ``width``."""
        b, block = self.buffers, self.sizes.block
        width = block if width is None else width
        values, p, top, shrink, sums, grew = carry
        self._take_turn()
        x = self._scores(g + j + 1, held, width)
        values = self._rescale(values, shrink, grew)  # under the scores
        values = self._add_values(values, p, g + j)
        self._give_turn()
        x = self._landed(x, 1)
        b.free("k", b.slot(g + j + 1))
        pl.when(j + 2 == n)(self._free_queries)
        x = mask(x, j + 1)
        soften = functools.partial(softmax.proceed, scale=self.scale, simulate=self.simulate)
        w, y, top, shrink, sums, grew = soften(x, top, sums)
        # A wait here also keeps the assembler from moving the softmax behind the products that
        # it is to run under.
        pl.when(j + 2 < n)(lambda: self._await_k(g + j + 2))
        values = self._landed(values)
        b.free("v", b.slot(g + j))
        w, sums = softmax.complete(w, y, sums, self.dtype)
        if width < block:
            rest = plgpu.layout_cast(jnp.zeros((HALF, block - width), self.dtype), WGMMA)
            w = jnp.concatenate([w, rest], axis=1)
        return values, w, top, shrink, sums, grew

    def _finish(self, values, *, t, top, sums) -> None:
        """The result of tile ``t``."""
        inverse, lse = softmax.close(top, sums)
        row = self._fact(t, tp.ROW) + self.wg * HALF
        live = jnp.clip(self._fact(t, tp.LIVE) - self.wg * HALF, 0, HALF)
        values = values * lib.fill_rows(inverse, self.sizes.v)
        self._store(values, lse, row, live, self._fact(t, HEAD))

    def _store(self, x, lse, row, live, head) -> None:
        """``x`` [64, v] and ``lse`` [64] to the ``live`` rows from ``row`` on."""
        b, wg = self.buffers, self.wg
        if not self.simulate:
            x = x.astype(self.out.dtype)
            steps.store_live_rows(x, lse, self.out, self.lse, row, live, head)
            return
        b.o[wg] = x.astype(b.o.dtype)
        b.small[wg] = lse
        plgpu.commit_smem()
        lib.store_rows(b.o.at[wg], self.out.at[:, head], row, live, rows=HALF, step=1)

        @pl.loop(0, live)
        def _(i):
            self.lse[row + i, head] = b.small[wg, i]

        plgpu.wait_smem_to_gmem(0)

    def _scores(self, g, held, width=None):
        """Scores of the first keys of block ``g``, in flight."""
        b, width = self.buffers, self.sizes.block if width is None else width
        k = b.k.at[b.slot(g), :, pl.ds(0, width)]
        if not self.simulate:
            return steps.scores(b.q.at[self.wg], k, *held)

        def f(acc):
            for c in range(self.sizes.k_chunks):
                lib.matmul(acc, b.q.at[self.wg, c], k.at[c].T, simulate=True)
            return acc[...]

        return pl.run_scoped(f, plgpu.ACC((HALF, width), F32))

    def _add_values(self, values, p, g):
        """``values + p V(g)``, in flight."""
        b = self.buffers
        plgpu.barrier_wait(b.v_full.at[b.slot(g)])
        if not self.simulate:
            return steps.add_values(values, p, b.v.at[b.slot(g)])

        def f(acc):
            for c in range(self.sizes.v_chunks):
                part = acc.at[:, pl.ds(c * CHUNK, CHUNK)]
                lib.matmul_registers(part, p, b.v.at[b.slot(g), c], b.spill.at[self.wg])

        return lib.accumulate(values, f, simulate=True)

    def _hold(self) -> tuple:
        """Columns of the queries of a tile for registers, in a tuple that may be empty."""
        chunks = range(self.sizes.k_chunks - self.sizes.held, self.sizes.k_chunks)
        parts = [plgpu.load(self.buffers.q.at[self.wg, c], layout=WGMMA) for c in chunks]
        if parts:
            plgpu.commit_smem()  # before the copy engine writes there
        return (jnp.concatenate(parts, axis=1),) if parts and not self.simulate else ()

    def _nothing(self):
        """Scores and registers of no tile."""
        shape, none = (HALF, self.sizes.held * CHUNK), self.simulate or not self.sizes.held
        held = () if none else (lib.tile(0, shape, self.dtype),)
        return lib.tile(0.0, (HALF, self.sizes.block), F32), held

    def _mask(self, x, j, *, keys, offset):
        """Scores of block ``j`` of a tile."""
        seen = {"seen": self.wg * HALF + offset + 1} if self.causal else {}
        return softmax.mask(x, first=j * self.sizes.block, keys=keys, **seen)

    def _rescale(self, values, shrink, grew):
        return softmax.rescale(values, shrink, grew, simulate=self.simulate)

    def _landed(self, x, later=0):
        """``x``, complete, while the ``later`` products issued behind it may go on."""
        return x if self.simulate else lib.landed(x, later)

    def _fact(self, t, i):
        return self.buffers.facts[self.buffers.step_slot(t), i]

    def _await_k(self, g) -> None:
        plgpu.barrier_wait(self.buffers.k_full.at[self.buffers.slot(g)])

    def _free_queries(self) -> None:
        self.buffers.free("q", self.wg)
