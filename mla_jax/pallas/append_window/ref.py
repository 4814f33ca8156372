"""Definition of V4's new rows and queries, and their path on every device."""

import jax.numpy as jnp

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.pooling.ref import rotate_tail, write_split
from mla_jax.types import Array, Float, Int

__all__ = ["append_window"]


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
    """``(rotate(rms_norm(q)), cache)`` with ``rotate(rms_norm(kv) * gain)`` at each slot."""
    q = rotate_tail(rms_norm(q, jnp.ones(q.shape[-1:], q.dtype), eps=eps), cos, sin)
    row = rotate_tail(rms_norm(kv, gain, eps=eps), cos, sin)
    return q, write_split(cache, row, slots, layer)
