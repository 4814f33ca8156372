"""Two warpgroups that score in turn: rows that are elements, from memory to their weights.

Each has one slot of shared memory and every other block of keys: it copies the block's rows there,
multiplies the queries with them, and makes weights of the scores. So the tensor cores have products
of one while the other waits for its rows or takes exponentials. One warpgroup cannot do both: it
issues 36 products, and has to wait for most of them before it can issue the last one.

A slot is freed and filled in two parts (``feed_sm90``), and products with the first part run while
the second one is on its way::

  freed 0 -> copy 0 ------> products 0 -.
  freed 1 ---> copy 1 ----> products 1 -`-> softmax -> p_ready -> left, right -> freed 0, freed 1

Weights of a block are relative to a maximum that includes all blocks before it, so each warpgroup
gives its own to the other one (``top_ready``); the sums of both are added behind the last block of
a piece (``total_ready``).
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_lib import ROW
from mla_jax.pallas.sparse_attention import stream_sm90 as shared
from mla_jax.pallas.sparse_attention.feed_sm90 import SLOTS, Feed
from mla_jax.pallas.sparse_attention.scores_sm90 import COLUMN, Scorer
from mla_jax.pallas.sparse_attention.stream_sm90 import ring

__all__ = ["Pair"]

REGISTERS = 96  # of a thread
I32 = jnp.int32


@dataclass(frozen=True, kw_only=True)
class Pair(Scorer):
    """Warpgroup 0 or 1 over elements: the blocks of its slot."""

    slot: Any  # the warpgroup's number
    feed: Feed

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        of, b = self.stream, self.buffers
        of.walk(self._piece, self.feed.entries(of.start + self.slot))
        blocks, other = of.stop - of.start, 1 - self.slot
        pl.when(blocks > self.slot)(lambda: self.feed.await_freed(self.slot))
        pl.when(ring(blocks - 1) == other)(lambda: plgpu.barrier_wait(b.top_ready.at[other]))
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, token, g0, part, entries: Any) -> Any:
        """This warpgroup's blocks of a token's piece, whose first one is block ``g0``.

        ``entries`` are those of the list for this warpgroup's next block, here and in the result.
        """
        of, b, s, other = self.stream, self.buffers, self.slot, 1 - self.slot
        n, _whole = of.piece_of(token)
        first = g0 + lax.rem(g0 + s, I32(SLOTS))
        count = lax.div(g0 + n - first + 1, I32(SLOTS))
        start, nothing = self._start()

        def step(k, carry):
            g = first + SLOTS * k
            return self._block(g, carry, token=token, begins=g == g0, is_first=k == 0, start=start)

        entries, top, total = lax.fori_loop(0, count, step, (entries, start, nothing))
        pl.when(count == 0)(lambda: plgpu.barrier_wait(b.q_full))  # as often as the other one
        total, mine = total.sum(axis=1), shared.TOTAL + 2 * of.parity(token)
        ends = ring(g0 + n - 1) == s

        def both():
            plgpu.barrier_wait(b.total_ready.at[other])
            more = plgpu.load(b.stats.at[mine + other], layout=ROW)
            return total + more * plgpu.load(b.stats.at[shared.ALPHA + s], layout=ROW)

        @pl.when(ends)
        def _():
            sums = lax.cond(n > 1, both, lambda: total)
            self._close(top, sums, token, part, shared.LSE + s)

        @pl.when(~ends & (n > 1))
        def _():
            b.stats[mine + s] = total
            plgpu.barrier_arrive(b.total_ready.at[s])

        return entries

    def _block(self, g, carry, *, token, begins, is_first, start) -> tuple[Any, ...]:
        """Block ``g``, which ``begins`` the token's piece or ``is_first`` of this warpgroup there.

        ``carry``: entries of the list, the maximum of this warpgroup's block before, and its sums
        relative to that.
        """
        of, b = self.stream, self.buffers
        entries, before, total = carry
        s = lib.afresh(self.slot, simulate=of.simulate)
        other = 1 - s
        self.feed.begin(entries, of.start + g)

        def await_top():
            plgpu.barrier_wait(b.top_ready.at[other])

        @pl.when(begins)
        def _():
            pl.when(g > 0)(await_top)  # nobody reads the queries of the token before any more
            self._load(token)

        entries = self.feed.entries(of.start + g + SLOTS)

        def all_before():
            await_top()
            return plgpu.load(b.stats.at[shared.TOP + other], layout=ROW)

        x = self._scores(s, is_first)
        top = lax.cond(begins, lambda: start, all_before)
        top, shrink = lib.lagging_top(x, top, self.scale, simulate=of.simulate)
        b.stats[shared.TOP + s] = top
        plgpu.barrier_arrive(b.top_ready.at[s])
        more = self._publish(x, top, shrink, s)
        return entries, top, total * lib.fill_rows(jnp.exp2(before - top), 8) + more

    def _scores(self, s, is_first) -> jax.Array:
        """``Q K^T`` of the block that was begun to be copied to slot ``s``."""

        def first():
            self.feed.finish(0)
            pl.when(is_first)(lambda: plgpu.barrier_wait(self.buffers.q_full))

        def missing():  # asked while the products run
            return lib.any_below_one(self._there(s), COLUMN)

        simulate = self.stream.simulate
        steps = first, lambda: self.feed.finish(1)
        x, some = self._products(s, steps, (lambda: None) if simulate else missing)
        if simulate:
            return self._masked(x, s)
        return lax.cond(some, lambda: self._masked(x, s), lambda: x)
