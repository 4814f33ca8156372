"""Definition of a step's new rows, and of the functions that they are made with."""

import jax.numpy as jnp
from jax import lax

from mla_jax.cache import CacheFormat
from mla_jax.pallas.axes import (
    AbsorbedKeys,
    Angles,
    CacheScale,
    LatentQueries,
    Layer,
    Pages,
    Queries,
    RopeQueries,
    Slots,
)
from mla_jax.pallas.cache_io.ref import write_latent
from mla_jax.types import Array, Float

__all__ = ["absorb", "append_latent", "rms_norm", "rotate"]


def append_latent(
    pages: Pages, scale: CacheScale, q: Queries, kv: Float[Array, "tokens row"],
    gain: Float[Array, "rank"], cos: Angles, sin: Angles, slots: Slots, *, eps: float,
    interleaved: bool, format: CacheFormat, layer: Layer = None,
    up_k: AbsorbedKeys | None = None,
) -> tuple[Float[Array, "tokens heads first"], RopeQueries, Pages]:  # fmt: skip
    """``(q_nope, rotate(q_rope), pages)``, ``[norm(latent) | rotate(k_rope)]`` at each slot.

    With ``up_k`` the first is ``q_latent = q_nope up_k`` of each head.
    """
    rank, nope = gain.shape[0], q.shape[-1] - 2 * cos.shape[1]
    latent = rms_norm(kv[:, :rank], gain, eps=eps)
    parts = kv[:, rank:], q[..., nope:]
    k_rope, q_rope = (rotate(x, cos, sin, interleaved=interleaved) for x in parts)
    pages = write_latent(pages, scale, latent, k_rope, slots, format=format, layer=layer)
    q_nope = q[..., :nope]
    return q_nope if up_k is None else absorb(q_nope, up_k), q_rope, pages


def absorb(q_nope: Float[Array, "tokens heads nope"], up_k: AbsorbedKeys) -> LatentQueries:
    """``q_nope up_k`` of each head, accumulated in float32, rounded once to q's dtype."""
    dtype = q_nope.dtype

    def product(x: Array, y: Array) -> Array:
        exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
        wide = {"precision": exact, "preferred_element_type": jnp.float32}
        return jnp.einsum("thd,hdr->thr", x, y, **wide).astype(dtype)

    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    # XLA's CPU backend has no batched product of 16-bit operands into float32.
    return lax.platform_dependent(q_nope, up_k, cpu=widened, default=product)


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
