"""Rotary position embedding in both channel layouts, float32 inside.

Pair ``i`` turns by ``position * inv_freq[i]``. *Interleaved* pairs are channels
``(2i, 2i + 1)``, *half-split* pairs ``(i, i + dim / 2)``. The output keeps the layout of the
input, so cached rotary keys stay in checkpoint order.
"""

import jax.numpy as jnp

from mla_jax.config import RopeConfig
from mla_jax.types import Array, Float, Int

__all__ = ["cos_sin", "rotate"]


def cos_sin(
    positions: Int[Array, "tokens"], rope: RopeConfig
) -> tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]]:
    """``cos`` and ``sin`` of ``position * inv_freq``, times YaRN's magnitude factor."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq())
    factor = jnp.float32(rope.cos_sin_factor)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: Float[Array, "tokens ... dim"],
    cos: Float[Array, "tokens pairs"],
    sin: Float[Array, "tokens pairs"],
    *,
    interleaved: bool,
) -> Float[Array, "tokens ... dim"]:
    """``y_a = x_a cos - x_b sin, y_b = x_a sin + x_b cos`` for every pair ``(a, b)``."""
    middle = (1,) * (x.ndim - 2)
    cos = cos.reshape(cos.shape[0], *middle, -1)
    sin = sin.reshape(sin.shape[0], *middle, -1)
    y = x.astype(jnp.float32)
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        out = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(y, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return out.astype(x.dtype)
