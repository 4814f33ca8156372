"""``work_plan.balanced`` in one kernel: its small steps as kernels of their own cost 30 µs.

It computes the same integers. A row of the plan belongs to one request; rows, requests and workers
are lanes of vectors. A lane finds *its* request by bisection, for the first rows of the requests
ascend, and then looks up what it needs of it. Every thread block sums up all requests
(warpgroup 0), prices the shares (17, divided among four warpgroups) and then writes up to four
chunks of 128 rows, one a warpgroup::

  wg 0   | ends = scan(blocks) |        | parts, bases = scans |
  wg 0-3 |                     | prices |                      | rows
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.axes import PerRequest, Starts
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.mosaic_inline import arith, ir, memref, vectors
from mla_jax.types import cdiv

__all__ = ["MOST_REQUESTS", "balanced"]

MOST_REQUESTS = 2048
"""Sums and fields of more would not fit the shared memory."""

LANES = wp.ROWS
LANE = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
"""Layout of a number for each of 128 rows."""

WARPGROUPS = 4
EACH = cdiv(wp.SHARES, WARPGROUPS)  # shares that a warpgroup prices
GIVEN = LENGTH, TOKEN, QUERIES = tuple(range(3))
DERIVED = BLOCKS, LINE, LIVE, PARTS, BASE, SLOT, LISTED, WORKER = tuple(range(3, 11))
"""Rows of the requests' table: keys, first token, queries; then blocks, where they begin on the
line, requests with blocks so far, pieces and where they begin in the plan, first slot or -1, where
its tokens begin in the list of merges, first worker."""

I32 = jnp.int32


def balanced(
    seq_lens: PerRequest, query_starts: Starts, *, tokens: int, block: int, workers: int,
    split_cost: int, interpret: object = None,
) -> wp.WorkPlan:  # fmt: skip
    """``work_plan.balanced`` of up to ``MOST_REQUESTS`` requests."""
    n = LANES << (cdiv(seq_lens.shape[0], LANES) - 1).bit_length()  # sums double their steps
    shapes = wp.shapes(seq_lens.shape[0], tokens, workers)
    chunks = [rows // LANES for rows, *_ in shapes]
    spec = jax.ShapeDtypeStruct
    barrier = plgpu.Barrier(num_arrivals=WARPGROUPS)
    kernel = lib.kernel(
        functools.partial(
            _body,
            block=block,
            workers=workers,
            split_cost=split_cost,
            tokens=tokens,
            chunks=chunks,
            simulate=interpret is not None,
        ),
        out_type=[spec(shape, I32) for shape in shapes],
        scratch_types={
            "sums": plgpu.SMEM((2, 3, n // 2 + n), I32),
            "requests": plgpu.SMEM((len(GIVEN + DERIVED), n), I32),
            "prices": plgpu.SMEM((WARPGROUPS, 2, EACH, LANES // 2 + LANES), I32),
            "costs": plgpu.SMEM((2 * wp.SHARES,), I32),
            "summed": barrier,
            "priced": barrier,
            "based": barrier,
        },
        grid=(cdiv(sum(chunks), WARPGROUPS),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        kernel_name="mla_dense_decode_plan",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(  # all layouts are stated: none is inferred
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    pieces, tasks, merges = kernel(seq_lens, query_starts)
    return wp.WorkPlan(
        slots=wp.balanced_slots(workers), workers=workers, tokens=tokens,
        pieces=pieces, tasks=tasks, merges=merges,
    )  # fmt: skip


def _body(lens_g, starts_g, pieces_g, tasks_g, merges_g, *, chunks, tokens, **facts):
    wg = lax.axis_index("wg")
    planner = _Planner(wg=wg, **facts)
    pl.when(wg == 0)(lambda: planner.lay_out(lens_g, starts_g))
    planner.meet(planner.summed)
    even = planner.even()
    planner.price(even)
    planner.meet(planner.priced)
    share, is_equal = planner.choose(even)
    pl.when(wg == 0)(lambda: planner.split(share, is_equal))
    planner.meet(planner.based)
    rows = _Rows.of(planner, share, is_equal, tokens)
    writes = (rows.pieces_of, pieces_g), (rows.tasks_of, tasks_g), (rows.merges_of, merges_g)
    chunk, before = lax.axis_index("block") * WARPGROUPS + wg, 0
    for (columns, to), count in zip(writes, chunks, strict=True):

        @pl.when((chunk >= before) & (chunk < before + count))
        def _(columns=columns, to=to, before=before):
            row = pl.multiple_of((chunk - before) * LANES, LANES)
            lanes = plgpu.broadcasted_iota(I32, (LANES,), 0, layout=LANE) + row
            _store(to, row, columns(lanes), simulate=planner.simulate)

        before += count


def _vector(value):
    return plgpu.layout_cast(jnp.full((LANES,), value, I32), LANE)


def _either(is_equal, equal, line):
    """By equal parts of each request, or by cuts of the line of all of them."""
    return equal * is_equal + line * (1 - is_equal)


def _cuts(line, blocks, share):
    """How often the line is cut inside a request."""
    return jnp.maximum(lax.div(line + blocks - 1, share) - lax.div(line, share), 0)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """What every thread block finds out: the requests on the line, the share, their pieces."""

    wg: Any
    block: int
    workers: int
    split_cost: int
    simulate: bool
    sums: Any  # shared memory
    requests: Any
    prices: Any
    costs: Any
    summed: Any  # barriers
    priced: Any
    based: Any

    @property
    def n(self) -> int:
        return self.requests.shape[1]

    @property
    def whole(self):
        """Layout of a number for each request."""
        return plgpu.Layout.WG_STRIDED((self.n,), vec_size=1)

    def vector(self, value):
        return plgpu.layout_cast(jnp.full((self.n,), value, I32), self.whole)

    def meet(self, barrier) -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def scan(self, buffer, arrays):
        """Inclusive sums, in log2 steps; the buffer is two copies of zeros and the numbers."""
        size, layout = arrays[0].shape[0], self.whole if arrays[0].shape[0] == self.n else LANE
        zeros = self.vector if self.n == LANES else _vector
        for copy in range(2):
            for k in range(len(arrays)):
                for c in range(0, size // 2, LANES // 2):
                    buffer[copy, k, pl.ds(c, LANES)] = zeros(0)
        plgpu.commit_smem()
        step, copy = 1, 0
        while step < size:
            for k, x in enumerate(arrays):
                buffer[copy, k, pl.ds(size // 2, size)] = x
            plgpu.commit_smem()
            shifted = pl.ds(size // 2 - step, size)
            arrays = [
                x + plgpu.load(buffer.at[copy, k, shifted], layout=layout)
                for k, x in enumerate(arrays)
            ]
            step, copy = 2 * step, 1 - copy
        return arrays

    def lay_out(self, lens_g, starts_g) -> None:
        """Blocks of the requests, and where they begin on the line. By one warpgroup."""
        whole, count = self.whole, lens_g.shape[0]
        lookup = functools.partial(_lookup, layout=whole, simulate=self.simulate)
        index = plgpu.broadcasted_iota(I32, (self.n,), 0, layout=whole)
        lens = lookup(lens_g, jnp.minimum(index, count - 1))
        starts = lookup(starts_g, jnp.minimum(index, count))
        queries = lookup(starts_g, jnp.minimum(index + 1, count)) - starts
        given = lens, starts, queries
        alive = queries > 0
        blocks = jnp.maximum(lax.div(lens + (self.block - 1), self.vector(self.block)), 1)
        blocks = jnp.where(alive, blocks, 0)
        lead = jnp.where(alive, self.vector(wp.START_COST), 0)
        ends, live = self.scan(self.sums, [blocks + lead, jnp.minimum(blocks, 1)])
        for k, x in zip(GIVEN + DERIVED[:3], (*given, blocks, ends - blocks, live), strict=True):
            self.requests[k] = x

    def even(self):
        """The least share that serves all requests."""
        total = self.requests[LINE, self.n - 1] + self.requests[BLOCKS, self.n - 1]
        return lax.div(jnp.maximum(total, 1) + (self.workers - 1), I32(self.workers))

    def price(self, even) -> None:
        """What the shares of a warpgroup cost, by equal parts and by cuts of the line."""
        wg, requests, prices = self.wg, self.requests, self.prices

        def price(c, acc):
            at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
            line, blocks = (plgpu.load(requests.at[k, at], layout=LANE) for k in (LINE, BLOCKS))
            for k in range(EACH):
                share = _vector(wp.share_at(even, wg + k * WARPGROUPS))
                equal = lax.div(blocks + share - 1, share)
                acc[k] += _cuts(line, blocks, share) + equal * 65536
            return acc

        acc = lax.fori_loop(0, self.n // LANES, price, [_vector(0)] * EACH)
        for k, x in enumerate(self.scan(prices.at[wg], acc)):
            prices[wg, 1, k, pl.ds(LANES // 2, LANES)] = x
        plgpu.commit_smem()
        live = requests[LIVE, self.n - 1]
        for k in range(EACH):
            i = wg + k * WARPGROUPS

            @pl.when(i < wp.SHARES)
            def _(k=k, i=i):
                both = prices[wg, 1, k, LANES // 2 + LANES - 1]
                of_line, count = both & 65535, lax.shift_right_logical(both, I32(16))
                self.costs[i] = wp.cost(wp.share_at(even, i), of_line, self.split_cost)
                equal = wp.cost(wp.share_at(even, i), count - live, self.split_cost)
                most = jnp.iinfo(I32).max
                self.costs[wp.SHARES + i] = jnp.where(count <= self.workers, equal, most)

    def choose(self, even):
        """The cheapest share, and 1 if it is of equal parts."""
        best, least = I32(0), self.costs[0]
        for i in range(1, 2 * wp.SHARES):
            cost = self.costs[i]
            best, least = jnp.where(cost < least, i, best), jnp.minimum(cost, least)
        is_equal = (best >= wp.SHARES).astype(I32)
        return wp.share_at(even, best - is_equal * wp.SHARES), is_equal

    def split(self, share, is_equal) -> None:
        """Pieces of the requests, their slots and their places. By one warpgroup."""
        queries, blocks, line = (
            plgpu.load(self.requests.at[k], layout=self.whole) for k in (QUERIES, BLOCKS, LINE)
        )
        size = self.vector(share)
        equal = lax.div(blocks + size - 1, size)
        alive = queries > 0
        parts = jnp.where(alive, _either(is_equal, equal, _cuts(line, blocks, size) + 1), 0)
        split = parts > 1
        ends = self.scan(self.sums, [parts, *(jnp.where(split, x, 0) for x in (parts, queries))])
        base, slot = ends[0] - parts, jnp.where(split, ends[1] - parts, -1)
        listed = ends[2] - jnp.where(split, queries, 0)
        found = (parts, base, slot, listed, _either(is_equal, base, lax.div(line, size)))
        for k, x in zip(DERIVED[3:], found, strict=True):
            self.requests[k] = x


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Columns of the plan's rows, a row in each lane."""

    planner: _Planner
    share: Any
    is_equal: Any
    pieces: Any  # how many there are
    listed: Any  # tokens of split requests
    live_tokens: Any
    tokens: int

    @classmethod
    def of(cls, planner: _Planner, share, is_equal, tokens: int) -> "_Rows":
        requests, n = planner.requests, planner.n
        pieces = requests[BASE, n - 1] + requests[PARTS, n - 1]
        of_last = jnp.where(requests[PARTS, n - 1] > 1, requests[QUERIES, n - 1], 0)
        return cls(
            planner=planner, share=share, is_equal=is_equal, pieces=pieces,
            listed=requests[LISTED, n - 1] + of_last,
            live_tokens=requests[TOKEN, n - 1] + requests[QUERIES, n - 1], tokens=tokens,
        )  # fmt: skip

    def lookup(self, field, index):
        requests, simulate = self.planner.requests, self.planner.simulate
        return _lookup(requests.at[field], index, LANE, simulate=simulate)

    def find(self, key, x):
        """The last request whose ``key`` is at most ``x``."""
        r, size = _vector(0), self.planner.n  # a power of two
        while size > 1:
            size //= 2
            probe = jnp.minimum(r + size, self.planner.n - 1)
            r = jnp.where(self.lookup(key, probe) <= x, probe, r)
        return r

    def select(self, r, *fields):
        return [self.lookup(f, r) for f in fields]

    def described(self, i):
        """The columns of ``WorkPlan.pieces`` of piece ``i``."""
        r, block = self.find(BASE, i), self.planner.block
        base, line, slot, length, token, queries = self.select(
            r, BASE, LINE, SLOT, LENGTH, TOKEN, QUERIES
        )
        size, k = _vector(self.share), i - base
        blocks = jnp.maximum(lax.div(length + (block - 1), _vector(block)), 1)
        cut = (lax.div(line, size) + k) * size - line
        parts = lax.div(blocks + size - 1, size)
        even = lax.div(blocks + parts - 1, parts)
        first = _either(self.is_equal, k * even, jnp.where(k == 0, 0, cut))
        end = jnp.minimum(_either(self.is_equal, k * even + even, cut + size), blocks)
        slot = jnp.where(slot < 0, -1, slot + k)
        return r, first, end, slot, length, token, queries

    def pieces_of(self, i):
        return [jnp.where(i < self.pieces, x, 0) for x in self.described(i)]

    def first_piece(self, w):
        base, first, parts = self.select(self.find(WORKER, w - 1), BASE, WORKER, PARTS)
        before = jnp.where(first < w, base + jnp.minimum(w - first, parts), 0)
        return jnp.where(w < self.planner.workers, before, self.pieces)

    def tasks_of(self, w):
        begin, stop = self.first_piece(w), self.first_piece(w + 1)
        of_first = self.described(begin)
        columns = (begin, stop, *(of_first[f] for f in (wp.REQUEST, wp.FIRST, wp.END, wp.TOKEN)))
        return [jnp.where(begin < stop, x, 0) for x in columns]

    def merges_of(self, i):
        k, listed, live = i - 1, self.listed, self.live_tokens
        fields = LISTED, TOKEN, SLOT, PARTS
        first, token, slot, parts = self.select(self.find(LISTED, k), *fields)
        query = k - first
        columns = [jnp.where(k < listed, x, 0) for x in (slot, parts, query)]
        token = jnp.where(k < listed, token + query, k - listed + live)
        head = listed + self.tokens - live
        columns = [jnp.where(k < head, x, 0) for x in (*columns, token)]
        first = _vector(head), *(_vector(0) for _ in range(3))
        return [jnp.where(i == 0, x, y) for x, y in zip(first, columns, strict=True)]


def _lookup(ref, index, layout, *, simulate: bool):
    """``ref[index]``, a number for each lane."""
    if simulate:
        return jnp.take(ref[...], index)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, I32, layout=layout),
    )
    def read(_, ref, index):

        def one(x):
            at = arith.index_cast(ir.IndexType.get(), vectors.extract(x, [], [0]))
            return vectors.broadcast(x.type, memref.load(ref, [at]))

        registers = np.vectorize(one, otypes=[object])(index.registers)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=index.is_signed
        )

    return read(ref, index)


def _store(ref, row, columns, *, simulate: bool) -> None:
    """Columns, a number for each lane, to 128 rows of eight numbers."""
    rows = ref.at[pl.ds(row, LANES)]
    columns = [*columns, *[columns[0] * 0] * (8 - len(columns))]
    if simulate:
        rows[...] = jnp.stack(columns, axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(LANE,) * 8))
    def write(_, ref, *columns):

        ((lane,),) = columns[0].layout.thread_idxs((LANES,))
        for f, x in enumerate(columns):
            memref.store(
                vectors.extract(x.registers[0], [], [0]), ref,
                [lane, arith.constant(ir.IndexType.get(), f)],
            )  # fmt: skip

    write(rows, *columns)
