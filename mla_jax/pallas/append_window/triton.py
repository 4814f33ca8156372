"""V4's new rows and queries in Triton: one launch, as ``append/triton.py`` has for V3.

Each program takes a token's one row, normalises, rotates, quantises and stores it, or normalises
and rotates a token's queries of some heads. Few tokens are bound by the launch, many by reading
and writing the queries: 64 kB of each token, both ways (64 heads of 512 in 16 bits).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas import triton_lib
from mla_jax.pallas.append_window import kernels_triton as kernels
from mla_jax.pallas.cache_io.row_layout import layout
from mla_jax.types import Array, Float, Int, cdiv, power_of_two

__all__ = ["append_window"]

HEADS, WARPS = 4, 1
"""Of a program: one warp has whole rows of 512, so no sum crosses warps."""


def append_window(
    cache: LatentCache | RecordCache,
    q: Float[Array, "tokens heads dim"],
    kv: Float[Array, "tokens dim"],
    gain: Float[Array, "dim"],
    cos: Float[Array, "tokens pairs"],
    sin: Float[Array, "tokens pairs"],
    slots: Int[Array, "tokens"],
    *,
    eps: float,
    layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "tokens heads dim"], LatentCache | RecordCache]:
    """``ref.append_window``; the pages stay where they are if they are donated."""
    tokens, heads, dim = q.shape
    if not tokens:
        return q, cache
    few, spec = min(HEADS, power_of_two(heads)), jax.ShapeDtypeStruct
    number = jnp.zeros((), jnp.int32) if layer is None else layer
    turned, pages = triton_lib.call(
        kernels.append,
        q, kv, gain, cos, sin, slots, number, cache.pages,
        out=(spec(q.shape, q.dtype), spec(cache.pages.shape, cache.pages.dtype)),
        aliases={7: 1},
        grid=tokens * (1 + cdiv(heads, few)),
        warps=WARPS,
        stages=1,
        SIZES=(heads, dim, cos.shape[1]),
        ROW=layout(cache),
        TILE=(few, power_of_two(dim)),
        EPS=float(eps),
    )  # fmt: skip
    return turned, replace(cache, pages=pages)
