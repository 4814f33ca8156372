"""Keys for ``few_sm90``: from the pages to shared memory, in 16 bits, block after block.

``Widened``: an e4m3 cache. Two warpgroups widen 32 keys of every block each::

  bytes of a unit (32 keys)       keys: two slots of 64 x 512 and 64 x 64
  copy engine -> widen  ->  full -> scores -> (P) -> values -> freed -> widen

A thread takes its bytes of a unit into registers at once, so the next load is issued before they
are widened, and waits for neither product. The scale of the cache goes into factors.

``Copied``: a cache in 16 bits. One warpgroup loads what its products take. Three blocks of 576
columns do not fit beside the queries, so the last 128 of them have two slots, and come to the L2
cache when the rest of their block is loaded::

  columns 0..447    0   1   2   0   1   2        of block g: slot g % 3
  columns 448..575  0   1   0   1   0   1                    slot g % 2
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, Sizes
from mla_jax.pallas.dense_decode.stream_sm90 import Stream

__all__ = ["Copied", "Pages", "Widened", "feed_of", "ring"]

ROW = RANK + ROPE
KEYS = BLOCK // 2  # of a unit: what a warpgroup widens of a block
HEAD = RANK - 64  # columns of a block that have three slots
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a contiguous copy a bulk copy


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The keys of a stream, in runs.

    Run ``part`` of a block are ``keys`` keys from ``part * keys`` on; a cursor is the place of a
    block and the page ids of its run.
    """

    stream: Stream
    keys: int = BLOCK
    part: int = 0

    def first(self) -> tuple[jax.Array, ...]:
        """Piece, request, number of the first block, where its piece ends; page ids."""
        row = (self.stream.task(c) for c in (wp.OF_REQUEST, wp.FROM, wp.TO))
        return self._look_up(self.stream.begin, *row)

    def behind(self, cursor) -> tuple[jax.Array, ...]:
        """The same of the block behind one; behind the last block piece ``end``."""
        p, request, block, last, *_ = cursor
        of = self.stream

        def beyond():
            q = p + 1
            return q, of.piece(q, wp.REQUEST), of.piece(q, wp.FIRST), of.piece(q, wp.END)

        def within():
            return p, request, block + 1, last

        return self._look_up(*lax.cond((block + 1 < last) | (p >= of.end), within, beyond))

    def there(self, cursor) -> jax.Array:
        """Whether there is such a block."""
        return cursor[0] < self.stream.end

    def rows(self, cursor) -> list:
        """The run in the cache, page by page, and where each part of it goes in a buffer."""
        _, _, block, _, *ids = cursor
        page, row, size = self.stream.sizes.page, 0, self.keys // len(ids)
        if page > self.keys:
            row = lax.rem(block, jnp.int32(page // BLOCK)) * BLOCK + self.part * self.keys
            row = pl.multiple_of(row, self.keys)
        pages = [self.stream.arrays.pages.at[i] for i in self.stream.pages_of(ids)]
        return [(p.at[pl.ds(row, size)], pl.ds(i * size, size)) for i, p in enumerate(pages)]

    def _look_up(self, p, request, block, last) -> tuple[jax.Array, ...]:
        sizes = self.stream.sizes
        if sizes.page > self.keys:
            columns = [lax.div(block, jnp.int32(sizes.page // BLOCK))]
        else:
            run, copies = block * (BLOCK // self.keys) + self.part, sizes.pages_of(self.keys)
            columns = [run * copies + i for i in range(copies)]
        return p, request, block, last, *self.stream.ids_of(request, columns)


def ring(g, count: int):
    """Place of element ``g`` of a stream among ``count``."""
    return lax.rem(jnp.int32(g), jnp.int32(count))


@dataclass(frozen=True, kw_only=True)
class Widened:
    """Keys of an e4m3 cache: shared memory of one thread block."""

    SLOTS = 2
    WARPGROUPS = 2

    raw: Any
    keys: Any
    k_rope: Any
    raw_full: Any
    full: Any

    @staticmethod
    def scratch(dtype, sizes: Sizes) -> dict:
        """Barriers: who arrives -> who waits, once for every use of what they guard."""
        units = Widened._units(sizes)
        return {
            "raw": plgpu.SMEM((units, KEYS, ROW), widen.STORED),
            "keys": lib.swizzled((Widened.SLOTS, BLOCK, RANK), dtype),
            "k_rope": lib.swizzled((Widened.SLOTS, BLOCK, ROPE), dtype),
            "raw_full": lib.barrier(sizes.pages_of(KEYS), 2 * units),  # copies -> each widen
            "full": lib.barrier(2, Widened.SLOTS),  # widen -> scores
        }

    @staticmethod
    def buffers(sizes: Sizes) -> int:
        """Buffers of queries that fit beside the keys."""
        return 1 if sizes.live > 16 else 2

    @staticmethod
    def _units(sizes: Sizes) -> int:
        """Units of bytes in flight."""
        return 3 if sizes.live == 8 else 2

    def stages(self, g) -> list:
        """Of block ``g`` of the stream: barriers, and behind each columns of the keys."""
        s = ring(g, self.SLOTS)
        return [(self.full.at[s], ((0, self.keys.at[s]), (RANK, self.k_rope.at[s])))]

    def run(self, half: int, of: Pages, freed, *, simulate: bool) -> None:
        """What warpgroup ``half`` does: units ``half, half + 2, ...`` of the stream.

        These are keys ``32 half`` on of every block. Unit ``h`` lies in buffer ``h % units``;
        whoever took it there loads unit ``h + units``, always of the same half of a block.
        """
        units = self._units(of.stream.sizes)
        ahead, other = divmod(half + units, 2)
        of = replace(of, keys=KEYS, part=other)

        def load(cursor, u):
            for src, to in of.rows(cursor):
                full = self.raw_full.at[other * units + u]
                plgpu.copy_gmem_to_smem(src, self.raw.at[u, to], full, oob_mode=IN_BOUNDS)

        def issue(cursor, u):
            """Load the unit of ``cursor`` if there is one; whether there is, and the next one."""
            pl.when(of.there(cursor))(lambda: load(cursor, u))
            return of.there(cursor), of.behind(cursor)

        cursor = of.first()
        found = []
        for k in range(ahead):
            there, cursor = issue(cursor, (2 * k + other) % units)
            found.append(there)

        def step(carry):
            g, found, cursor = carry
            u, s = ring(2 * g + half, units), ring(g, self.SLOTS)
            plgpu.barrier_wait(self.raw_full.at[half * units + u])
            taken = widen.take(self.raw.at[u], simulate=simulate)
            plgpu.commit_smem()
            there, cursor = issue(cursor, u)
            pl.when(g >= self.SLOTS)(lambda: plgpu.barrier_wait(freed.at[s]))
            widen.put(taken, self.keys.at[s], self.k_rope.at[s], half, simulate=simulate)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.full.at[s])
            return g + 1, (*found[1:], there), cursor

        start = jnp.int32(0), tuple(found), cursor
        g, *_ = lax.while_loop(lambda carry: carry[1][0], step, start)
        for k in range(self.SLOTS, 0, -1):
            pl.when(g >= k)(lambda k=k: plgpu.barrier_wait(freed.at[ring(g - k, self.SLOTS)]))


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Keys of a cache in 16 bits: shared memory of one thread block."""

    SLOTS = 3
    WARPGROUPS = 1

    head: Any
    tail: Any
    k_rope: Any
    head_full: Any
    tail_full: Any

    @staticmethod
    def scratch(dtype, sizes: Sizes) -> dict:
        """Barriers: who arrives -> who waits, once for every use of what they guard."""
        late = Copied.SLOTS - 1
        return {
            "head": lib.swizzled((Copied.SLOTS, BLOCK, HEAD), dtype),
            "tail": lib.swizzled((late, BLOCK, RANK - HEAD), dtype),
            "k_rope": lib.swizzled((late, BLOCK, ROPE), dtype),
            "head_full": lib.barrier(sizes.copies, Copied.SLOTS),  # copy engine -> scores
            "tail_full": lib.barrier(2 * sizes.copies, late),  # copy engine -> scores
        }

    @staticmethod
    def buffers(sizes: Sizes) -> int:
        """Buffers of queries that fit beside the keys."""
        return 1 if sizes.live > 8 else 2

    def _late(self, g):
        return ring(g, self.SLOTS - 1)

    def stages(self, g) -> list:
        """Of block ``g`` of the stream: barriers, and behind each columns of the keys."""
        s, t = ring(g, self.SLOTS), self._late(g)
        return [
            (self.head_full.at[s], ((0, self.head.at[s]),)),
            (self.tail_full.at[t], ((HEAD, self.tail.at[t]), (RANK, self.k_rope.at[t]))),
        ]

    def run(self, which: int, of: Pages, freed, *, simulate: bool) -> None:
        """Load block after block, as slots are freed."""
        del which, simulate
        head, tail, rope = pl.ds(0, HEAD), pl.ds(HEAD, RANK - HEAD), pl.ds(RANK, ROPE)

        def load(cursor, columns, buffer, full):
            for src, to in of.rows(cursor):
                plgpu.copy_gmem_to_smem(src.at[:, columns], buffer.at[to], full)

        def load_head(cursor, g):
            s = ring(g, self.SLOTS)
            load(cursor, head, self.head.at[s], self.head_full.at[s])

        def load_tail(cursor, g):
            t = self._late(g)
            load(cursor, tail, self.tail.at[t], self.tail_full.at[t])
            load(cursor, rope, self.k_rope.at[t], self.tail_full.at[t])

        def fetch_tail(cursor):
            for columns in (tail, rope):
                for src, _ in of.rows(cursor):
                    plgpu.async_prefetch(src.at[:, columns])

        def begin(cursor, g):
            """Load what of block ``g`` fits before anything is freed."""
            load_head(cursor, g)
            fetch_tail(cursor) if g == self.SLOTS - 1 else load_tail(cursor, g)

        cursors = [of.first()]
        for _ in range(self.SLOTS):  # the table is read before anything waits for it
            cursors.append(of.behind(cursors[-1]))
        for g, cursor in enumerate(cursors[:-1]):
            pl.when(of.there(cursor))(functools.partial(begin, cursor, g))

        def step(carry):
            g, alive, late, cursor = carry  # due: the tail of ``late``, the head of ``cursor``
            plgpu.barrier_wait(freed.at[ring(g, self.SLOTS)])
            pl.when(of.there(late))(lambda: load_tail(late, g + self.SLOTS - 1))

            @pl.when(of.there(cursor))
            def _():
                load_head(cursor, g + self.SLOTS)
                fetch_tail(cursor)

            return g + 1, (*alive[1:], of.there(cursor)), cursor, of.behind(cursor)

        alive = tuple(map(of.there, cursors[:-1]))
        start = jnp.int32(0), alive, *cursors[-2:]
        lax.while_loop(lambda carry: carry[1][0], step, start)


def feed_of(quantised: bool) -> type[Widened] | type[Copied]:
    """How the keys of a cache come."""
    return Widened if quantised else Copied
