"""The router in Triton: two launches instead of a float32 product by cuBLAS and a sort.

    logits     x @ kernel in float32, cut along hidden       [pieces, tokens, experts]
    choose     the pieces added, scores, groups, the best    [tokens, topk]

For few tokens cuBLAS has no float32 product that fills the machine (128 tokens of V2-Lite: 69 us),
for many it leaves the tensor cores idle (16384 tokens: 310 us), and a sort for six of 64 is three
kernels. Pieces are of a fixed depth and are added in order, so a token's choice does not depend on
its neighbours. With many tokens one program adds all pieces of its own.
"""

import jax
import jax.numpy as jnp

from mla_jax.config import MoEConfig
from mla_jax.pallas.axes import Choices, ChoiceWeights, Hidden
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, Bool, Float, cdiv, power_of_two

__all__ = ["MOST_CUT", "REQUIREMENT", "piece_depth", "route_tokens"]

REQUIREMENT = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float32"),
        "experts": Within(high=1024),
        "topk": Within(high=64),
    },
    packages=("triton",),
)

MOST_CUT = 1024
"""Tokens up to which each piece of the product has a program of its own."""

TOKENS, MANY_TOKENS, DEPTH = 16, 64, 32
"""Of a program of ``logits``: its tokens, and the channels of one turn of its loop."""


def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig,
) -> tuple[ChoiceWeights, Choices]:  # fmt: skip
    """``ref.route_tokens``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.router import kernels_triton as kernels

    (tokens, hidden), experts = x.shape, kernel.shape[1]
    weights = jax.ShapeDtypeStruct((tokens, moe.topk), jnp.float32)
    chosen = jax.ShapeDtypeStruct((tokens, moe.topk), jnp.int32)
    if not tokens:
        return jnp.zeros(weights.shape, weights.dtype), jnp.zeros(chosen.shape, chosen.dtype)
    kernel = kernel.astype(jnp.float32)
    depth = piece_depth(hidden)
    pieces, columns = cdiv(hidden, depth), power_of_two(experts)
    many = tokens > MOST_CUT
    programs, rows = (1, MANY_TOKENS) if many else (pieces, TOKENS)
    logits = triton_lib.call(
        kernels.logits,
        x,
        kernel,
        tokens,
        out=jax.ShapeDtypeStruct((programs, tokens, experts), jnp.float32),
        grid=cdiv(tokens, rows) * programs,
        warps=8 if many and columns > 64 else 4,
        stages=3,
        SIZES=(hidden, experts),
        PIECE=depth,
        COUNT=pieces // programs,
        TILE=(rows, columns, DEPTH),
    )
    each = moe.experts // moe.groups
    biased = choice_bias is not None
    return triton_lib.call(
        kernels.choose,
        logits,
        choice_bias.astype(jnp.float32) if biased else logits,  # not read
        real,
        tokens,
        out=(weights, chosen),
        grid=tokens,
        warps=1,
        stages=1,
        SIZES=(moe.groups, each, moe.topk, moe.topk_groups),
        PIECES=logits.shape[0],
        TILE=(power_of_two(moe.groups), power_of_two(each)),
        METHOD=moe.method,
        BIASED=biased,
        NORMALISE=moe.normalise,
        SCALE=float(moe.scale),
    )


def piece_depth(hidden: int) -> int:
    """Channels of a piece: at most 32 pieces, 128 channels or more."""
    depth = 128
    while cdiv(hidden, depth) > 32:
        depth *= 2
    return depth
