"""The router in Triton: two launches instead of a float32 product by cuBLAS and a sort.

    logits     x @ kernel in float32, cut along hidden       [pieces, tokens, experts]
    choose     the pieces added, scores, groups, the best    [tokens, topk]

For few tokens the first launch can normalise the rows too.

For few tokens cuBLAS has no float32 product that fills the machine (128 tokens of V2-Lite: 69 us),
for many it leaves the tensor cores idle (16384 tokens: 310 us), and a sort for six of 64 is three
kernels. Pieces are of a fixed depth and are added in order, so a token's choice does not depend on
its neighbours. With many tokens one program adds all pieces of its own, and XLA cuts the weights
into the 16-bit numbers of the product beforehand.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.config import MoEConfig
from mla_jax.pallas import triton_lib
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import Choices, ChoiceWeights, Hidden, RowNorm
from mla_jax.pallas.router import kernels_triton as kernels
from mla_jax.types import Array, Bool, Float, cdiv, power_of_two

__all__ = [
    "MOST_CUT",
    "NARROW_PIECES",
    "matmul_float32",
    "piece_depth",
    "product_pieces",
    "route_tokens",
]

MOST_CUT = 1024
"""Tokens up to which each piece of the product has a program of its own."""

COLUMNS, DEPTH = 64, 32
"""Of a program of ``logits``: its experts, and the channels of one turn of its loop."""

ROWS = (16, 64, 128)
"""Tokens of a program: of up to ``FEW`` tokens, of more, and where programs abound even so."""

FEW, ENOUGH, ABOUND = 256, 128, 256
"""Tokens; programs that fill an H200, and twice as many."""

MOST_PIECES, NARROW_PIECES = 32, 128
"""Of a product: of a router's, whose program adds them, and of one with few columns."""

LEAST = 16
"""Columns of a product on tensor cores."""

MOST_DEPTH, PART = 256, 512
"""Of the launch that normalises too: the most channels of a piece, whose weights a program holds,
and the channels that it reads at a time for the norm."""


def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig, first: bool = False,
    norm: RowNorm | None = None,
) -> tuple[ChoiceWeights, Choices] | tuple[ChoiceWeights, Choices, Hidden]:  # fmt: skip
    """``ref.route_tokens``."""
    tokens = x.shape[0]
    weights = jax.ShapeDtypeStruct((tokens, moe.topk), jnp.float32)
    chosen = jax.ShapeDtypeStruct((tokens, moe.topk), jnp.int32)
    if not tokens:
        none = jnp.zeros(weights.shape, weights.dtype), jnp.zeros(chosen.shape, chosen.dtype)
        return (*none, x) if first or norm is not None else none
    if norm is not None:
        logits, x = _normed_pieces(x, norm, kernel)
    elif first:
        logits, x = product_pieces(x, kernel, first=True)
    else:
        logits = product_pieces(x, kernel)
    each = moe.experts // moe.groups
    biased = choice_bias is not None
    found = triton_lib.call(
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
    return (*found, x) if first or norm is not None else found


def matmul_float32(x: Hidden, kernel: Float[Array, "hidden out"]) -> Float[Array, "tokens out"]:
    """``ref.router_logits``."""
    if not x.shape[0]:
        return jnp.zeros((0, kernel.shape[1]), jnp.float32)
    return product_pieces(x, kernel, most=NARROW_PIECES).sum(axis=0)


def product_pieces(
    x: Hidden, kernel: Float[Array, "hidden out"], *, most: int = MOST_PIECES, first: bool = False
) -> Any:
    """``x @ kernel`` in float32 ``[pieces, tokens, out]``, cut along hidden.

    Of many tokens one piece has all of it. ``first``: also x, as a result of the same launch.
    """
    (tokens, hidden), out = x.shape, kernel.shape[1]
    depth = piece_depth(hidden, most)
    pieces, columns = cdiv(hidden, depth), _columns(out)
    many, tiles = tokens > MOST_CUT, cdiv(out, columns)
    programs = 1 if many else pieces
    rows = _rows(tokens, tiles * programs)
    parted = many and x.dtype == jnp.bfloat16
    result = jax.ShapeDtypeStruct((programs, tokens, out), jnp.float32)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_lib.call(
        kernels.logits_first if first else kernels.logits,
        x,
        _parts(kernel) if parted else kernel.astype(jnp.float32),
        tokens,
        out=(result, same) if first else result,
        aliases={0: 1} if first else None,
        grid=cdiv(tokens, rows) * programs * tiles,
        warps=4,
        stages=3,
        SIZES=(hidden, out),
        PIECE=depth,
        COUNT=pieces // programs,
        TILE=(rows, columns, DEPTH),
        PARTED=parted,
    )


def _normed_pieces(
    x: Hidden, norm: RowNorm, kernel: Float[Array, "hidden experts"]
) -> tuple[Float[Array, "pieces tokens experts"], Hidden]:
    """``product_pieces`` of x normalised, and that, in one launch for few tokens.

    Each program reads whole rows for the norm: 32 kB of V2-Lite's eight.
    """
    (tokens, hidden), out = x.shape, kernel.shape[1]
    depth = piece_depth(hidden)
    if tokens > ROWS[0] or depth > MOST_DEPTH:
        x = rms_norm(x, norm.gain, eps=norm.eps)
        return product_pieces(x, kernel), x
    pieces, columns = cdiv(hidden, depth), _columns(out)
    logits = jax.ShapeDtypeStruct((pieces, tokens, out), jnp.float32)
    return triton_lib.call(
        kernels.logits_normed,
        x, norm.gain, kernel.astype(jnp.float32), tokens,
        out=(logits, jax.ShapeDtypeStruct(x.shape, x.dtype)),
        grid=pieces * cdiv(out, columns),
        warps=8,
        stages=1,
        SIZES=(hidden, out),
        PIECE=depth,
        TILE=(ROWS[0], columns, PART),
        EPS=float(norm.eps),
    )  # fmt: skip


def _columns(out: int) -> int:
    """Columns of a program."""
    return min(max(power_of_two(out), LEAST), COLUMNS)


def _rows(tokens: int, others: int) -> int:
    """Tokens of a program, with so many programs for the same tokens; no bit depends on it."""
    few, more, most = ROWS
    if tokens > MOST_CUT:
        return most if cdiv(tokens, most) * others >= ABOUND else more
    return more if tokens > FEW and cdiv(tokens, more) * others >= ENOUGH else few


def _parts(kernel: Float[Array, "hidden out"]) -> Float[Array, "parts hidden out"]:
    """Three bfloat16 numbers that add up to each weight, the largest first.

    With many tokens each program would make them again, in every turn of its loop.
    """
    rest, parts = kernel.astype(jnp.float32), []
    for _ in range(3):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)  # casts may be removed
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return jnp.stack(parts)


def piece_depth(hidden: int, most: int = MOST_PIECES) -> int:
    """Channels of a piece: at most so many pieces, 128 channels or more."""
    depth = 128
    while cdiv(hidden, depth) > most:
        depth *= 2
    return depth
