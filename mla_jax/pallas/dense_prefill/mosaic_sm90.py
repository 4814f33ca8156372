"""Expanded prefill on Hopper: Pallas Mosaic GPU, two warpgroups of queries and a loader.

Computes ``ref.dense_prefill``. A tile is 128 queries of one request and one head; each of two
warpgroups owns 64 of them and the third loads. Keys are read where the up-projection left them
(``kv [keys, heads, nope + v]``) and the shared rotary key from its own array::

  scores, values   S(j+1) = Q K(j+1)^T, then O += P(j) V(j): two groups of products; the
                   softmax of S(j+1) runs under the second and under the other's products
  loader           tiles of a thread block are one stream: K(g+1), V(g), K(g+2), ...

The two warpgroups take turns in issuing products: without, they drift into step, and the tensor
cores wait while both are in their softmax. A row's weights are relative to a maximum that may lag
behind, so that O is seldom rescaled. The first scores of a tile are issued behind the last values
of the tile before, whose result goes from registers to memory under them. Some columns of the
queries may stay in registers, which relieves shared memory.

Tiles begin at the first query of their request, and blocks at its first key: a view of shared
memory tiled by single rows lets the copy engine start anywhere. So the bits of a request do not
depend on its neighbours. The bound: 2560 tensor-core cycles for 128 keys. ``tile_plan`` orders
the tiles, ``loader_sm90`` brings what they need into the ``buffers_sm90``, ``attention_sm90``
multiplies, ``softmax_sm90`` is between the products, ``steps_sm90`` holds the instructions that
Pallas lacks, and ``docs/kernels/dense_prefill.md`` the measurements.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportAbstractUsage=false
# pyright: reportAssignmentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.dense_prefill.attention_sm90 import Attention
from mla_jax.pallas.dense_prefill.buffers_sm90 import Buffers, Sizes, scratch
from mla_jax.pallas.dense_prefill.loader_sm90 import Loader

__all__ = ["attend"]

I32 = jnp.int32
F32 = jnp.float32


@lib.lowered_once("sizes", "scale", "causal", "out_dtype", "interpret")
def attend(
    q: jax.Array,
    kv: jax.Array,
    k_rope: jax.Array,
    plan: tp.TilePlan,
    *,
    sizes: Sizes,
    scale: float,
    causal: bool,
    out_dtype: DTypeLike,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """``out`` [tokens, heads, v] and ``lse`` [tokens, heads] over the tiles of a plan.

    At least 64 tokens and ``sizes.block`` keys. ``scale > 0``.
    """
    tokens, heads, _ = q.shape
    simulate = interpret is not None
    body = functools.partial(
        _body, sizes=sizes, scale=scale * math.log2(math.e), causal=causal, simulate=simulate
    )
    shape = jax.ShapeDtypeStruct
    kernel = lib.kernel(
        body,
        out_type=(shape((tokens, heads, sizes.v), out_dtype), shape((tokens, heads), F32)),
        scratch_types=scratch(sizes, q.dtype, out_dtype, simulate),
        grid=(sizes.workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_dense_prefill",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    drawn = jax.new_ref(jnp.zeros((1,), I32))
    return kernel(q, kv, k_rope, plan.tiles, plan.counts, drawn)


def _body(
    q_g, kv_g, rope_g, tiles_g, counts_g, drawn_g, out_g, lse_g,
    *, sizes, scale, causal, simulate, **refs,
) -> None:  # fmt: skip
    """The roles of the three warpgroups."""
    wg, worker = lax.axis_index("wg"), lax.axis_index("worker")
    buffers, heads = Buffers.of(sizes, simulate, **refs), q_g.shape[1]
    with_keys, in_all = counts_g[0], counts_g[1]
    attention = Attention(
        wg=wg, buffers=buffers, out=out_g, lse=lse_g, dtype=q_g.dtype, scale=scale, causal=causal
    )
    loader = Loader(
        buffers=buffers, worker=worker, q=q_g, kv=kv_g, k_rope=rope_g, tiles=tiles_g,
        with_keys=with_keys, drawn=drawn_g,
    )  # fmt: skip

    @pl.when(wg < 2)
    def _():
        attention.run()
        attention.clear(tiles_g, with_keys * heads + worker, in_all * heads)

    pl.when(wg == 2)(loader.run)
