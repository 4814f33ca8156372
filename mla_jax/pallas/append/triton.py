"""A step's new rows in Triton: one launch where XLA and the cache write take six.

Each program takes a token's row, normalises, rotates and stores it, or rotates and splits a
token's queries of some heads. Bound by launches: a row has 1 kB, a token's queries 6 kB (16 heads).

Of few tokens programs of the same launch take the queries times the up-projection of the keys too:
each has one head and some columns, so that all of a GPU reads those weights, 2 MB of 16 heads.
"""

import jax
import jax.numpy as jnp

from mla_jax.cache import CacheFormat
from mla_jax.pallas import triton_lib
from mla_jax.pallas.append import kernels_triton as kernels
from mla_jax.pallas.append import ref
from mla_jax.pallas.axes import (
    AbsorbedKeys,
    Angles,
    CacheScale,
    Layer,
    Pages,
    Queries,
    RopeQueries,
    Slots,
)
from mla_jax.types import Array, Float, cdiv, power_of_two

__all__ = ["append_latent"]

HEADS = 16
"""Of a program."""

ROWS, COLUMNS = 16, 64
"""Of a program of the product: all tokens of one head, and some of the latent's columns."""

REGISTERS = 128
"""Of a thread that holds weights, at most. Without a bound the assembler gives it fewer, too few to
load all weights at once."""

MOST_NOPE = 256
"""Channels up to which a program of the product holds them all; else it is a launch of its own."""


def append_latent(
    pages: Pages, scale: CacheScale, q: Queries, kv: Float[Array, "tokens row"],
    gain: Float[Array, "rank"], cos: Angles, sin: Angles, slots: Slots, *, eps: float,
    interleaved: bool, format: CacheFormat, layer: Layer = None,
    up_k: AbsorbedKeys | None = None,
) -> tuple[Float[Array, "tokens heads first"], RopeQueries, Pages]:  # fmt: skip
    """``ref.append_latent``; ``pages`` stay where they are if they are donated.

    The product with ``up_k`` is part of the launch for up to ``ROWS`` tokens.
    """
    (tokens, heads, qk), rank, rope = q.shape, gain.shape[0], 2 * cos.shape[1]
    nope, spec = qk - rope, jax.ShapeDtypeStruct
    if up_k is not None and (tokens > ROWS or nope > MOST_NOPE):
        given, facts = (pages, scale, q, kv, gain, cos, sin, slots), {"eps": eps, "layer": layer}
        apart = append_latent(*given, interleaved=interleaved, format=format, **facts)
        return ref.absorb(apart[0], up_k), apart[1], apart[2]
    weights = (gain,) if up_k is None else (gain, up_k)
    parts = (tokens, heads, nope if up_k is None else rank), (tokens, heads, rope)
    if not tokens:
        return jnp.zeros(parts[0], q.dtype), jnp.zeros(parts[1], q.dtype), pages
    few = min(HEADS, power_of_two(heads))
    layers = 1 if layer is None else pages.shape[0]
    number = jnp.zeros((), jnp.int32) if layer is None else layer
    programs = tokens * (1 + cdiv(heads, few))
    programs += 0 if up_k is None else heads * cdiv(rank, COLUMNS)
    (first, q_rope), pages = triton_lib.call(
        kernels.append,
        q, kv, weights, (cos, sin), (slots, number, scale), pages,
        out=(tuple(spec(shape, q.dtype) for shape in parts), spec(pages.shape, pages.dtype)),
        aliases={7 + len(weights): 2},
        grid=programs,
        warps=4,
        stages=1,
        registers=None if up_k is None else REGISTERS,
        SIZES=(heads, nope, rope, rank, 0 if up_k is None else tokens),
        CACHE=(layers, pages.shape[-3] * pages.shape[-2]),
        TILE=(
            few, max(power_of_two(nope), ROWS), power_of_two(rope // 2), power_of_two(rank),
            ROWS, COLUMNS,
        ),
        EPS=float(eps),
        INTERLEAVED=interleaved,
        LARGEST=float(jnp.finfo(format.dtype).max) if format.quantised else None,
    )  # fmt: skip
    return first, q_rope, pages
