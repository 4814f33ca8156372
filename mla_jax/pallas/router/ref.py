"""Definition of the router, and its path on every device."""

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.config import MoEConfig
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.axes import Choices, ChoiceWeights, Hidden, RowNorm
from mla_jax.types import Array, Bool, Float, Int

__all__ = [
    "choose_experts",
    "route_tokens",
    "router_logits",
    "scaled_weights",
    "scores_of",
]


def route_tokens(
    x: Hidden, kernel: Float[Array, "hidden experts"], choice_bias: Float[Array, "experts"] | None,
    real: Bool[Array, "tokens"], *, moe: MoEConfig, first: bool = False,
    norm: RowNorm | None = None,
) -> tuple[ChoiceWeights, Choices] | tuple[ChoiceWeights, Choices, Hidden]:  # fmt: skip
    """``choose_experts(x @ kernel)`` in float32; a token that is not real has experts -1.

    ``first``: also ``x``. ``norm``: of ``x`` normalised and rounded, which is returned too.
    """
    if norm is not None:  # XLA may compute on with what it has not rounded: the barrier forbids it
        x = lax.optimization_barrier(rms_norm(x, norm.gain, eps=norm.eps))
    weights, experts = choose_experts(router_logits(x, kernel), choice_bias, moe)
    found = weights, jnp.where(real[:, None], experts, -1)
    return (*found, x) if first or norm is not None else found


def router_logits(
    x: Float[Array, "tokens hidden"], kernel: Float[Array, "hidden experts"]
) -> Float[Array, "tokens experts"]:
    """``x @ kernel`` in float32, never TF32."""
    wide = (a.astype(jnp.float32) for a in (x, kernel))
    return jnp.matmul(*wide, precision=lax.Precision.HIGHEST)


def choose_experts(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, "experts"] | None,
    moe: MoEConfig,
) -> tuple[Float[Array, "tokens topk"], Int[Array, "tokens topk"]]:
    """``(weights, experts)`` of each token, from float32 router logits.

    * ``greedy``: ``s = softmax(logits)``, the ``topk`` largest.
    * ``group_limited_greedy``: the same inside the ``topk_groups`` groups of largest maximum.
    * ``noaux_tc``: ``s = sigmoid(logits)``; the choice is by ``z = s + choice_bias`` inside the
      groups of largest sum of their two best ``z``; the weights are ``s``, never ``z``.
    * ``sqrtsoftplus``: the same with ``s = sqrt(softplus(logits))``.

    Of equals the lower index is taken. Weights are divided by their sum if ``moe.normalise``,
    then multiplied by ``moe.scale``.
    Source: DeepSeek-V2 (arXiv:2405.04434) 2.2, DeepSeek-V3 (arXiv:2412.19437) 2.1.2; DeepSeek-V4.
    """
    choice, scores = _choice(logits, choice_bias, moe)
    weights, experts = lax.top_k(choice, moe.topk)
    if choice is not scores:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    return scaled_weights(weights, moe), experts


def _choice(
    logits: Float[Array, "tokens experts"],
    choice_bias: Float[Array, "experts"] | None,
    moe: MoEConfig,
) -> tuple[Float[Array, "tokens experts"], Float[Array, "tokens experts"]]:
    """What experts are chosen by, and what their weights are; one array if it is the same."""
    grouped = (*logits.shape[:-1], moe.groups, moe.experts // moe.groups)
    scores = scores_of(logits, moe)
    if moe.biased:
        choice = scores if choice_bias is None else scores + choice_bias
        best_two, _ = lax.top_k(choice.reshape(grouped), min(2, moe.experts // moe.groups))
        return _keep_best_groups(choice, moe, best_two.sum(axis=-1), -jnp.inf), scores
    if moe.method == "group_limited_greedy":
        scores = _keep_best_groups(scores, moe, scores.reshape(grouped).max(axis=-1), 0.0)
    return scores, scores


def scores_of(logits: Float[Array, "tokens experts"], moe: MoEConfig) -> Float[Array, "..."]:
    """Of every expert: softmax, sigmoid, or the root of softplus, as the method says."""
    match moe.method:
        case "noaux_tc":
            return jax.nn.sigmoid(logits)
        case "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(logits))
    return jax.nn.softmax(logits, axis=-1)


def scaled_weights(weights: Float[Array, "tokens topk"], moe: MoEConfig) -> Float[Array, "..."]:
    """Scores of the chosen experts, divided by their sum if ``moe.normalise``, times the scale."""
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * float(moe.scale)


def _keep_best_groups(
    scores: Float[Array, "tokens experts"], moe: MoEConfig, group_value: Array, fill: float
) -> Float[Array, "tokens experts"]:
    """Scores of experts outside the ``topk_groups`` best groups become ``fill``."""
    _, best = lax.top_k(group_value, moe.topk_groups)
    kept = jax.nn.one_hot(best, moe.groups, dtype=jnp.bool_).any(axis=1)
    kept = jnp.repeat(kept, moe.experts // moe.groups, axis=1)
    return jnp.where(kept, scores, fill)
