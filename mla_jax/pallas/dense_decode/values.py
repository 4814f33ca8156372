"""Values of a decode: pieces merged and each head's latents multiplied, in one launch if few.

``out[t, h] = latents[t, h] up[h]`` with ``latents`` as ``combine_sm90`` leaves them. With few rows
the merge and the product are each bound by their launch: 2.8 and 3.5 us with a gap of 0.5 between
(one request of 4,096 keys, 16 heads, H200). One program has a head, some of its columns and every
fourth token; programs of a head merge its pieces each for itself, out of the L2 cache.
"""

from importlib.util import find_spec

import jax
import jax.numpy as jnp

from mla_jax.pallas.axes import HeadValues
from mla_jax.types import Array, Float, Int, power_of_two

__all__ = ["FEWEST_TOKENS", "in_one_launch", "merged_values"]

FEWEST_TOKENS = 8
"""Of a step whose heads' values are made in one launch, at most."""

MOST_HEADS = 32
COLUMNS, WARPS, GROUPS = 32, 8, 4
TOGETHER, STAGES = 16, 4
"""Pieces of a load, and loads in flight."""


def in_one_launch(tokens: int, up: HeadValues) -> bool:
    """Whether ``merged_values`` is for so many tokens, and Triton is there."""
    heads, rank, width = up.shape
    fits = not width % COLUMNS and rank == power_of_two(rank)
    return (
        fits and 0 < tokens <= FEWEST_TOKENS and heads <= MOST_HEADS and bool(find_spec("triton"))
    )


def merged_values(
    latents: Float[Array, "rows rank"], lse: Float[Array, "rows"],
    part: Float[Array, "slots tiles 64 rank"], part_lse: Float[Array, "slots tiles 64"],
    merges: Int[Array, "list columns"], up: HeadValues, *, tokens: int, pieces: int,
) -> tuple[Float[Array, "tokens heads v"], Float[Array, "rows"]]:  # fmt: skip
    """``(values, lse)``: ``combine_sm90.combine`` and the product with ``up``, accumulated in
    float32. Merged latents are rounded first, as that rounds them. ``pieces``: of a request, at
    most.
    """
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.dense_decode import kernels_triton as kernels

    heads, rank, width = up.shape
    like = jax.ShapeDtypeStruct
    return triton_lib.call(
        kernels.values,
        latents, lse, part, part_lse, merges, up,
        out=(like((tokens, heads, width), latents.dtype), like(lse.shape, jnp.float32)),
        aliases={1: 1},
        grid=min(GROUPS, tokens) * heads * (width // COLUMNS),
        warps=WARPS,
        stages=1,
        SIZES=(tokens, heads, len(latents) // tokens, rank, width),
        MERGE=(power_of_two(tokens), power_of_two(pieces), TOGETHER, STAGES, part.shape[1]),
        GROUPS=min(GROUPS, tokens),
        COLUMNS=COLUMNS,
    )  # fmt: skip
