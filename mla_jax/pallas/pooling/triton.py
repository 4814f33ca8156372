"""V4's compressed states in Triton: two launches for each pool.

    pool     softmax over the places of each completed group       [groups, dim], float32
    store    norm, rotation and cache write of each group's state; each token's row of its ring

All reads of the ring are in the first launch and all writes in the second, so a long chunk may
overwrite rows that its first groups need. The first one divides a group's channels among programs:
a group of 128 tokens has 512 kB, more than one multiprocessor reads in good time. A token that
completes no group reads nothing of the ring: its programs end at once.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from mla_jax.cache import LatentCache, RecordCache, StatePool
from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import Groups, Layer
from mla_jax.pallas.cache_io.row_layout import layout
from mla_jax.pallas.pooling import kernels_triton as kernels
from mla_jax.types import cdiv, power_of_two

__all__ = ["pool_states"]

ELEMENTS = 256
"""Of a warp of ``pool``: places times channels; up to four warps, 32 channels or more.

The same for all steps, or a state's bits would depend on the step. On one H200
both pools of ratio 4 take 12.0, 8.8 and 8.4 us for 128 tokens with 1024, 512 and 256; for 8192
tokens 47 us with 512 and 49 with 256.
"""


def pool_states(
    ring: LatentCache,
    pools: tuple[StatePool, ...],
    groups: Groups,
    *,
    eps: float,
    layer: Layer = None,
) -> tuple[LatentCache, tuple[LatentCache | RecordCache, ...]]:
    """``ref.pool_states``; ring and pages stay where they are if they are donated."""
    caches, begin = [], 0
    for given in pools:
        if len(groups.positions):
            ring, cache = _one(ring, given, groups, begin, eps=eps, layer=layer)
        else:
            cache = given.cache
        caches.append(cache)
        begin += 2 * given.values.shape[1] * given.values.shape[2]
    return ring, tuple(caches)


def _one(
    ring: LatentCache, given: StatePool, groups: Groups, begin: int, *, eps: float, layer: Layer
) -> tuple[LatentCache, LatentCache | RecordCache]:
    """One pool, whose part of a ring's row begins at column ``begin``."""
    tokens, halves, dim = given.values.shape
    count, span = groups.tokens.shape
    places, spec = power_of_two(span), jax.ShapeDtypeStruct
    channels = min(max(ELEMENTS // places, 32), power_of_two(dim))
    number = jnp.zeros((), jnp.int32) if layer is None else layer
    sizes = {
        "POOL": (halves, dim, given.bias.shape[0], groups.cos.shape[1], begin),
        "RING": (ring.layers or 1, ring.num_slots, ring.pages.shape[-1], span),
    }
    inputs = given.values, given.gates, given.bias
    before = ring.pages, given.cache.pages
    states = triton_lib.call(
        kernels.pool,
        inputs, ring.pages, groups.ends, groups.tokens, groups.kept, number,
        out=spec((count, dim), jnp.float32),
        grid=count * cdiv(dim, channels),
        warps=min(max(places * channels // ELEMENTS, 1), 4),
        stages=1,
        **sizes,
        TILE=(places, channels),
    )  # fmt: skip
    ((rows, pages),) = triton_lib.call(
        kernels.store,
        inputs, (given.gain, states), (groups.cos, groups.sin), (groups.ends, given.slots),
        (groups.keep, groups.positions), number, before,
        out=(tuple(spec(x.shape, x.dtype) for x in before),),
        aliases={12: 0, 13: 1},
        grid=count + tokens,
        warps=4,
        stages=1,
        GROUPS=count,
        **sizes,
        ROW=layout(given.cache),
        TILE=(power_of_two(dim), power_of_two(halves * dim)),
        EPS=float(eps),
    )  # fmt: skip
    return replace(ring, pages=rows), replace(given.cache, pages=pages)
