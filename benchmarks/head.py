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
from mla_jax.pallas.grouped_matmul import kernels_triton as products
from mla_jax.pallas.triton_lib import jit, tl
from mla_jax.types import Array, Float

__all__ = ["of_few_rows"]

ROWS, COLUMNS, DEPTH, WARPS, STAGES = 16, 64, 128, 4, 6

_sums = products._down_sums


@jit
def product(x, weight, tokens, out, SIZES: tl.constexpr, TILE: tl.constexpr):
    """``out = x @ weight`` in float32: ``down`` of one expert, of which each token has a row.

    ``SIZES`` and ``TILE`` are those of ``kernels_triton.down``: the third and fourth are the
    vocabulary and the channels, the columns of a program and its depth.
    """
    ROWS: tl.constexpr = TILE[0]
    block = tl.program_id(0)
    t = tl.arange(0, ROWS)
    y = _sums(x, weight, tl.zeros((), tl.int32), block, t, t < tokens, SIZES, ROWS, TILE)
    column = block * TILE[2] + tl.arange(0, TILE[2])
    to = out + t.to(tl.int64)[:, None] * SIZES[2] + column[None, :]
    tl.store(to, y, mask=(t < tokens)[:, None])


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
        SIZES=(1, 1, vocab, depth), TILE=(ROWS, ROWS, COLUMNS, DEPTH),
    )  # fmt: skip
    return found
