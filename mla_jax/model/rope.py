"""Rotary position embedding in both channel layouts, float32 inside.

Pair ``i`` turns by ``position * inv_freq[i]``. *Interleaved* pairs are channels
``(2i, 2i + 1)``, *half-split* pairs ``(i, i + dim / 2)``. The output keeps the layout of the
input, so cached rotary keys stay in checkpoint order.
"""

import jax.numpy as jnp

from mla_jax.config import RopeConfig
from mla_jax.pallas.append.ref import rotate
from mla_jax.types import Array, Float, Int

__all__ = ["cos_sin", "rotate"]


def cos_sin(
    positions: Int[Array, "tokens"], rope: RopeConfig
) -> tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]]:
    """``cos`` and ``sin`` of ``position * inv_freq``, times YaRN's magnitude factor."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq())
    factor = jnp.float32(rope.cos_sin_factor)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor
