"""Reference algebra of attention states."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.types import Array, AttnState, Float

__all__ = ["apply_sinks", "merge_attn_states"]


def merge_attn_states(*states: AttnState, out_dtype: DTypeLike) -> AttnState:
    """The state over the union of disjoint key sets, from the states over each of them.

    ``out = sum_i exp(lse_i - lse) * out_i``, natural-log ``lse = log(sum_i exp(lse_i))``. This is
    associative and commutative up to rounding, with identity ``(0, -inf)``: merging the
    identity changes no bit of ``out`` or ``lse``, except that -0 becomes 0. ``+inf`` marks an
    empty part in some kernels and counts as ``-inf``. An empty part contributes nothing, whatever
    its ``out`` holds; only empty parts give ``(0, -inf)``. A NaN ``lse`` is a bug upstream: it
    spreads to the result. Computed in float32, rounded once to ``out_dtype``.

    Source: online softmax, arXiv:1805.02867; attention states, arXiv:2501.01005 section 2.2.
    """
    lses = jnp.stack([_empty_is_minus_inf(s.lse) for s in states])
    top = jnp.max(lses, axis=0)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - top)  # [states, tokens, heads]
    total = jnp.sum(weights, axis=0)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = 0.0
    for s, w in zip(states, weights / total, strict=True):
        w = w[..., None]
        out = out + jnp.where(w == 0, 0.0, w * s.out.astype(jnp.float32))
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return AttnState(out=jnp.asarray(out).astype(out_dtype), lse=lse)


def apply_sinks(state: AttnState, sinks: Float[Array, "heads"]) -> AttnState:
    """Attention with one extra key per head, of logit ``sink`` and value zero.

    ``out * exp(lse) / (exp(lse) + exp(sink)) = out * sigmoid(lse - sink)``. A sink is compared
    with scaled logits. ``-inf`` changes nothing, ``+inf`` gives zero; ``lse`` is unchanged.
    """
    sinks = sinks.astype(jnp.float32)
    absent = jnp.isneginf(sinks)
    lse = _empty_is_minus_inf(state.lse)
    share = jax.nn.sigmoid(lse - jnp.where(absent, 0.0, sinks))
    share = jnp.where(absent, jnp.where(jnp.isneginf(lse), 0.0, 1.0), share)[..., None]
    out = jnp.where(share == 0, 0.0, share * state.out.astype(jnp.float32))
    return AttnState(out=out.astype(state.out.dtype), lse=state.lse)


def _empty_is_minus_inf(
    lse: Float[Array, "tokens heads"],
) -> Float[Array, "tokens heads"]:
    return jnp.where(jnp.isposinf(lse), -jnp.inf, lse.astype(jnp.float32))
