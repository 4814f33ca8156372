"""What a thread block of the main decode kernel holds: shared memory and barriers."""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import widen_sm90 as widen
from mla_jax.pallas.dense_decode.sizes_sm90 import BLOCK, RANK, ROPE, ROWS

__all__ = ["ALPHA", "HALF", "INVERSE", "LSE", "SLOTS", "TAIL", "Buffers", "place", "scratch"]

HALF = RANK // 2
TAIL = 64  # latent columns of Q that stay in shared memory, beside the rotary ones
SLOTS = 3
ALPHA, INVERSE, LSE = 0, SLOTS, SLOTS + 2  # rows of the statistics buffer


def scratch(dtype, copies: int, simulate: bool, quantised: bool = False) -> dict:
    """Shared memory and barriers of one thread block; an element of keys comes in ``copies``.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    parts = 1 if quantised else copies

    apart = simulate and quantised  # the interpreter takes a union as one place, not as slots

    def keys(slots, columns):
        numbers = lib.swizzled((slots, BLOCK, columns), dtype)
        if not quantised or apart:
            return numbers
        return plgpu.RefUnion(numbers, widen.raw(slots, columns))

    buffers = {
        "left": keys(SLOTS, HALF),
        "right": keys(SLOTS, HALF),
        "k_rope": keys(2, ROPE),  # then P of the same block
        "q_tail": lib.swizzled((2, ROWS, 64), dtype),
        "stats": plgpu.SMEM((SLOTS + 3, ROWS), jnp.float32),
        "left_full": lib.barrier(parts, SLOTS),  # copy engine, or left if quantised -> scores
        "right_full": lib.barrier(parts, SLOTS),  # copy engine, or right -> scores
        "rope_full": lib.barrier(copies, 2),  # copy engine -> scores, which widen bytes
        "tail_full": lib.barrier(2),  # copy engine -> scores
        "q_taken": lib.barrier(count=SLOTS),  # scores -> left, right: the slot of Q is free
        "p_ready": lib.barrier(count=SLOTS),  # scores -> left, right: P and its factor
        "go": lib.barrier(count=SLOTS),  # scores -> left, or both: QK of the next block is done
        "left_issued": lib.barrier(count=SLOTS),  # left -> right: products of PV are queued
        "left_done": lib.barrier(count=SLOTS),  # left -> right: P was read
        "inverse_ready": lib.barrier(count=2),  # scores -> left, right: 1 / sum of a piece
    }
    if quantised:
        buffers["left_raw"] = lib.barrier(copies, SLOTS)  # copy engine -> left: bytes of a block
        buffers["right_raw"] = lib.barrier(copies, SLOTS)  # copy engine -> right
    if apart:
        buffers |= {f"{half}_bytes": widen.raw(SLOTS, HALF) for half in ("left", "right")}
        buffers["rope_bytes"] = widen.raw(2, ROPE)
    if simulate:
        buffers["q_spill"] = plgpu.SMEM((ROWS, HALF), dtype)
    return buffers


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Shared memory and barriers of a running thread block, under their names in ``scratch``.

    Of an e4m3 cache ``_bytes`` is the place of a key's bytes, ``_raw`` the barrier for them.
    """

    simulate: bool
    quantised: bool
    left: Any
    right: Any
    k_rope: Any
    q_tail: Any
    stats: Any
    left_full: Any
    right_full: Any
    rope_full: Any
    tail_full: Any
    q_taken: Any
    p_ready: Any
    go: Any
    left_issued: Any
    left_done: Any
    inverse_ready: Any
    left_raw: Any = None
    right_raw: Any = None
    left_bytes: Any = None
    right_bytes: Any = None
    rope_bytes: Any = None
    q_spill: Any = None

    @classmethod
    def of(cls, simulate: bool, quantised: bool, **refs: Any) -> "Buffers":
        if quantised and not simulate:
            for name, stored in (
                ("left", "left_bytes"), ("right", "right_bytes"), ("k_rope", "rope_bytes"),
            ):  # fmt: skip
                refs[name], refs[stored] = refs[name]
        return cls(simulate=simulate, quantised=quantised, **refs)

    def slot(self, g):
        """Of element ``g`` of the stream."""
        return lax.rem(g, jnp.int32(SLOTS))

    def turn(self, s, r):
        """Slot and buffer of rotary columns of the next block: sooner known than by a division."""
        return jnp.where(s == SLOTS - 1, 0, s + 1), 1 - r

    def bytes_of_rope(self, r):
        """Where the bytes of rotary columns come."""
        return place(self.rope_bytes, r)


def place(refs, i):
    """``refs[i]`` of what there may not be."""
    return None if refs is None else refs.at[i]
