"""``work_plan.balanced`` in one kernel: its small steps as kernels of their own cost 30 µs.

The same integers. A row of the plan belongs to one request; rows, requests and workers are
lanes of vectors. A lane finds *its* request by bisection, for the first rows of the requests
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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.types import Array, Int, cdiv

__all__ = ["MOST_REQUESTS", "balanced"]

MOST_REQUESTS = 2048
"""Sums and fields of more would not fit the shared memory."""

LANES = wp.ROWS
WARPGROUPS = 4
EACH = cdiv(wp.SHARES, WARPGROUPS)  # shares that a warpgroup prices
GIVEN = LENGTH, TOKEN, QUERIES = tuple(range(3))
DERIVED = BLOCKS, LINE, LIVE, PARTS, BASE, SLOT, LISTED, WORKER = tuple(range(3, 11))
"""Rows of the requests' table: keys, first token, queries; then blocks, where they begin on the
line, requests with blocks so far, pieces and where they begin in the plan, first slot or -1, where
its tokens begin in the list of merges, first worker."""

I32 = jnp.int32


def balanced(
    seq_lens: Int[Array, "requests"],
    query_starts: Int[Array, "starts"],
    *,
    tokens: int,
    block: int,
    workers: int,
    split_cost: int,
    interpret: object = None,
) -> wp.WorkPlan:
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


def _body(
    lens_g, starts_g, pieces_g, tasks_g, merges_g,
    *, block, workers, split_cost, tokens, chunks, simulate,
    sums, requests, prices, costs, summed, priced, based,
):  # fmt: skip
    wg, n, count = lax.axis_index("wg"), requests.shape[1], lens_g.shape[0]
    lookup = functools.partial(_lookup, simulate=simulate)
    whole, lane = (plgpu.Layout.WG_STRIDED((size,), vec_size=1) for size in (n, LANES))

    def vector(value, size=LANES):
        return plgpu.layout_cast(jnp.full((size,), value, I32), whole if size == n else lane)

    def scan(buffer, arrays):
        """Inclusive sums, in log2 steps; the buffer is two copies of zeros and the numbers."""
        size, layout = arrays[0].shape[0], whole if arrays[0].shape[0] == n else lane
        for copy in range(2):
            for k in range(len(arrays)):
                for c in range(0, size // 2, LANES // 2):
                    buffer[copy, k, pl.ds(c, LANES)] = vector(0)
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

    def meet(barrier):
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    @pl.when(wg == 0)
    def _():
        index = plgpu.broadcasted_iota(I32, (n,), 0, layout=whole)
        lens = lookup(lens_g, jnp.minimum(index, count - 1), whole)
        starts = lookup(starts_g, jnp.minimum(index, count), whole)
        queries = lookup(starts_g, jnp.minimum(index + 1, count), whole) - starts
        given = lens, starts, queries
        alive = queries > 0
        blocks = jnp.maximum(lax.div(lens + (block - 1), vector(block, n)), 1)
        blocks = jnp.where(alive, blocks, 0)
        lead = jnp.where(alive, vector(wp.START_COST, n), 0)
        ends, live = scan(sums, [blocks + lead, jnp.minimum(blocks, 1)])
        for k, x in zip(GIVEN + DERIVED[:3], (*given, blocks, ends - blocks, live), strict=True):
            requests[k] = x

    meet(summed)
    total = jnp.maximum(requests[LINE, n - 1] + requests[BLOCKS, n - 1], 1)
    even = lax.div(total + (workers - 1), I32(workers))

    def share_of(k):
        return wp.share_at(even, k)

    def cuts(line, blocks, share):
        """How often the line is cut inside a request."""
        return jnp.maximum(lax.div(line + blocks - 1, share) - lax.div(line, share), 0)

    def price(c, acc):
        at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
        line, blocks = (plgpu.load(requests.at[k, at], layout=lane) for k in (LINE, BLOCKS))
        for k in range(EACH):
            share = vector(share_of(wg + k * WARPGROUPS))
            equal = lax.div(blocks + share - 1, share)
            acc[k] += cuts(line, blocks, share) + equal * 65536
        return acc

    acc = lax.fori_loop(0, n // LANES, price, [vector(0)] * EACH)
    for k, x in enumerate(scan(prices.at[wg], acc)):
        prices[wg, 1, k, pl.ds(LANES // 2, LANES)] = x
    plgpu.commit_smem()
    live = requests[LIVE, n - 1]
    for k in range(EACH):
        i = wg + k * WARPGROUPS

        @pl.when(i < wp.SHARES)
        def _(k=k, i=i):
            both = prices[wg, 1, k, LANES // 2 + LANES - 1]
            of_line, count = both & 65535, lax.shift_right_logical(both, I32(16))
            costs[i] = wp.cost(share_of(i), of_line, split_cost)
            equal = wp.cost(share_of(i), count - live, split_cost)
            costs[wp.SHARES + i] = jnp.where(count <= workers, equal, jnp.iinfo(I32).max)

    meet(priced)
    best, least = I32(0), costs[0]
    for i in range(1, 2 * wp.SHARES):
        cost = costs[i]
        best, least = jnp.where(cost < least, i, best), jnp.minimum(cost, least)
    is_equal = (best >= wp.SHARES).astype(I32)
    share = share_of(best - is_equal * wp.SHARES)

    def either(equal, line):
        return equal * is_equal + line * (1 - is_equal)

    @pl.when(wg == 0)
    def _():
        queries, blocks, line = (
            plgpu.load(requests.at[k], layout=whole) for k in (QUERIES, BLOCKS, LINE)
        )
        size = vector(share, n)
        equal = lax.div(blocks + size - 1, size)
        parts = jnp.where(queries > 0, either(equal, cuts(line, blocks, size) + 1), 0)
        split = parts > 1
        ends = scan(sums, [parts, *(jnp.where(split, x, 0) for x in (parts, queries))])
        base, slot = ends[0] - parts, jnp.where(split, ends[1] - parts, -1)
        listed = ends[2] - jnp.where(split, queries, 0)
        found = (parts, base, slot, listed, either(base, lax.div(line, size)))
        for k, x in zip(DERIVED[3:], found, strict=True):
            requests[k] = x

    meet(based)
    pieces = requests[BASE, n - 1] + requests[PARTS, n - 1]
    of_last = jnp.where(requests[PARTS, n - 1] > 1, requests[QUERIES, n - 1], 0)
    listed = requests[LISTED, n - 1] + of_last
    live_tokens = requests[TOKEN, n - 1] + requests[QUERIES, n - 1]

    def find(key, x):
        """The last request whose ``key`` is at most ``x``."""
        r, size = vector(0), n  # a power of two
        while size > 1:
            size //= 2
            probe = jnp.minimum(r + size, n - 1)
            r = jnp.where(lookup(requests.at[key], probe, lane) <= x, probe, r)
        return r

    def select(r, *fields):
        return [lookup(requests.at[f], r, lane) for f in fields]

    def described(i):
        """The columns of ``WorkPlan.pieces`` of piece ``i``."""
        r = find(BASE, i)
        base, line, slot, length, token, queries = select(
            r, BASE, LINE, SLOT, LENGTH, TOKEN, QUERIES
        )
        size, k = vector(share), i - base
        blocks = jnp.maximum(lax.div(length + (block - 1), vector(block)), 1)
        cut = (lax.div(line, size) + k) * size - line
        parts = lax.div(blocks + size - 1, size)
        even = lax.div(blocks + parts - 1, parts)
        first = either(k * even, jnp.where(k == 0, 0, cut))
        end = jnp.minimum(either(k * even + even, cut + size), blocks)
        slot = jnp.where(slot < 0, -1, slot + k)
        return r, first, end, slot, length, token, queries

    def write_pieces(row, i):
        columns = [jnp.where(i < pieces, x, 0) for x in described(i)]
        _store(pieces_g, row, columns, simulate=simulate)

    def first_piece(w):
        base, first, parts = select(find(WORKER, w - 1), BASE, WORKER, PARTS)
        before = jnp.where(first < w, base + jnp.minimum(w - first, parts), 0)
        return jnp.where(w < workers, before, pieces)

    def write_tasks(row, w):
        begin, stop = first_piece(w), first_piece(w + 1)
        of_first = described(begin)
        columns = (begin, stop, *(of_first[f] for f in (wp.REQUEST, wp.FIRST, wp.END, wp.TOKEN)))
        columns = [jnp.where(begin < stop, x, 0) for x in columns]
        _store(tasks_g, row, columns, simulate=simulate)

    def write_merges(row, i):
        k = i - 1
        first, token, slot, parts = select(find(LISTED, k), LISTED, TOKEN, SLOT, PARTS)
        query = k - first
        columns = [jnp.where(k < listed, x, 0) for x in (slot, parts, query)]
        token = jnp.where(k < listed, token + query, k - listed + live_tokens)
        head = listed + tokens - live_tokens
        columns = [jnp.where(k < head, x, 0) for x in (*columns, token)]
        first = vector(head), *(vector(0) for _ in range(3))
        columns = [jnp.where(i == 0, x, y) for x, y in zip(first, columns, strict=True)]
        _store(merges_g, row, columns, simulate=simulate)

    chunk, before = lax.axis_index("block") * WARPGROUPS + wg, 0
    for write, count in zip((write_pieces, write_tasks, write_merges), chunks, strict=True):

        @pl.when((chunk >= before) & (chunk < before + count))
        def _(write=write, before=before):
            row = pl.multiple_of((chunk - before) * LANES, LANES)
            write(row, plgpu.broadcasted_iota(I32, (LANES,), 0, layout=lane) + row)

        before += count


def _lookup(ref, index, layout, *, simulate: bool):
    """``ref[index]``, a number for each lane."""
    if simulate:
        return jnp.take(ref[...], index)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, I32, layout=layout),
    )
    def read(_, ref, index):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, memref, vector

        def one(x):
            at = arith.index_cast(ir.IndexType.get(), vector.extract(x, [], [0]))
            return vector.broadcast(x.type, memref.load(ref, [at]))

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
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout,) * 8))
    def write(_, ref, *columns):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, memref, vector

        ((lane,),) = columns[0].layout.thread_idxs((LANES,))
        for f, x in enumerate(columns):
            memref.store(
                vector.extract(x.registers[0], [], [0]), ref,
                [lane, arith.constant(ir.IndexType.get(), f)],
            )  # fmt: skip

    write(rows, *columns)
