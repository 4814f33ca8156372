"""Definition of sparse attention."""

import jax.numpy as jnp
from jax.nn import logsumexp

from mla_jax.pallas.axes import RowQueries
from mla_jax.types import Array, AttnState, Bool, Float

__all__ = ["attend"]


def attend(
    q: RowQueries, rows: Float[Array, "tokens keys row"], seen: Bool[Array, "tokens keys"], *,
    scale: float, value: int,
) -> AttnState:  # fmt: skip
    """``out = softmax(scale * q rows^T) rows[:value]`` of each token over its own rows, float32.

    A row that is not seen may hold anything; no row gives ``(0, -inf)``; equal rows count each. A
    score of plus infinity gives NaN.
    """
    rows = jnp.where(seen[..., None], rows.astype(jnp.float32), 0.0)
    s = jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), rows, precision="highest")
    s = jnp.where(seen[:, None], scale * s, -jnp.inf)
    lse = logsumexp(jnp.where(jnp.isposinf(s), jnp.nan, s), axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("thk,tkd->thd", p, rows[..., :value], precision="highest")
    return AttnState(out=out, lse=lse)
