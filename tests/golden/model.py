"""Routers and rotary tables."""

import jax.numpy as jnp
import numpy as np

from mla_jax.config import MoEConfig, RopeConfig, YarnConfig
from mla_jax.model.moe import choose_experts
from mla_jax.model.rope import cos_sin, rotate
from tests.golden.common import Case, Check, compare


def _boundary(values: np.ndarray, kept: int) -> float:
    """Smallest distance between the last kept and the first dropped value of any row."""
    if kept >= values.shape[-1]:
        return np.inf
    ranked = -np.sort(-values, axis=-1)
    gap = ranked[:, kept - 1] - ranked[:, kept]
    return float(np.min(gap))


def _score_gap(logits: np.ndarray, bias: np.ndarray | None, moe: MoEConfig) -> float:
    """How far the nearest selection is from flipping: a fact of the vector, recomputed here."""
    x = logits.astype(np.float64)
    if moe.method == "noaux_tc":
        score = 1 / (1 + np.exp(-x)) + (0 if bias is None else bias.astype(np.float64))
    else:
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        score = e / e.sum(axis=-1, keepdims=True)
    if moe.method == "greedy":
        return _boundary(score, moe.topk)
    grouped = score.reshape(len(score), moe.groups, -1)
    best = -np.sort(-grouped, axis=-1)
    value = best[..., :2].sum(-1) if moe.method == "noaux_tc" else best[..., 0]
    order = np.argsort(-value, axis=-1)[:, : moe.topk_groups]
    inside = np.take_along_axis(grouped, order[..., None], axis=1).reshape(len(score), -1)
    return min(_boundary(value, moe.topk_groups), _boundary(inside, moe.topk))


def moe_router(case: Case) -> str | None:
    """The same experts; weights and gaps to 1e-5 (float32 softmax and sigmoid)."""
    i = case["in"]
    moe = MoEConfig(
        experts=i["num_experts"],
        topk=i["top_k"],
        width=1,
        shared=0,
        method=i["method"],
        groups=i["n_group"] or 1,
        topk_groups=i["topk_group"] or 1,
        normalise=bool(i["norm_topk_prob"]),
        scale=i["routed_scaling_factor"],
    )
    bias = i["e_score_correction_bias"]
    bias = None if bias is None else jnp.asarray(bias)
    weights, experts = map(np.asarray, choose_experts(jnp.asarray(i["logits"]), bias, moe))
    order = np.argsort(experts, axis=-1)
    got = {
        "experts": np.take_along_axis(experts, order, axis=-1),
        "weights": np.take_along_axis(weights, order, axis=-1),
        "min_score_gap": _score_gap(i["logits"], i["e_score_correction_bias"], moe),
    }
    return compare(case["out"], got, rtol=1e-5, atol=2e-7)


def yarn_rope(case: Case) -> str | None:
    """Tables to float32 of the angle (1e-7 of it, as the file says), rotations likewise."""
    i, out = case["in"], case["out"]
    yarn = YarnConfig(
        factor=float(i["factor"]),
        original=i["original_max_position_embeddings"],
        beta_fast=float(i["beta_fast"]),
        beta_slow=float(i["beta_slow"]),
        mscale=float(i["mscale"]),
        mscale_all_dim=float(i["mscale_all_dim"]),
    )
    rope = RopeConfig(dim=i["dim"], theta=float(i["base"]), yarn=yarn)
    found = compare({"inv_freq": out["inv_freq"]}, {"inv_freq": rope.inv_freq()}, rtol=2e-6)
    scales = {
        "cos_sin_scale": rope.cos_sin_factor,
        "softmax_scale": i["qk_head_dim"] ** -0.5 * rope.score_factor,
    }
    found = found or compare({k: out[k] for k in scales}, scales, rtol=1e-12)
    positions = np.asarray(i["positions"])
    cos, sin = map(np.asarray, cos_sin(jnp.asarray(positions, jnp.int32), rope))
    slack = 3e-7 * float(positions.max()) + 1e-6
    tables = {"cos": cos, "sin": sin, "cos64": cos, "sin64": sin}
    found = found or compare({k: out[k] for k in tables}, tables, atol=slack)
    angles = cos_sin(jnp.asarray(np.asarray(i["apply_positions"]), jnp.int32), rope)
    turned = {
        f"{x}_rot": np.asarray(rotate(jnp.asarray(i[x]), *angles, interleaved=True))
        for x in ("q", "k")
    }
    return found or compare({k: out[k] for k in turned}, turned, atol=5 * slack)


CHECKS: dict[str, Check] = {"moe_router": moe_router, "yarn_rope": yarn_rope}
