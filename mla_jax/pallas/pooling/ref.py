"""Definition of V4's compressed states, and their path on every device."""

import jax.numpy as jnp

from mla_jax.pallas.append.ref import rms_norm, rotate
from mla_jax.types import Array, Bool, Float

__all__ = ["pool_states", "rotate_tail"]


def pool_states(
    values: Float[Array, "groups span halves dim"],
    gates: Float[Array, "groups span halves dim"],
    there: Bool[Array, "groups span"],
    gain: Float[Array, "dim"],
    cos: Float[Array, "groups pairs"],
    sin: Float[Array, "groups pairs"],
    *,
    eps: float,
) -> Float[Array, "groups dim"]:
    """``rotate(rms_norm(sum_j softmax_j(gate_j) value_j))``, softmax over tokens, by channel.

    With two halves the older half of the places take their first values and gates, the newer half
    their second ones. A place that is not there has gate ``-inf``; a group of none gives 0.
    """
    half = jnp.arange(values.shape[1]) * values.shape[2] // values.shape[1]  # of each place
    v, g = (jnp.take_along_axis(x, half[None, :, None, None], axis=2) for x in (values, gates))
    v = jnp.where(there[..., None], v[:, :, 0], 0)
    g = jnp.where(there[..., None], g[:, :, 0], -jnp.inf)
    p = jnp.where(there[..., None], jnp.exp(g - g.max(axis=1, keepdims=True)), 0)
    total = p.sum(axis=1)
    pooled = (p * v).sum(axis=1) / jnp.where(total > 0, total, 1)
    return rotate_tail(rms_norm(pooled, gain, eps=eps), cos, sin)


def rotate_tail(
    x: Float[Array, "tokens *heads dim"],
    cos: Float[Array, "tokens pairs"],
    sin: Float[Array, "tokens pairs"],
) -> Float[Array, "tokens *heads dim"]:
    """The last ``2 * pairs`` channels rotated, pairs ``(2i, 2i + 1)``; the others as they are."""
    rest = x.shape[-1] - 2 * cos.shape[-1]
    turned = rotate(x[..., rest:], cos, sin, interleaved=True)
    return jnp.concatenate([x[..., :rest], turned], axis=-1)
