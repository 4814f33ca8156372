"""A trial of ``card_trials``: the output head of small steps in Triton.

cuBLAS clears a workspace before its product, and a step of one request loses 5 to 11 us there: 1.5
for that, the rest in gaps. Prediction: V2-Lite's head (419 MB) takes 100 us as before, and the step
5 to 11 us less. Not measured yet.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.metadata.buckets import FEWEST_ROWS
from mla_jax.model.embed import project_to_vocab
from mla_jax.pallas import triton_lib
from mla_jax.pallas.triton_lib import jit, tl
from mla_jax.types import Array, Float

__all__ = ["of_few_rows"]

ROWS, COLUMNS, DEPTH, WARPS, STAGES = 16, 64, 128, 4, 6


@jit
def product(x, weight, tokens, out, SIZES: tl.constexpr, TILE: tl.constexpr):
    """``out = x @ weight`` in float32; a block of columns, whose number divides all."""
    HIDDEN: tl.constexpr = SIZES[0]
    VOCAB: tl.constexpr = SIZES[1]
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    t, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = (t < tokens)[:, None]
    a = x + t[:, None] * HIDDEN + k[None, :]
    b = weight + k[:, None].to(tl.int64) * VOCAB + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, HIDDEN, DEPTH):
        total = tl.dot(tl.load(a, mask=there, other=0.0), tl.load(b), total)
        a += DEPTH
        b += DEPTH * VOCAB
    tl.store(out + t[:, None].to(tl.int64) * VOCAB + column[None, :], total, mask=there)


def of_few_rows(
    hidden: Float[Array, "rows hidden"], kernel: Float[Array, "a b"], *, tied: bool
) -> Float[Array, "rows vocab"]:
    """``embed.project_to_vocab``."""
    (rows, depth), vocab = hidden.shape, kernel.shape[1]
    fits = rows <= FEWEST_ROWS and depth % DEPTH == 0 and vocab % COLUMNS == 0
    if tied or not fits or hidden.dtype != kernel.dtype or hidden.dtype.itemsize != 2:
        return project_to_vocab(hidden, kernel, tied=tied)
    found: Any = triton_lib.call(
        product,
        hidden, kernel, rows,
        out=jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        grid=vocab // COLUMNS, warps=WARPS, stages=STAGES,
        SIZES=(depth, vocab), TILE=(ROWS, COLUMNS, DEPTH),
    )  # fmt: skip
    return found
