"""Sums over the cards by a kernel that reads the other cards' memory, to try in place of NCCL's.

XLA puts no sum of NCCL's into a CUDA graph, so a decode step over several cards is cut at every
sum. A Mosaic kernel can be in a graph: compiled for four H200, V3's decode step is one. Compiled
without a GPU only; it has not been seen to run, so no step has it (``card_trials --trials
peer_sums``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.model import linear, moe, sharding
from mla_jax.placement import SHARDS
from mla_jax.types import Array

__all__ = ["MOST_ROWS", "by_peers", "sums_by_peers"]

MOST_ROWS, COLUMNS = 64, 256
"""Of what is summed by this kernel; columns of a thread block."""


def sums_by_peers(x: Array) -> Array:
    """``sharding.summed`` of ``[rows, columns]``: read where it is, added in float32.

    Before the kernel starts, JAX's launch waits for all cards. Before it ends, each block waits
    until all cards have read its columns: they may be overwritten from then on.
    """
    if x.ndim != 2 or x.shape[0] > MOST_ROWS or x.shape[1] % COLUMNS:
        return sharding.summed(x)
    cards = lax.axis_size(SHARDS)

    def body(mine, out, read):
        here = lax.axis_index(SHARDS)
        columns = pl.ds(lax.axis_index("blocks") * COLUMNS, COLUMNS)
        total = jnp.zeros((x.shape[0], COLUMNS), jnp.float32)
        for card in range(cards):  # in the same order on each: all get the same bits
            theirs = plgpu.remote_ref(mine, {SHARDS: card})
            total += theirs[:, columns].astype(jnp.float32)
        out[:, columns] = total.astype(x.dtype)
        for step in range(1, cards):
            other = {SHARDS: lax.rem(here + step, cards)}
            pl.semaphore_signal(read, device_id=other, device_id_type=pl.DeviceIdType.MESH)
        pl.semaphore_wait(read, cards - 1)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // COLUMNS,),
        grid_names=("blocks",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    return run(x)


@contextmanager
def by_peers() -> Iterator[None]:
    """Programs that are traced inside have these sums."""
    moe.summed = linear.summed = sums_by_peers
    try:
        yield
    finally:
        moe.summed = linear.summed = sharding.summed
