"""Definition of the selection: the best positions of each row of scores, by sorting."""

import jax.numpy as jnp
from jax import lax

from mla_jax.types import Array, Float, Int

__all__ = ["best_positions"]


def best_positions(
    scores: Float[Array, "rows keys"], lens: Int[Array, "rows"], *, k: int
) -> Int[Array, "rows {k}"]:
    """The ``k`` positions below ``lens`` with the largest scores, ascending; -1 behind them.

    Of equal scores (0 and -0 are) the lower position is taken; NaN comes behind ``-inf``. A row of
    at most ``k`` positions takes all of them; a negative length is 0.
    """
    keys = scores.shape[1]
    at = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), scores.shape)
    seen, nan = at < lens[:, None], jnp.isnan(scores)
    order = ~seen, nan, jnp.where(nan | (scores == 0), 0, -scores), at
    best = lax.sort(order, num_keys=4)[-1][:, :k]
    count = jnp.clip(lens, 0, min(keys, k))[:, None]
    best = jnp.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=keys)
    best = jnp.sort(jnp.where(jnp.arange(k, dtype=jnp.int32) < count, best, keys))
    return jnp.where(best < keys, best, -1)
