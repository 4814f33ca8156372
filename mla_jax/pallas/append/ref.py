"""Definition of a step's new rows, and of the two functions that they are made with."""

import jax.numpy as jnp
from jax import lax

from mla_jax.cache import CacheFormat
from mla_jax.pallas.axes import Angles, CacheScale, Layer, Pages, Queries, RopeQueries, Slots
from mla_jax.pallas.cache_io.ref import write_latent
from mla_jax.types import Array, Float

__all__ = ["append_latent", "rms_norm", "rotate"]


def append_latent(
    pages: Pages, scale: CacheScale, q: Queries, kv: Float[Array, "tokens row"],
    gain: Float[Array, "rank"], cos: Angles, sin: Angles, slots: Slots, *, eps: float,
    interleaved: bool, format: CacheFormat, layer: Layer = None,
) -> tuple[Float[Array, "tokens heads nope"], RopeQueries, Pages]:  # fmt: skip
    """``(q_nope, rotate(q_rope), pages)``, ``[norm(latent) | rotate(k_rope)]`` at each slot."""
    rank, nope = gain.shape[0], q.shape[-1] - 2 * cos.shape[1]
    latent = rms_norm(kv[:, :rank], gain, eps=eps)
    parts = kv[:, rank:], q[..., nope:]
    k_rope, q_rope = (rotate(x, cos, sin, interleaved=interleaved) for x in parts)
    pages = write_latent(pages, scale, latent, k_rope, slots, format=format, layer=layer)
    return q[..., :nope], q_rope, pages


def rms_norm(
    x: Float[Array, "... dim"], gain: Float[Array, "dim"], *, eps: float
) -> Float[Array, "... dim"]:
    """``gain * x / sqrt(mean(x^2) + eps)`` over the last axis in float32, rounded once."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (gain.astype(jnp.float32) * y).astype(x.dtype)


def rotate(
    x: Float[Array, "tokens ... dim"], cos: Angles, sin: Angles, *, interleaved: bool
) -> Float[Array, "tokens ... dim"]:
    """``y_a = x_a cos - x_b sin, y_b = x_a sin + x_b cos`` for every pair ``(a, b)``.

    *Interleaved* pairs are channels ``(2i, 2i + 1)``, others ``(i, i + dim / 2)``.
    """
    middle = (1,) * (x.ndim - 2)
    cos, sin = (f.reshape(f.shape[0], *middle, f.shape[1]) for f in (cos, sin))
    y = x.astype(jnp.float32)
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        out = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(y, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return out.astype(x.dtype)
