"""Mixture of experts: a float32 router, grouped expert products, one shared SwiGLU."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax import ops
from mla_jax.config import ModelConfig, MoEConfig
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.sharding import divided, divides
from mla_jax.placement import SHARDS, Placement
from mla_jax.types import Array, Bool, Float, Int

__all__ = ["Experts", "MoE", "Router", "choose_experts"]


def _keep_best_groups(
    scores: Float[Array, "tokens experts"], moe: MoEConfig, group_value: Array, fill: float
) -> Float[Array, "tokens experts"]:
    """Scores of experts outside the ``topk_groups`` best groups become ``fill``."""
    _, best = lax.top_k(group_value, moe.topk_groups)
    kept = jax.nn.one_hot(best, moe.groups, dtype=jnp.bool_).any(axis=1)
    kept = jnp.repeat(kept, moe.experts // moe.groups, axis=1)
    return jnp.where(kept, scores, fill)


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

    Weights are divided by their sum if ``moe.normalise``, then multiplied by ``moe.scale``.
    Source: DeepSeek-V2 (arXiv:2405.04434) 2.2, DeepSeek-V3 (arXiv:2412.19437) 2.1.2.
    """
    grouped = (*logits.shape[:-1], moe.groups, -1)
    if moe.method == "noaux_tc":
        scores = jax.nn.sigmoid(logits)
        choice = scores if choice_bias is None else scores + choice_bias
        best_two, _ = lax.top_k(choice.reshape(grouped), min(2, moe.experts // moe.groups))
        choice = _keep_best_groups(choice, moe, best_two.sum(axis=-1), -jnp.inf)
        _, experts = lax.top_k(choice, moe.topk)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    else:
        scores = jax.nn.softmax(logits, axis=-1)
        if moe.method == "group_limited_greedy":
            scores = _keep_best_groups(scores, moe, scores.reshape(grouped).max(axis=-1), 0.0)
        weights, experts = lax.top_k(scores, moe.topk)
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * moe.scale, experts


class Router(nnx.Module):
    """Scores every expert in float32, whatever the dtype of the model."""

    def __init__(self, hidden: int, moe: MoEConfig, *, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (hidden, moe.experts), jnp.float32)
        self.kernel = nnx.Param(kernel * hidden**-0.5)
        self.choice_bias = (
            nnx.Param(jnp.zeros((moe.experts,), jnp.float32)) if moe.method == "noaux_tc" else None
        )
        self.moe = moe

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens topk"], Int[Array, "tokens topk"]]:
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        bias = None if self.choice_bias is None else self.choice_bias[...]
        return choose_experts(logits, bias, self.moe)


class Experts(nnx.Module):
    """``experts`` SwiGLUs, of which each token passes its own."""

    def __init__(self, hidden: int, moe: MoEConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def init(in_dim: int, out_dim: int) -> nnx.Param:
            w = jax.random.normal(rngs.params(), (moe.experts, in_dim, out_dim), jnp.float32)
            return nnx.Param((w * in_dim**-0.5).astype(dtype))

        self.gate = init(hidden, moe.width)
        self.up = init(hidden, moe.width)
        self.down = init(moe.width, hidden)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens topk"],
        experts: Int[Array, "tokens topk"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """``sum_k weights[:, k] * expert_k(x)``; padding belongs to no expert and gives 0.

        Over several devices of a ``placement`` each one adds up what its own experts give, and
        then all add up what each has.
        """
        chosen = jnp.where(real[:, None], experts, -1)
        run = partial(ops.routed_experts, backend=ops.named("routed_experts", backend))

        def share(gate, up, down, x, weights, chosen):
            mine = chosen - lax.axis_index(SHARDS) * gate.shape[0]
            mine = jnp.where((chosen >= 0) & (mine >= 0) & (mine < gate.shape[0]), mine, -1)
            return lax.psum(run(x, gate, up, down, weights, mine), SHARDS)

        gate, up, down = self.gate[...], self.up[...], self.down[...]
        if placement is None or not divides(placement, gate.shape[0]):
            return run(x, gate, up, down, weights, chosen)
        given = (0, 0, 0, None, None, None)
        on_all = divided(share, placement, given=given, returned=None)
        return on_all(gate, up, down, x, weights, chosen)


class MoE(nnx.Module):
    """Routed experts plus the shared SwiGLU."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        moe = config.moe
        assert moe is not None, "a sparse layer needs config.moe"
        self.router = Router(config.hidden, moe, rngs=rngs)
        self.experts = Experts(config.hidden, moe, dtype=dtype, rngs=rngs)
        self.shared = (
            SwiGLU(
                config.hidden,
                moe.shared * moe.width,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
            )
            if moe.shared
            else None
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Rows that are not real reach no expert and give the shared part only.

        Over several devices of a ``placement`` each one has its own experts.
        """
        y = self.experts(x, *self.router(x), real, backend=backend, placement=placement)
        return y if self.shared is None else y + self.shared(x)
