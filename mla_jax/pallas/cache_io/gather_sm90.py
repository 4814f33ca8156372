"""Paged rows to contiguous rows on Hopper: Pallas Mosaic GPU, bulk copies through shared memory.

Computes ``ref.gather_latent``. A thread block owns ``share`` rows of the result and walks them
part by part: a part is ``part`` aligned rows of one page, contiguous in the cache and in the
result, or as many rows that nobody fills. Parts pass through a ring of ``stages`` slots::

  ahead   place(i + stages) -> bulk load ---------------------------------.
  now     place(i) -> wait full -> [dequantise] -> bulk store -> slot of i - 1 is free

Whole parts are loaded; the first and the last part of a request are stored in powers of two.
The place of a part follows from its row alone: a search in ``row_starts`` finds the first
owner, a step loop the next ones; no work list is made.

The bound is the copy bandwidth of the chip: ``docs/kernels/cache_io.md``.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.types import Array, Float, Int, cdiv

__all__ = ["gather", "owner", "scratch"]

I32 = jnp.int32
PROBES = 15  # of one round of the search; their loads overlap
GROUP = 8  # rows that pass the registers together: few, hence many thread blocks side by side
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a contiguous copy a bulk copy


class Cursor(NamedTuple):
    """A row of the result and who fills it; ``request`` is the number of requests if nobody."""

    row: jax.Array
    request: jax.Array
    end: jax.Array  # first row behind the request
    shift: jax.Array  # position minus row, in the request


def scratch(stored: DTypeLike, dtype: DTypeLike, *, part: int, row: int, stages: int) -> dict:
    """Shared memory and barriers of one thread block."""
    buffers = {
        "ring": plgpu.SMEM((stages, part, row), stored),
        "full": plgpu.Barrier(num_barriers=stages),  # copy engine -> warpgroup
    }
    if jnp.dtype(stored) != jnp.dtype(dtype):
        buffers["wide"] = plgpu.SMEM((min(stages, 2), part, row), dtype)  # on its way out
    return buffers


def gather(
    pages: Float[Array, "pages page row"],
    scale: Float[Array, ""],
    page_table: Int[Array, "requests width"],
    first: Int[Array, "requests"],
    row_starts: Int[Array, "starts"],
    *,
    rows: int,
    dtype: DTypeLike,
    part: int,
    stages: int,
    share: int,
    interpret: object = None,
) -> Float[Array, "{rows} row"]:
    """``ref.gather_latent``; values are scaled where ``dtype`` is not the stored one.

    ``part`` is a power of two that divides the page.
    """
    row = pages.shape[2]
    kernel = lib.kernel(
        functools.partial(_body, rows=rows, part=part, stages=stages, share=share),
        out_type=jax.ShapeDtypeStruct((rows, row), dtype),
        scratch_types=scratch(pages.dtype, dtype, part=part, row=row, stages=stages),
        grid=(cdiv(rows, share),),
        grid_names=("worker",),
        kernel_name="mla_gather",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(pages, scale.reshape(1), page_table, first, row_starts)


def owner(starts_g, row, requests: int):
    """How many of ``starts[1:]`` are at most ``row``: rounds of overlapping loads."""
    low, span = jnp.int32(0), requests
    while span:
        step = cdiv(span + 1, PROBES + 1)
        passed = jnp.int32(0)
        for j in range(1, PROBES + 1):
            at = low + j * step
            below = starts_g[jnp.minimum(at, requests)] <= row
            passed += ((at <= requests) & below).astype(I32)
        low, span = low + passed * step, step - 1
    return low


def _body(
    pages_g, scale_g, table_g, first_g, starts_g, out_g,
    *, rows, part, stages, share, ring, full, wide=None,
):  # fmt: skip
    num_pages, page, _ = pages_g.shape
    requests, width = table_g.shape
    low = lax.axis_index("worker") * share
    high = jnp.minimum(low + share, rows)
    lead = starts_g[0]  # rows before it are nobody's
    late = min(stages - 1, 1)  # stores that may still read their slot

    def slot(i):
        return lax.rem(i, jnp.int32(stages))

    def at_request(row, r):
        last = jnp.minimum(r, requests - 1)
        return Cursor(row, r, starts_g[last + 1], first_g[last] - starts_g[last])

    def behind(c: Cursor, n) -> Cursor:
        """The cursor ``n`` rows on."""
        return lax.while_loop(
            lambda c: (c.request < requests) & (c.end <= c.row),
            lambda c: at_request(c.row, c.request + 1),
            c._replace(row=c.row + n),
        )

    def part_of(c: Cursor):
        """``(live, first, count)`` of the rows of a part that are wanted."""
        owned = (c.row >= lead) & (c.request < requests)
        position = c.row + c.shift
        end = jnp.where(c.row < lead, lead, jnp.where(owned, c.end, high))
        offset = jnp.where(owned, position & (part - 1), 0)
        live = owned & (position >= 0) & (position < width * page)
        return live, offset, jnp.minimum(jnp.minimum(end, high) - c.row, part - offset)

    def load(i, c: Cursor, live, offset):
        @pl.when(live)
        def _():
            position = c.row + c.shift - offset
            column = lax.div(position, jnp.int32(page))
            page_id = jnp.clip(table_g[c.request, column], 0, num_pages - 1)
            begin = pl.multiple_of(position - column * page, part)
            plgpu.copy_gmem_to_smem(
                pages_g.at[page_id, pl.ds(begin, part)],
                ring.at[slot(i)],
                full.at[slot(i)],
                oob_mode=IN_BOUNDS,
            )

    def ahead(i, c: Cursor) -> Cursor:
        live, offset, n = part_of(c)
        load(i, c, live & (c.row < high), offset)
        return behind(c, n)

    def store_plain(i, c: Cursor, live, offset, n):
        @pl.when(live)
        def _():
            plgpu.barrier_wait(full.at[slot(i)])

        @pl.when(jnp.logical_not(live))
        def _():
            ring[slot(i)] = jnp.zeros(ring.shape[1:], ring.dtype)
            plgpu.commit_smem()

        lib.store_part(ring.at[slot(i)], offset, out_g, c.row, n, most=part)
        plgpu.wait_smem_to_gmem(late, wait_read_only=True)

    def store_wide(i, c: Cursor, live, offset, n):
        out = wide.at[lax.rem(i, jnp.int32(late + 1))]
        layout = plgpu.Layout.WG_STRIDED((GROUP, ring.shape[2]), vec_size=4)
        plgpu.wait_smem_to_gmem(late, wait_read_only=True)

        @pl.when(live)
        def _():
            plgpu.barrier_wait(full.at[slot(i)])
            scale = scale_g[0]

            @pl.loop(0, part // GROUP)
            def _(j):
                rows_j = pl.ds(j * GROUP, GROUP)
                x = plgpu.load(ring.at[slot(i), rows_j], layout=layout)
                x = x.astype(jnp.float16).astype(jnp.float32) * scale  # no e4m3 -> bfloat16
                out[rows_j] = x.astype(out.dtype)

        @pl.when(jnp.logical_not(live))
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)

        plgpu.commit_smem()  # also: every thread has read the slot
        lib.store_part(out, offset, out_g, c.row, n, most=part)

    store = store_plain if wide is None else store_wide

    def step(carry):
        i, now, then = carry
        live, offset, n = part_of(now)
        store(i, now, live, offset, n)
        free = i - late if wide is None else i  # the part whose slot may be refilled
        then = lax.cond(free >= 0, lambda: ahead(free + stages, then), lambda: then)
        return i + 1, behind(now, n), then

    now = at_request(low, owner(starts_g, low, requests))
    then = now
    for i in range(stages):
        then = ahead(jnp.int32(i), then)
    lax.while_loop(lambda carry: carry[1].row < high, step, (jnp.int32(0), now, then))
    plgpu.wait_smem_to_gmem(0)
