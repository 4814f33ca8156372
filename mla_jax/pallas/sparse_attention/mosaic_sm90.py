"""Sparse absorbed decode and prefill on Hopper: Pallas Mosaic GPU.

Computes ``ref.attend`` for rows of 576 or 512 columns, the first 512 of which are the value, over
the slots of one cache or of two, in one softmax. A thread block owns 64 heads of one piece of a
token at a time (``line_plan``). Four warpgroups walk its blocks of 64 keys as one stream, over
records::

  wg 0 scores   S = Q K^T, softmax, P -> shared memory
  wg 1 feed     gathers rows, widens records: the keys of the blocks to come (``feed_sm90``)
  wg 2 left     O[:, :256] += P V[:, :256]
  wg 3 right    O[:, 256:] += P V[:, 256:]

  feed -> full -> scores -> p_ready -> left, right -> freed -> feed

Elements need no widening. There warpgroups 0 and 1 have every other block each: they copy its rows
and score them (``pair_sm90``).

Two blocks of keys lie in shared memory; with 576 columns ``P`` takes the place of the rotary
columns of its own block, which were read by then. The result of a piece leaves through the slot of
its last block. The next token's queries are loaded when the last scores of this one are done.

The bound of a block: 2176 tensor-core cycles, and some 2450 of shared memory (all of ``Q`` is read
from there). ``docs/kernels/sparse_attention.md`` has the arithmetic.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import RECORD_FORMATS
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode.combine_sm90 import CHAINS
from mla_jax.pallas.sparse_attention.feed_sm90 import Feed
from mla_jax.pallas.sparse_attention.halves_sm90 import Half
from mla_jax.pallas.sparse_attention.line_plan import Line
from mla_jax.pallas.sparse_attention.pair_sm90 import Pair
from mla_jax.pallas.sparse_attention.rows_sm90 import Scope
from mla_jax.pallas.sparse_attention.scores_sm90 import Scores
from mla_jax.pallas.sparse_attention.stream_sm90 import ROWS, VALUE, Buffers, Stream, scratch
from mla_jax.types import cdiv

__all__ = ["ROWS", "VALUE", "attend", "scratch"]

REGISTERS_OF_FEED = 112  # of a thread; the launch gives 128 each

F32 = jnp.float32


@lib.lowered_once("scopes", "line", "heads", "scale", "early_launch", "interpret")
def attend(
    queries: tuple[jax.Array, ...],
    layers: tuple[jax.Array, ...],
    first_slots: tuple[jax.Array, ...],
    lists: tuple[jax.Array, ...],
    pages: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    *,
    scopes: tuple[Scope, ...],
    line: Line,
    heads: int,
    scale: float,
    early_launch: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``out`` [tokens * heads, 512] and ``lse`` [tokens * heads] of tokens in one piece, and the
    same ``[slots * tiles * 64, 512]``, base-2 ``[slots, tiles, 64]`` of the other pieces.

    Queries are ``[tokens * heads, 512]`` and, of columns behind the value, ``[tokens * heads,
    64]``; ``heads`` is a multiple of 8. ``layers`` are numbers, ``[1]`` of each stack among the
    caches; ``first_slots`` is that of the line, if anything is split. ``pages`` are the caches, all
    layers of each, ``[pages, bytes]`` of records and ``[rows, width]`` of elements. ``sinks`` are
    none, or one array of as many as there are rows of tiles; they are for tokens in one piece. Rows
    of tokens in several pieces are left as they were allocated.
    """
    count, width, dtype = queries[0].shape[0], sum(q.shape[1] for q in queries), queries[0].dtype
    tiles = cdiv(heads, ROWS)
    slots = line.slots + CHAINS  # the merge reads over the last
    body = functools.partial(
        _body,
        scopes=scopes,
        line=line,
        heads=heads,
        scale=scale * math.log2(math.e),
        early_launch=early_launch,
        simulate=interpret is not None,
        operands=len(queries),
    )
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(
            shape((count, VALUE), dtype),
            shape((count,), F32),
            shape((slots * tiles * ROWS, VALUE), dtype),
            shape((slots, tiles, ROWS), F32),
        ),
        scratch_types=scratch(dtype, width, scopes[0].format),
        grid=(line.workers, tiles),  # tiles of a worker run side by side: one read of its rows
        grid_names=("worker", "tile"),
        num_threads=4,
        thread_name="wg",
        kernel_name="mla_sparse",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return kernel(*queries, *layers, *first_slots, *lists, *pages, *sinks)


def _body(*refs, scopes, line, heads, scale, early_launch, simulate, operands, **buffers) -> None:
    """The roles of the four warpgroups, on their operands and the ``scratch``."""
    wg = lax.axis_index("wg")
    facts = {"scopes": scopes, "line": line, "heads": heads, "simulate": simulate}
    of, b = Stream.of(refs, **facts, operands=operands), Buffers(**buffers)
    feed = Feed(
        scopes=of.scopes, lists=of.lists, pages=of.pages, layers=of.layers, start=of.start,
        stop=of.stop, keys=(b.left, b.right), rotary=b.weights, marks=b.marks, full=b.full,
        freed=b.freed, simulate=simulate,
    )  # fmt: skip
    scorer = {"stream": of, "buffers": b, "scale": scale}
    if scopes[0].format in RECORD_FORMATS:
        pl.when(wg == 0)(Scores(**scorer).run)
        pl.when(wg == 1)(lambda: _feed(feed))
    else:
        pl.when(wg < 2)(lambda: Pair(**scorer, slot=wg, feed=feed).run())
    for i, is_right in ((2, False), (3, True)):
        half = Half(stream=of, buffers=b, is_right=is_right, early_launch=early_launch)
        pl.when(wg == i)(half.run)


def _feed(feed: Feed) -> None:
    """Warpgroup 1 over records."""
    plgpu.set_max_registers(REGISTERS_OF_FEED, action="decrease")
    feed.run()
