"""A step's new rows in Triton: one launch where XLA and the cache write take six.

Each program takes a token's row, normalises, rotates and stores it, or rotates and splits a
token's queries of some heads. Bound by launches: a row has 1 kB, a token's queries 6 kB (16 heads).
"""

import jax
import jax.numpy as jnp

from mla_jax.cache import CacheFormat
from mla_jax.pallas import triton_lib
from mla_jax.pallas.append import kernels_triton as kernels
from mla_jax.pallas.axes import Angles, CacheScale, Layer, Pages, Queries, RopeQueries, Slots
from mla_jax.types import Array, Float, cdiv, power_of_two

__all__ = ["append_latent"]

HEADS = 16
"""Of a program."""


def append_latent(
    pages: Pages, scale: CacheScale, q: Queries, kv: Float[Array, "tokens row"],
    gain: Float[Array, "rank"], cos: Angles, sin: Angles, slots: Slots, *, eps: float,
    interleaved: bool, format: CacheFormat, layer: Layer = None,
) -> tuple[Float[Array, "tokens heads nope"], RopeQueries, Pages]:  # fmt: skip
    """``ref.append_latent``; ``pages`` stay where they are if they are donated."""
    (tokens, heads, qk), rank, rope = q.shape, gain.shape[0], 2 * cos.shape[1]
    nope, spec = qk - rope, jax.ShapeDtypeStruct
    parts = (tokens, heads, nope), (tokens, heads, rope)
    if not tokens:
        return jnp.zeros(parts[0], q.dtype), jnp.zeros(parts[1], q.dtype), pages
    few = min(HEADS, power_of_two(heads))
    layers = 1 if layer is None else pages.shape[0]
    number = jnp.zeros((), jnp.int32) if layer is None else layer
    (q_nope, q_rope), pages = triton_lib.call(
        kernels.append,
        q, kv, gain, (cos, sin), (slots, number, scale), pages,
        out=(tuple(spec(shape, q.dtype) for shape in parts), spec(pages.shape, pages.dtype)),
        aliases={8: 2},
        grid=tokens * (1 + cdiv(heads, few)),
        warps=4,
        stages=1,
        SIZES=(heads, nope, rope, rank),
        CACHE=(layers, pages.shape[-3] * pages.shape[-2]),
        TILE=(few, power_of_two(nope), power_of_two(rope // 2), power_of_two(rank)),
        EPS=float(eps),
        INTERLEAVED=interleaved,
        LARGEST=float(jnp.finfo(format.dtype).max) if format.quantised else None,
    )  # fmt: skip
    return q_nope, q_rope, pages
