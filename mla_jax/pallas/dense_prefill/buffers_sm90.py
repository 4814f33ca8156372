"""What a thread block of the prefill kernel holds: sizes, shared memory, barriers."""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_prefill import tile_plan as tp

__all__ = ["CHUNK", "HALF", "HEAD", "Buffers", "Sizes", "scratch"]

HALF = tp.ROWS // 2  # queries of a warpgroup
CHUNK = 64  # columns of one 16-bit buffer in shared memory
HEAD = tp.FIELDS - 1  # column of a tile's facts in shared memory that holds its head
STEPS = 2  # tiles whose facts are in shared memory
DRAWS = 2  # numbers drawn: one may be drawn before a slow warp has read what came before

K_FREE, Q_FREE, V_FREE = 4, 10, 12  # first hardware barriers; lib.TURNS are 8 and 9
BOTH, ONE = 2 * 128 + 32, 128 + 32  # threads at such a barrier: warpgroups, and the loading warp


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the kernel is compiled for, besides dtypes and array shapes."""

    nope: int
    rope: int
    v: int
    block: int  # keys of one step
    stages: int  # blocks in shared memory, a power of two
    heads_together: int  # heads whose tiles are interleaved: their keys share the L2 cache
    heads_last: int  # heads scheduled last, at least: with many tiles, expensive ones come first
    workers: int
    held: int  # chunks of 64 columns of the queries that stay in registers
    dynamic: bool  # a thread block takes the next tile when it is free; else one in ``workers``

    @property
    def hardware(self) -> bool:
        """Whether buffers are freed by hardware barriers, not by those in shared memory."""
        return self.held > 0

    @property
    def k_chunks(self) -> int:
        return (self.nope + self.rope) // CHUNK

    @property
    def v_chunks(self) -> int:
        return self.v // CHUNK


def scratch(sizes: Sizes, dtype: DTypeLike, out_dtype: DTypeLike, simulate: bool) -> dict:
    """Shared memory and barriers of one thread block.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """

    def views(*shape: int, dtype=dtype):
        """``[..., rows, 128 bytes]`` for products and registers, and to start at any row."""
        shape = *shape, 128 // jnp.dtype(dtype).itemsize
        swizzle = plgpu.SwizzleTransform(128)
        return [
            plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((n, shape[-1])), swizzle))
            for n in (8, 1)
        ]

    def buffer(*shape: int):
        if simulate:  # the interpreter keeps the views of a union apart
            return plgpu.SMEM((*shape, CHUNK), dtype)
        return plgpu.RefUnion(*views(*shape))

    stages = sizes.stages
    buffers = {
        "q": buffer(2, sizes.k_chunks, HALF),
        "k": buffer(stages, sizes.k_chunks, sizes.block),
        "v": buffer(stages, sizes.v_chunks, sizes.block),
        "facts": plgpu.SMEM((STEPS + DRAWS, tp.FIELDS), jnp.int32),
        "q_full": lib.barrier(sizes.k_chunks, 2),  # copy engine -> one warpgroup
        "k_full": lib.barrier(sizes.k_chunks, stages),  # copy engine -> both
        "v_full": lib.barrier(sizes.v_chunks, stages),  # copy engine, or loader -> both
        "v_partial": lib.barrier(sizes.v_chunks),  # copy engine -> loader: rows to clear
        "facts_full": lib.barrier(count=STEPS),  # loader -> both
        "facts_free": lib.barrier(2, STEPS),  # both -> loader
        "wanted": lib.barrier(),  # loader -> warp that draws
        "drawn": lib.barrier(2),  # warp that draws, and all -> all: the number of the next tile
    }
    if simulate or not sizes.hardware:
        buffers["q_free"] = lib.barrier(count=2)  # a warpgroup -> loader: its last scores are there
        buffers["k_free"] = lib.barrier(2, stages)  # both -> loader
        buffers["v_free"] = lib.barrier(2, stages)  # both -> loader
    if simulate:
        buffers["o"] = plgpu.SMEM((2, HALF, sizes.v), out_dtype)
        buffers["small"] = plgpu.SMEM((2, HALF), jnp.float32)
        buffers["spill"] = plgpu.SMEM((2, HALF, sizes.block), dtype)
    return buffers


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Shared memory and barriers of a running thread block, under their names in ``scratch``.

    Queries, keys and values have two views of the same bytes: one for products and registers,
    and ``_rows`` for the copy engine, which may begin at any row.
    """

    sizes: Sizes
    simulate: bool
    q: Any
    q_rows: Any
    k: Any
    k_rows: Any
    v: Any
    v_rows: Any
    facts: Any
    q_full: Any
    k_full: Any
    v_full: Any
    v_partial: Any
    facts_full: Any
    facts_free: Any
    wanted: Any
    drawn: Any
    q_free: Any = None
    k_free: Any = None
    v_free: Any = None
    o: Any = None
    small: Any = None
    spill: Any = None

    @classmethod
    def of(cls, sizes: Sizes, simulate: bool, **refs: Any) -> "Buffers":
        for name in "qkv":
            views = refs[name]
            refs[name], refs[f"{name}_rows"] = (views, views) if simulate else views
        return cls(sizes=sizes, simulate=simulate, **refs)

    def slot(self, g):
        """Of block ``g`` of the stream."""
        return g & (self.sizes.stages - 1)

    def step_slot(self, t):
        """Of the facts of tile ``t``."""
        return t & (STEPS - 1)

    def draw_slot(self, t):
        """Of the number drawn during tile ``t``."""
        return STEPS + (t & (DRAWS - 1))

    def free(self, what: str, i) -> None:
        """Products that read buffer ``i`` are complete."""
        barriers, first, threads = self._free(what)
        if barriers is None:
            lib.arrive(first + i, threads)
        else:
            plgpu.barrier_arrive(barriers.at[i])

    def await_free(self, what: str, i) -> None:
        """Once for each ``free`` of each warpgroup: none can run ahead, for it awaits a refill."""
        barriers, first, threads = self._free(what)
        if barriers is None:
            lib.sync(first + i, threads)
        else:
            plgpu.barrier_wait(barriers.at[i])

    def _free(self, what: str) -> tuple[Any, int, int]:
        return {
            "q": (self.q_free, Q_FREE, ONE),
            "k": (self.k_free, K_FREE, BOTH),
            "v": (self.v_free, V_FREE, BOTH),
        }[what]
