"""What the dense decode kernels for Hopper share: launch, arrays, the stream of pieces.

A thread block walks its pieces (``work_plan``) as one stream: of each piece the queries, then
blocks of 64 keys. ``Stream`` knows where all of that lies; ``mosaic_sm90`` and ``few_sm90`` are
the two kernels that bring it and multiply it.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.combine_sm90 import CHAINS
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROWS, Sizes
from mla_jax.pallas.mosaic_lib import WGMMA

__all__ = ["Arrays", "Stream", "launch", "parity"]

I32 = jnp.int32
F32 = jnp.float32


class Arrays(NamedTuple):
    """Arrays of a decode kernel in global memory, in the order in which it gets them."""

    layer: Any  # number of the layer, or None
    q_latent: Any  # [tokens * heads, 512]
    q_rope: Any  # [tokens * heads, 64]
    pages: Any  # [layers * pages, page, 576]
    scales: Any  # [layers]
    table: Any  # [requests, width]
    pieces: Any  # rows of ``WorkPlan.pieces``
    tasks: Any  # rows of ``WorkPlan.tasks``
    out: Any  # [tokens * heads, 512]: requests in one piece
    lse: Any  # [tokens * heads], natural logarithm
    part: Any  # [slots * tiles * 64, 512]: pieces of split requests
    part_lse: Any  # [slots, tiles, 64], base 2


def launch(
    body: Callable,
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    page_table: jax.Array,
    plan: wp.WorkPlan,
    *,
    layer: jax.Array | None,
    sizes: Sizes,
    interpret: object,
    grid_names: tuple[str, ...],
    reduction: int = 0,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Run ``body`` on ``Arrays`` in a thread block for each ``worker`` and, if named, ``tile``.

    ``cache`` are the pages and their scale, ``reduction`` the bytes for maxima and sums of the
    four warps of a warpgroup, ``options`` those of ``plgpu.kernel``.
    """
    rows, dtype, tiles = q_latent.shape[0], q_latent.dtype, sizes.tiles
    slots = plan.slots + CHAINS  # the merge reads over the last
    body, of_layer = lib.with_layer(body, layer)
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((rows, RANK), dtype),
            shape((rows,), F32),
            shape((slots * tiles * ROWS, RANK), dtype),
            shape((slots, tiles, ROWS), F32),
        ),
        grid=tuple({"worker": sizes.workers, "tile": tiles}[name] for name in grid_names),
        grid_names=grid_names,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=reduction
        ),
        **options,
    )
    pages, scale = cache
    flat = pages.reshape(-1, *pages.shape[-2:]), scale.reshape(-1)
    return kernel(*of_layer, q_latent, q_rope, *flat, page_table, plan.pieces, plan.tasks)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The pieces ``begin`` to ``end`` of a worker, of whose query rows ``tile`` has 64."""

    arrays: Arrays
    sizes: Sizes
    worker: jax.Array
    tile: jax.Array | int  # 0 where there is one
    begin: jax.Array
    end: jax.Array
    layer: jax.Array | int
    num_pages: int  # of a layer
    first_page: jax.Array | int  # of the layer

    @classmethod
    def of(cls, arrays: Arrays, sizes: Sizes, worker, tile) -> "Stream":
        """That of a running thread block."""
        begin, end = arrays.tasks[worker, wp.BEGIN], arrays.tasks[worker, wp.STOP]
        layers = arrays.scales.shape[0]
        layer, num_pages = lib.layer_of(arrays.layer, layers), arrays.pages.shape[0] // layers
        return cls(
            arrays=arrays, sizes=sizes, worker=worker, tile=tile, begin=begin, end=end,
            layer=layer, num_pages=num_pages, first_page=layer * num_pages,
        )  # fmt: skip

    def piece(self, p, field: int):
        """A column of ``WorkPlan.pieces``."""
        return self.arrays.pieces[p, field]

    def task(self, field: int):
        """A column of ``WorkPlan.tasks``: one read less than that of the first piece."""
        return self.arrays.tasks[self.worker, field]

    def blocks_of(self, p):
        """Blocks of keys of piece ``p``."""
        return self.piece(p, wp.END) - self.piece(p, wp.FIRST)

    def row_of(self, p):
        """The first query row of piece ``p``."""
        return self.row_at(self.piece(p, wp.TOKEN))

    def row_at(self, token):
        """The first query row of the tile, in a piece whose first token is ``token``."""
        return pl.multiple_of(token * self.sizes.heads + self.tile * ROWS, 8)

    def live_rows(self, p):
        """Query rows of piece ``p`` in the tile."""
        return jnp.clip(self.piece(p, wp.QUERIES) * self.sizes.heads - self.tile * ROWS, 0, ROWS)

    def seen_by_all(self, p):
        """Keys that every query of piece ``p`` sees."""
        return self.piece(p, wp.LENGTH) - self.piece(p, wp.QUERIES) + 1

    def mask(self, x: jax.Array, p, block, *, keys: int) -> jax.Array:
        """Scores of a block of piece ``p``, minus infinity where a row may not see a key.

        ``keys`` is their axis, the other one is that of the rows.
        """
        seen = self.piece(p, wp.LENGTH) - block * BLOCK
        key = plgpu.broadcasted_iota(I32, x.shape, keys, layout=WGMMA)
        if self.sizes.queries > 1:
            row = plgpu.broadcasted_iota(I32, x.shape, 1 - keys, layout=WGMMA) + self.tile * ROWS
            seen = seen - self.piece(p, wp.QUERIES) + 1
            for k in range(1, self.sizes.queries):
                seen = seen + (row >= k * self.sizes.heads).astype(I32)
        return jnp.where(key < seen, x, -jnp.inf)

    def ids_of(self, request, columns: list) -> list:
        """Page ids of a request as the table has them: nothing waits for them yet."""
        table = self.arrays.table
        return [table[request, jnp.clip(c, 0, table.shape[1] - 1)] for c in columns]

    def pages_of(self, ids) -> list:
        """Numbers of pages in the cache of all layers."""
        return [self.first_page + jnp.clip(i, 0, self.num_pages - 1) for i in ids]


def parity(x):
    """0 or 1: of two buffers that take turns."""
    return lax.rem(x, jnp.int32(2))
