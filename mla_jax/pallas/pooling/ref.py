"""Definition of V4's compressed states, and their path on every device."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from mla_jax.cache import LatentCache, RecordCache, StatePool
from mla_jax.pallas.append.ref import rms_norm, rotate
from mla_jax.pallas.axes import Groups, Layer
from mla_jax.pallas.cache_io.records import gather_rows, write_records
from mla_jax.pallas.cache_io.ref import write_latent
from mla_jax.types import Array, Bool, Float, Int

__all__ = ["pool_states", "pooled", "rotate_tail", "write_split"]


def pool_states(
    ring: LatentCache,
    pools: tuple[StatePool, ...],
    groups: Groups,
    *,
    eps: float,
    layer: Layer = None,
) -> tuple[LatentCache, tuple[LatentCache | RecordCache, ...]]:
    """``(ring, caches)``: each group's ``pooled`` state at its slot, and the ring's new rows.

    A row of the ring is ``[values | gates + bias]`` of each pool. All rows are read before any is
    written, so a place holds what its token gave, of this step or of an earlier one.
    """
    rows = jnp.concatenate([_row(p, groups.positions) for p in pools], axis=-1)
    waited = gather_rows(ring, groups.kept, dtype=jnp.float32, layer=layer)
    here = (groups.tokens >= 0)[..., None]
    parts = jnp.where(here, rows[jnp.maximum(groups.tokens, 0)], waited)
    rows, parts = lax.optimization_barrier((rows, parts))
    cuts = np.cumsum([2 * p.values[0].size for p in pools])[:-1].tolist()
    shares = jnp.split(parts, cuts, axis=-1)
    caches = [_stored(p, x, groups, eps, layer) for p, x in zip(pools, shares, strict=True)]
    return write_split(ring, rows, groups.keep, layer), tuple(caches)


def _row(pool: StatePool, positions: Int[Array, "tokens"]) -> Float[Array, "tokens width"]:
    """``[values | gates + bias]`` of each token."""
    gates = pool.gates + pool.bias[positions % pool.bias.shape[0]]
    return jnp.stack([pool.values, gates], axis=1).reshape(len(positions), 2 * gates[0].size)


def _stored(pool, parts, groups, eps, layer) -> LatentCache | RecordCache:
    """The pool's cache with the states of these groups."""
    shaped = parts.reshape(*parts.shape[:2], 2, *pool.values.shape[1:])
    there = (groups.tokens >= 0) | (groups.kept >= 0)
    angles = groups.cos, groups.sin
    states = pooled(shaped[:, :, 0], shaped[:, :, 1], there, pool.gain, *angles, eps=eps)
    slots = jnp.where(groups.ends >= 0, pool.slots[jnp.maximum(groups.ends, 0)], -1)
    return write_split(pool.cache, states.astype(pool.gain.dtype), slots, layer)


def write_split[C: LatentCache | RecordCache](
    cache: C, rows: Array, slots: Array, layer: Layer
) -> C:
    """``rows`` at ``slots`` of any cache, cut into the values that its format has."""
    if isinstance(cache, RecordCache):
        cuts = np.cumsum([f.count for f in cache.format.values])[:-1].tolist()
        return write_records(cache, tuple(jnp.split(rows, cuts, axis=-1)), slots, layer=layer)
    parts = rows[:, : cache.rank], rows[:, cache.rank :]
    facts = {"format": cache.format, "layer": layer}
    return replace(cache, pages=write_latent(cache.pages, cache.scale, *parts, slots, **facts))


def pooled(
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
    state = (p * v).sum(axis=1) / jnp.where(total > 0, total, 1)
    return rotate_tail(rms_norm(state, gain, eps=eps), cos, sin)


def rotate_tail(
    x: Float[Array, "tokens *heads dim"],
    cos: Float[Array, "tokens pairs"],
    sin: Float[Array, "tokens pairs"],
) -> Float[Array, "tokens *heads dim"]:
    """The last ``2 * pairs`` channels rotated, pairs ``(2i, 2i + 1)``; the others as they are."""
    rest = x.shape[-1] - 2 * cos.shape[-1]
    turned = rotate(x[..., rest:], cos, sin, interleaved=True)
    return jnp.concatenate([x[..., :rest], turned], axis=-1)
