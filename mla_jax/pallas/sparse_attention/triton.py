"""Sparse decode in Triton: see ``ref.py`` for what, ``kernels_triton.py`` for the program.

A program takes a block of heads of one token and a piece of its list, gathers the rows of 32 or 64
slots in a turn and multiplies them twice, for scores and for values. Bound by the gathered rows,
1,152 bytes a key in 16 bits or 656 as a record, read once for each block of heads, and by
``2 * heads * (2 * rank + rope)`` FLOP a key: with 128 heads the products take longer. Where tokens
are few their lists are cut into pieces, which are merged in float32.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.merge.ref import merge_attn_states
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.pallas.sparse_attention.xla import with_sinks
from mla_jax.types import Array, AttnState, Float, Int, cdiv, power_of_two, round_up

__all__ = ["REQUIREMENT", "sparse_decode"]

REQUIREMENT = Requirement(
    sm=Within(low=89),  # e4m3 is converted from there on
    features={
        "dtype+cache": OneOf("bfloat16+bf16", "float16+fp16", "bfloat16+ds_mla"),
        "rank": OneOf(128, 256, 512),
        "rope": OneOf(64),
        "value+rank": OneOf("128+128", "256+256", "512+512"),
        "extra": OneOf(False),
    },
    packages=("triton",),
)

HEADS, KEYS = 64, 64
"""Of a program, at most: heads, and keys of a turn."""

PROGRAMS = 264
"""Two for each of 132 multiprocessors: lists are cut until there are as many, if they are long."""


def sparse_decode(
    q: Float[Array, "tokens heads row"],
    scopes: tuple[tuple[LatentCache | RecordCache, Int[Array, "tokens _"], Array | None], ...],
    *,
    scale: float,
    value: int,
    out_dtype: DTypeLike,
    sinks: Float[Array, "heads"] | None = None,
) -> AttnState:
    """``xla.sparse_decode`` over one scope."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.sparse_attention import kernels_triton as kernels

    ((cache, slots, layer),) = scopes
    (tokens, heads, row), keys = q.shape, slots.shape[1]
    if not (tokens and keys):
        lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        return AttnState(out=jnp.zeros((tokens, heads, value), out_dtype), lse=lse)
    records = isinstance(cache, RecordCache)
    few, step = min(HEADS, max(power_of_two(heads), 16)), 32 if records else KEYS
    programs = tokens * cdiv(heads, few)
    pieces = max(1, min(cdiv(keys, 2 * step), PROGRAMS // programs))
    piece = round_up(cdiv(keys, pieces), step)
    pieces = cdiv(keys, piece)
    partial = jnp.float32 if pieces > 1 else out_dtype
    out, lse = triton_lib.call(
        kernels.attend_records if records else kernels.attend,
        q,
        cache.pages,
        slots,
        jnp.zeros((), jnp.int32) if layer is None else layer,
        out=(
            jax.ShapeDtypeStruct((pieces, tokens, heads, value), partial),
            jax.ShapeDtypeStruct((pieces, tokens, heads), jnp.float32),
        ),
        grid=programs * pieces,
        warps=8 if few == HEADS else 4,
        stages=2,
        SIZES=(tokens, heads, value, row - value, keys),
        CACHE=(
            cache.layers or 1,
            cache.num_slots,
            cache.format.row_bytes if isinstance(cache, RecordCache) else row,
        ),
        TILE=(few, step, piece),
        SCALE=float(scale),
    )
    if pieces == 1:
        return with_sinks(AttnState(out=out[0], lse=lse[0]), sinks)
    parts = (AttnState(out=out[i], lse=lse[i]) for i in range(pieces))
    return with_sinks(merge_attn_states(*parts, out_dtype=out_dtype), sinks)
