"""Paged rows to contiguous rows on Hopper: Pallas Mosaic GPU, one small unit a thread.

Computes ``ref.gather_latent``. A warp has 64 neighbouring units of 8 elements of the result, two
a thread, and each of its lanes finds the place of one row in the cache::

  row -> search in row_starts -> first -> page table -> shuffle -> load -> [dequantise] -> store

No warp waits for another, nor for its stores; no work list is made. Rows that no request fills
are zeros. The bound is the copy bandwidth of the chip: ``docs/kernels/cache_io.md``.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.cache_io import units_sm90 as units
from mla_jax.types import Array, Float, Int

__all__ = ["gather"]


@lib.lowered_once("rows", "dtype", "interpret")
def gather(
    pages: Float[Array, "*layers pages page row"],
    scale: Float[Array, "*layers"],
    page_table: Int[Array, "requests width"],
    first: Int[Array, "requests"],
    row_starts: Int[Array, "starts"],
    *,
    rows: int,
    dtype: DTypeLike,
    layer: Int[Array, ""] | None = None,
    interpret: object = None,
) -> Float[Array, "{rows} row"]:
    """``ref.gather_latent``; values are scaled where ``dtype`` is not the stored one."""
    simulate = interpret is not None
    page, width = pages.shape[-2:]
    body, of_layer = lib.with_layer(functools.partial(_body, page=page, simulate=simulate), layer)
    kernel = lib.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(1 if simulate else units.blocks(rows, width),),
        grid_names=("block",),
        kernel_name="mla_gather",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    operands = pages.reshape(-1, width), scale.reshape(-1), page_table, first, row_starts
    return kernel(*of_layer, *operands)


def _body(layer_g, cache_g, scale_g, table_g, first_g, starts_g, out_g, *, page, simulate):
    rows, width = out_g.shape
    requests, columns = table_g.shape
    num_pages = cache_g.shape[0] // page // scale_g.shape[0]
    layer = lib.layer_of(layer_g, scale_g.shape[0])
    scale, first_page = scale_g[layer], layer * num_pages

    def place_of(row, r):
        """Where ``row`` of the result is stored; ``r`` requests end before it."""
        mine = jnp.minimum(r, requests - 1)
        position = row - starts_g[mine] + first_g[mine]
        wanted = (r < requests) & (row >= starts_g[0]) & (row < rows)
        wanted &= (position >= 0) & (position < columns * page)
        column = lax.div(jnp.where(wanted, position, 0), jnp.int32(page))
        page_id = first_page + jnp.clip(table_g[mine, column], 0, num_pages - 1)
        return jnp.where(wanted, page_id * page + position - column * page, -1)

    def decode(x):
        if x.dtype == out_g.dtype:
            return x
        x = x.astype(jnp.float16).astype(jnp.float32) * scale  # no e4m3 -> bfloat16
        return x.astype(out_g.dtype)

    if simulate:
        ends = starts_g[pl.ds(1, requests)]

        @pl.loop(0, rows)
        def _(row):
            place = place_of(row, jnp.sum((ends <= row).astype(jnp.int32)))
            x = decode(cache_g[jnp.maximum(place, 0)])
            out_g[row] = jnp.where(place >= 0, x, 0).astype(x.dtype)

        return
    units.keep(table_g, first_g, starts_g)
    block, thread = lax.axis_index("block"), units.thread()
    spots = [units.spot(block, thread, i, width) for i in range(units.EACH)]
    top = units.of_lane(spots[0][0], jnp.int32(0))  # first row of the warp
    mine = top + (thread & 31)
    place = place_of(mine, units.owner(starts_g, mine))
    places = [units.of_lane(place, row - top) for row, _ in spots]
    pieces = [
        units.load(cache_g, place, unit) for place, (_, unit) in zip(places, spots, strict=True)
    ]
    for x, (row, unit) in zip(pieces, spots, strict=True):

        @pl.when(row < rows)
        def _(x=x, row=row, unit=unit):
            units.store(decode(x), out_g, row, unit)
