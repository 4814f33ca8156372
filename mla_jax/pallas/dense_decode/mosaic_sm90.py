"""Dense absorbed decode on Hopper: Pallas Mosaic GPU, queries in registers.

Computes ``ref.dense_decode`` for rank 512, rope 64. A thread block owns 64 query rows of one
piece of a request at a time (``work_plan``): rows are ``(query, head)`` pairs, so few heads
and several queries share a tile. Three warpgroups walk the piece in blocks of 64 keys::

  wg 0 scores   S = Q K^T, softmax, P -> shared memory; columns 0..447 of Q are the register
                operand of its products, 448..575 stay in shared memory
  wg 1 left     O[:, :256] += P V[:, :256]    loads Q and K columns 0..255
  wg 2 right    O[:, 256:] += P V[:, 256:]    loads columns 256..511, the rotary columns, Q's tail

Queries and blocks of all pieces of a block form one stream through a ring of three slots, so
the next piece is on its way while the present one ends::

  slot   0   1   2   0   1   2   0   1        Q of piece p, its blocks, Q of p + 1, ...
         Q   k0  k1  k2  k3  Q'  k0' k1'

  scores      wait full -> QK(i+1) -> softmax -> P ----.
                |             `-- go(i) -> left:  PV(i) -> consumed -> reload slot
                |                            `-- issued(i) -> right: the same
                `-- P_ready(i), behind the first products of QK(i+1)

Scores read the left half of a slot first, so its products are queued first too: it is free, and
loaded again, half of a ``PV`` sooner than the right one.

Bytes of an e4m3 cache come into the slot that their keys will have, two elements ahead. The
halves widen them while their products run (``widen_sm90``), scores the rotary columns under the
first products of a block; the scale goes into factors.

The bound: 64 rows need 2176 tensor-core cycles a block (QK 1152, PV 1024), and 73,728 bytes.
With all of Q in shared memory its traffic alone would take 2368 cycles; so 232 KB, 1856.
``docs/kernels/dense_decode.md`` holds the measurements.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false

import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.pallas.dense_decode.buffers_sm90 import Buffers, scratch
from mla_jax.pallas.dense_decode.halves_sm90 import Half
from mla_jax.pallas.dense_decode.scores_sm90 import Scores
from mla_jax.pallas.dense_decode.sizes_sm90 import Sizes
from mla_jax.pallas.dense_decode.stream_sm90 import Arrays, Stream, launch

__all__ = ["attend"]


@lib.lowered_once("sizes", "scale", "defer", "prefetch", "early_launch", "interpret")
def attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array,
    cache_scale: jax.Array,
    page_table: jax.Array,
    plan: wp.WorkPlan,
    *,
    layer: jax.Array | None,
    sizes: Sizes,
    scale: float,
    defer: bool,
    prefetch: bool,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``out`` [tokens * heads, 512] and ``lse`` [tokens * heads] of requests in one piece, and
    the same ``[slots * tiles * 64, 512]``, base-2 ``[slots, tiles, 64]`` of the other pieces.

    Queries are ``[tokens * heads, columns]``; ``cache_scale`` counts where pages are e4m3. Rows
    that no piece of a whole request covers are left as they were allocated.
    """
    simulate, quantised = interpret is not None, pages.dtype == widen.STORED
    body = functools.partial(
        _body,
        sizes=sizes,
        scale=scale * math.log2(math.e),
        defer=defer,
        prefetch=prefetch,
        early_launch=early_launch,
        simulate=simulate,
        quantised=quantised,
    )
    cache = pages, cache_scale
    return launch(
        body, q_latent, q_rope, cache, page_table, plan,
        layer=layer, sizes=sizes, interpret=interpret, num_threads=3,
        scratch_types=scratch(q_latent.dtype, sizes.copies, simulate, quantised),
        grid_names=("worker", "tile"),  # tiles of a worker run side by side: one read of its keys
        kernel_name="mla_dense_decode",
    )  # fmt: skip


def _body(
    *arrays, sizes, scale, defer, prefetch, early_launch, simulate, quantised, **refs
) -> None:
    """The roles of the three warpgroups, on ``Arrays`` and the ``scratch``."""
    wg, worker, tile = (lax.axis_index(n) for n in ("wg", "worker", "tile"))
    of = Stream.of(Arrays(*arrays), sizes, worker, tile)
    buffers = Buffers.of(simulate, quantised, **refs)
    pl.when(wg == 0)(Scores(stream=of, buffers=buffers, scale=scale, defer=defer).run)
    for i, is_right in ((1, False), (2, True)):
        half = Half(
            stream=of, buffers=buffers, is_right=is_right,
            defer=defer, prefetch=prefetch, early_launch=early_launch,
        )  # fmt: skip
        pl.when(wg == i)(half.run)
