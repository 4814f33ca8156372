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
from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import RowQueries
from mla_jax.pallas.merge.ref import merge_attn_states
from mla_jax.pallas.sparse_attention import kernels_triton as kernels
from mla_jax.pallas.sparse_attention.xla import with_sinks
from mla_jax.types import Array, AttnState, Float, Int, cdiv, power_of_two, round_up

__all__ = ["sparse_decode"]

HEADS, KEYS = 64, 64
"""Of a program, at most: heads, and keys of a turn."""

PROGRAMS = 264
"""Two for each of 132 multiprocessors: lists are cut until there are as many, if they are long."""


def sparse_decode(
    q: RowQueries,
    scopes: tuple[tuple[LatentCache | RecordCache, Int[Array, "tokens _"], Array | None], ...], *,
    scale: float, value: int, out_dtype: DTypeLike, sinks: Float[Array, "heads"] | None = None,
) -> AttnState:  # fmt: skip
    """``xla.sparse_decode``."""
    scopes = tuple(scope for scope in scopes if scope[1].shape[1])
    tokens, heads, row = q.shape
    if not (tokens and scopes):
        lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        return AttnState(out=jnp.zeros((tokens, heads, value), out_dtype), lse=lse)
    form = scopes[0][0].format.name
    step = 32 if form in ("ds_mla", "v4") else KEYS
    few = min(HEADS, max(power_of_two(heads), 16))
    programs = tokens * cdiv(heads, few)
    keys = max(slots.shape[1] for _, slots, _ in scopes)
    pieces = max(1, min(cdiv(keys, 2 * step), PROGRAMS // programs))
    sizes = [_sizes(cache, slots.shape[1], pieces, step) for cache, slots, _ in scopes]
    pieces = max(cdiv(keys, piece) for *_, keys, piece, _, _ in sizes)
    operands = [
        x
        for cache, slots, layer in (*scopes, *scopes)[:2]  # of one scope: twice the same
        for x in (cache.pages, slots, jnp.zeros((), jnp.int32) if layer is None else layer)
    ]
    partial = jnp.float32 if pieces > 1 else out_dtype
    programs_of = {"ds_mla": kernels.attend_records, "v4": kernels.attend_v4}
    out, lse = triton_lib.call(
        programs_of.get(form, kernels.attend),
        q,
        *operands,
        out=(
            jax.ShapeDtypeStruct((pieces, tokens, heads, value), partial),
            jax.ShapeDtypeStruct((pieces, tokens, heads), jnp.float32),
        ),
        grid=programs * pieces,
        warps=8 if few == HEADS else 4,
        stages=2,
        SIZES=(tokens, heads, value, row - value),
        NEAR=sizes[0],
        FAR=sizes[1] if len(sizes) > 1 else (0,) * 7,
        TILE=(few, step),
        SCALE=float(scale),
    )
    if pieces == 1:
        return with_sinks(AttnState(out=out[0], lse=lse[0]), sinks)
    parts = (AttnState(out=out[i], lse=lse[i]) for i in range(pieces))
    return with_sinks(merge_attn_states(*parts, out_dtype=out_dtype), sinks)


def _sizes(
    cache: LatentCache | RecordCache, keys: int, pieces: int, step: int
) -> tuple[int, int, int, int, int, int, int]:
    """A cache as the programs know it: its list is cut into so many pieces at most."""
    piece = round_up(cdiv(keys, pieces), step)
    records = isinstance(cache, RecordCache)
    row = cache.format.row_bytes if records else cache.pages.shape[-1]
    size = cache.format.page_bytes(cache.page) if records else cache.page * row
    return cache.layers or 1, cache.num_slots, row, keys, piece, cache.page, size
