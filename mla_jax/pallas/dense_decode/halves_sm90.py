"""The values of the main decode kernel: half of the columns of ``O += P V``, and all loads.

Two warpgroups, one to each half. A half loads its columns of the queries and of the keys, which
are its values; the right one also the rotary columns and the columns of the queries that stay in
shared memory.
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
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.buffers_sm90 import (
    ALPHA,
    HALF,
    INVERSE,
    SLOTS,
    TAIL,
    Buffers,
    place,
)
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, ROWS
from mla_jax.pallas.dense_decode.stream_sm90 import Stream, parity
from mla_jax.pallas.mosaic_lib import ROW, WGMMA

__all__ = ["Half"]

REGISTERS = 160  # of a thread; with less, products are serialised
ROPE_COLUMNS = pl.ds(RANK, ROPE)
I32 = jnp.int32


@dataclass(frozen=True, kw_only=True)
class Half:
    """Warpgroup 1 or 2. What is to be loaded is ``found``: piece, element, block, page ids.

    Element 0 of a piece is its queries, element 1 its first block.
    """

    stream: Stream
    buffers: Buffers
    is_right: bool
    defer: bool  # PV of a block waits for QK of the next one
    prefetch: bool  # blocks go to the L2 cache one step early
    early_launch: bool  # the merge kernel is launched while this one ends

    @property
    def columns(self):
        """Of latents and of results."""
        return pl.ds(HALF if self.is_right else 0, HALF)

    @property
    def keys(self) -> Any:
        return self.buffers.right if self.is_right else self.buffers.left

    @property
    def full(self) -> Any:
        return self.buffers.right_full if self.is_right else self.buffers.left_full

    @property
    def raw(self) -> Any:
        return self.buffers.right_raw if self.is_right else self.buffers.left_raw

    @property
    def stored(self) -> Any:
        return self.buffers.right_bytes if self.is_right else self.buffers.left_bytes

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        of = self.stream
        pl.when(of.begin < of.end)(self._start)
        lax.fori_loop(of.begin, of.end, self._piece, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _start(self) -> None:
        """Load the first elements of the stream, as many as there are slots."""
        of, begin = self.stream, self.stream.begin
        request, token = of.task(wp.OF_REQUEST), of.task(wp.OF_TOKEN)
        first, last = of.task(wp.FROM), of.task(wp.TO)
        self._load_rows(of.row_at(token), 0)
        if self.is_right:
            self._load_tail(of.row_at(token))
        found = begin, 1, first, *self._ids(request, first)
        self._load(found, 1)
        if self.is_right:
            self._load_rope(found, 0)

        @pl.when(first + 1 < last)
        def _():
            found = begin, 2, first + 1, *self._ids(request, first + 1)
            self._load(found, 2)
            if self.is_right:
                self._load_rope(found, 1)

        @pl.when((first + 1 == last) & (begin + 1 < of.end))
        def _():
            self._load_rows(of.row_of(begin + 1), 2)
            if self.is_right:
                block = of.piece(begin + 1, wp.FIRST)
                ids = self._ids(of.piece(begin + 1, wp.REQUEST), block)
                self._load_rope((begin + 1, 1, block, *ids), 1)

        self._convert(begin, 1, jnp.int32(1))

    def _piece(self, p, g0):
        """Values of all blocks of piece ``p``, whose queries are element ``g0`` of the stream."""
        of, b, is_right = self.stream, self.buffers, self.is_right
        n, first, request = of.blocks_of(p), of.piece(p, wp.FIRST), of.piece(p, wp.REQUEST)
        length = of.piece(p, wp.LENGTH)
        part, row, count = of.piece(p, wp.SLOT), of.row_of(p), of.live_rows(p)  # far: early

        def ahead(e):
            def here():
                block = first + jnp.maximum(e - 1, 0)
                return p, e, block, *self._ids(request, block)

            return self._find(p, n, e, here)

        found = ahead(jnp.int32(SLOTS))
        second = self._element(p, n, jnp.int32(2))
        self._convert(*second, g0 + 2)
        plgpu.barrier_wait(b.q_taken.at[b.slot(g0)])
        self._refill(found, b.slot(g0))

        def step(j, carry):
            o, before, found, s, r = carry  # the last step loads ``before``, this one ``found``
            g = g0 + 1 + j
            following = ahead(j + 2 + SLOTS)
            soon = self._element(p, n, j + 3)
            if is_right:
                next_rope = self._find(p, n, j + 3, lambda: before, queries=0)
            plgpu.barrier_wait(b.p_ready.at[s])
            if is_right:
                more = (j == n - 1) & (p + 1 < of.end)
                pl.when(more)(lambda: self._load_tail(of.row_of(p + 1)))
            o = self._rescale(o, plgpu.load(b.stats.at[ALPHA + s], layout=ROW))
            valid = length - (first + j) * BLOCK
            pl.when(valid < BLOCK)(lambda: lib.clear_rows(self.keys.at[s], valid))
            o = self._add_values(o, s, r, following, lambda: self._convert(*soon, g + 2))
            if is_right:
                plgpu.barrier_wait(b.left_done.at[s])
                self._load_rope(next_rope, r)
            else:
                plgpu.barrier_arrive(b.left_done.at[s])
            pl.when(j < n - 1)(lambda: self._refill(found, s))
            return o, found, following, *b.turn(s, r)

        o = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), WGMMA)
        following = ahead(jnp.int32(1 + SLOTS))
        carry = o, found, following, b.slot(g0 + 1), parity(g0 - (p - of.begin))
        o, found, *_ = lax.fori_loop(0, n, step, carry)
        s = b.slot(g0 + n)
        self._store(o, s, p, part, row, count)
        self._refill(found, s)
        return g0 + n + 1

    def _add_values(self, o, s, r, following, meanwhile) -> jax.Array:
        """``o + P V`` of the block in slot ``s``; ``meanwhile()`` runs under the products."""
        b, simulate, of_tile = self.buffers, self.buffers.simulate, int(self.is_right)
        if self.defer:
            plgpu.barrier_wait(b.left_issued.at[s] if self.is_right else b.go.at[s])

        def products(acc):
            lib.matmul(acc, b.k_rope.at[r], self.keys.at[s], simulate=simulate)
            if self.defer and not self.is_right:
                plgpu.barrier_arrive(b.left_issued.at[s])
            if self.prefetch:
                self._fetch(following, self.columns, min(of_tile, self.stream.sizes.tiles - 1))
            meanwhile()

        return lib.accumulate(o, products, simulate=simulate)

    def _rescale(self, o, shrink) -> jax.Array:
        """``o`` times a factor of each row; all of a warp's are one in most blocks."""

        def scaled():
            return o * lib.fill_rows(shrink, HALF)

        if self.buffers.simulate:
            return scaled()
        return lax.cond(lib.any_below_one(shrink), scaled, lambda: o)

    def _store(self, o, s, p, part, row, count) -> None:
        """The result of piece ``p``, by way of the slot ``s`` of its last block."""
        of, b, sizes = self.stream, self.buffers, self.stream.sizes
        i = parity(p - of.begin)
        plgpu.barrier_wait(b.inverse_ready.at[i])
        o = o * lib.fill_rows(plgpu.load(b.stats.at[INVERSE + i], layout=ROW), HALF)
        self.keys[s] = o.astype(self.keys.dtype)
        plgpu.commit_smem()

        def store(to, row):
            result, to = self.keys.at[s, pl.ds(0, sizes.live)], to.at[:, self.columns]
            lib.store_rows(result, to, row, count, rows=sizes.live, step=sizes.step)

        pl.when(part < 0)(lambda: store(of.arrays.out, row))
        of_part = (part * sizes.tiles + of.tile) * ROWS
        pl.when(part >= 0)(lambda: store(of.arrays.part, of_part))
        if self.is_right and self.early_launch:  # sooner, and the merge would only wait longer
            pl.when(p == of.end - 1)(plgpu.griddepcontrol_launch_dependents)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _element(self, p, n, e, queries=1):
        """Piece and element ``e`` elements behind the queries of piece ``p`` of ``n`` blocks.

        If ``queries`` is 0 those of later pieces do not count. A piece has two or more elements,
        so three steps reach the piece after the next one at most, and so do two steps without
        queries.
        """
        after = e - 1 - n
        third = (after >= 0) & (after >= self.stream.blocks_of(p + 1) + queries)
        q = p + (after >= 0).astype(I32) + third.astype(I32)
        return q, jnp.where(after < 0, e, jnp.where(third, 0, after) + 1 - queries)

    def _find(self, p, n, e, here, queries=1):
        """``_element``, its block and its page ids; ``here()`` says so of one of piece ``p``."""

        def later():
            q, i = self._element(p, n, e, queries)
            block = self.stream.piece(q, wp.FIRST) + jnp.maximum(i - 1, 0)
            return q, i, block, *self._ids(self.stream.piece(q, wp.REQUEST), block)

        return lax.cond(e <= n, here, later)

    def _ids(self, request, block) -> list:
        """Page ids of a block as the table has them."""
        page, copies = self.stream.sizes.page, self.stream.sizes.copies
        if copies > 1:
            columns = [block * copies + i for i in range(copies)]
        else:
            columns = [lax.div(block, jnp.int32(page // BLOCK))]
        return self.stream.ids_of(request, columns)

    def _rows(self, block, ids, columns) -> list:
        """Columns of a block in the cache, page by page."""
        parts, row = self.stream.sizes.page // BLOCK, 0
        if parts > 1:  # blocks in a page
            row = pl.multiple_of(lax.rem(block, jnp.int32(parts)) * BLOCK, BLOCK)
        rows, pages = pl.ds(row, BLOCK // len(ids)), self.stream.arrays.pages
        return [pages.at[i, rows, columns] for i in self.stream.pages_of(ids)]

    def _load(self, found, s) -> None:
        p, e, block, *ids = found
        of, to = self.stream, self.raw if self.buffers.quantised else self.full
        there = self.keys.at[s], place(self.stored, s)
        pl.when((p < of.end) & (e == 0))(lambda: self._load_rows(of.row_of(p), s))

        @pl.when((p < of.end) & (e > 0))
        def _():
            self._load_block(block, ids, self.columns, *there, to.at[s])

    def _load_block(self, block, ids, columns, buffer, stored, barrier) -> None:
        """Columns of a block to ``buffer``, or their bytes to where they are widened."""
        size = BLOCK // self.stream.sizes.copies
        buffer = stored.at[1] if self.buffers.quantised else buffer
        for i, src in enumerate(self._rows(block, ids, columns)):
            plgpu.copy_gmem_to_smem(src, buffer.at[pl.ds(i * size, size)], barrier)

    def _load_rows(self, first, s) -> None:
        """Columns of the queries, in as many parts as a block has."""
        sizes, q = self.stream.sizes, self.stream.arrays.q_latent
        parts = 1 if self.buffers.quantised else sizes.copies
        size = min(max(sizes.live // parts, 8), q.shape[0])
        for i in range(parts):
            rows = pl.ds(pl.multiple_of(first + i * size, 8), size)
            to = self.keys.at[s, pl.ds(i * size, size)]
            plgpu.copy_gmem_to_smem(q.at[rows, self.columns], to, self.full.at[s])

    def _load_tail(self, first) -> None:
        """Columns of the queries that stay in shared memory."""
        arrays, b = self.stream.arrays, self.buffers
        size = min(self.stream.sizes.live, arrays.q_latent.shape[0])
        rows, to = pl.ds(first, size), pl.ds(0, size)
        tail = arrays.q_latent.at[rows, pl.ds(RANK - TAIL, TAIL)]
        plgpu.copy_gmem_to_smem(tail, b.q_tail.at[0, to], b.tail_full)
        plgpu.copy_gmem_to_smem(arrays.q_rope.at[rows], b.q_tail.at[1, to], b.tail_full)

    def _load_rope(self, found, r) -> None:
        p, _, block, *ids = found
        b = self.buffers
        to = b.k_rope.at[r], b.bytes_of_rope(r), b.rope_full.at[r]
        pl.when(p < self.stream.end)(lambda: self._load_block(block, ids, ROPE_COLUMNS, *to))

    def _fetch(self, found, columns, of_tile=0) -> None:
        """Bring columns of a block to the L2 cache: one tile does so for all."""
        p, e, block, *ids = found

        @pl.when((p < self.stream.end) & (e > 0) & (self.stream.tile == of_tile))
        def _():
            for src in self._rows(block, ids, columns):
                plgpu.async_prefetch(src)

    def _refill(self, found, s) -> None:
        """``_load``, and fetch the rotary columns: their buffer is free one block later."""
        self._load(found, s)
        if self.is_right:
            self._fetch(found, ROPE_COLUMNS)

    def _convert(self, p, e, g) -> None:
        """Bytes of element ``g`` of the stream, ``e`` of piece ``p``, to keys."""
        if not self.buffers.quantised:
            return

        @pl.when((p < self.stream.end) & (e > 0))
        def _():
            s = self.buffers.slot(g)
            plgpu.barrier_wait(self.raw.at[s])
            widen.keys(self.keys.at[s], self.stored.at[s], simulate=self.buffers.simulate)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.full.at[s])
