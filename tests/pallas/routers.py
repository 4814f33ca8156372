"""Inputs of the router, and the truth about its choice."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from mla_jax.config import MoEConfig
from tests.cases import draw

MOES = {
    "greedy": MoEConfig(experts=10, topk=3, width=8, shared=0, method="greedy", scale=1.5),
    "one": MoEConfig(experts=1, topk=1, width=8, shared=0, method="greedy"),
    "v2_lite": MoEConfig(experts=64, topk=6, width=8, shared=2, method="greedy"),
    "v2": MoEConfig(
        experts=160, topk=6, width=8, shared=2, method="group_limited_greedy",
        groups=8, topk_groups=3, scale=16.0,
    ),
    "v3": MoEConfig(
        experts=256, topk=8, width=8, shared=1, method="noaux_tc",
        groups=8, topk_groups=4, normalise=True, scale=2.5,
    ),
    "k2": MoEConfig(
        experts=384, topk=8, width=8, shared=1, method="noaux_tc", normalise=True, scale=2.827
    ),
    "v4": MoEConfig(
        experts=256, topk=6, width=8, shared=1, method="sqrtsoftplus", normalise=True, scale=1.5
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of ``route_tokens`` in numpy."""

    x: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray | None
    real: np.ndarray
    moe: MoEConfig

    @property
    def args(self):
        bias = None if self.bias is None else jnp.asarray(self.bias)
        return jnp.asarray(self.x), jnp.asarray(self.kernel), bias, jnp.asarray(self.real)

    def take(self, rows) -> "Case":
        return replace(self, x=self.x[rows], real=self.real[rows])


def case(rng, tokens, moe, *, hidden=192, dtype="float32") -> Case:
    """Scores far enough from each other that rounding chooses nobody."""
    return Case(
        x=draw(rng, tokens, hidden, dtype=dtype),
        kernel=draw(rng, hidden, moe.experts, dtype="float32", std=2 * hidden**-0.5),
        bias=draw(rng, moe.experts, dtype="float32", std=0.3) if moe.biased else None,
        real=rng.random(tokens) < 0.8,
        moe=moe,
    )


BELOW = "v3", "k2", "v4"


def below_zero(rng, tokens, name) -> Case:
    """What is chosen by lies below zero for every expert."""
    c = case(rng, tokens, MOES[name])
    return replace(c, bias=c.bias - 4)


def few_scores() -> Case:
    """Four groups have one score that is not zero, three of them are kept, six experts chosen."""
    moe = MOES["v2"]
    logits = np.full(moe.experts, -200, np.float32)
    logits[[0, 25, 50, 75]] = 1, 2, 2.5, 3
    x = np.zeros((2, 128), np.float32)
    x[:, 0] = 1
    kernel = np.where(np.arange(128)[:, None] == 0, logits, 0).astype(np.float32)
    return Case(x=x, kernel=kernel, bias=None, real=np.ones(2, bool), moe=moe)


def judge_few_scores(got) -> None:
    """Of ``few_scores``: the expert of the group that is not kept has no weight."""
    weights, experts = map(np.asarray, got)
    assert experts.tolist() == [[75, 50, 25, 0, 1, 2]] * 2
    assert (weights[:, :3] > 0).all() and not weights[:, 3:].any()


def truth(c: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights and experts in float64, expert by expert; how near the next choice was."""
    moe = c.moe
    logits = c.x.astype(np.float64) @ c.kernel.astype(np.float64)
    weights = np.zeros((len(c.x), moe.topk))
    experts = np.full((len(c.x), moe.topk), -1)
    gaps = np.full(len(c.x), np.inf)
    for t, row in enumerate(logits):
        if moe.biased:
            v4 = moe.method == "sqrtsoftplus"
            scores = np.sqrt(np.logaddexp(row, 0)) if v4 else 1 / (1 + np.exp(-row))
            choice = scores + (0 if c.bias is None else c.bias)
        else:
            scores = np.exp(row - row.max())
            choice = scores = scores / scores.sum()
        grouped = choice.reshape(moe.groups, -1)
        best = -np.sort(-grouped, axis=1)
        worth = best[:, :2].sum(axis=1) if moe.biased else best[:, 0]
        allowed = np.ones_like(grouped, bool)
        if moe.method != "greedy":
            order = np.argsort(-worth, kind="stable")
            allowed[order[moe.topk_groups :]] = False
            if moe.topk_groups < moe.groups:
                gaps[t] = np.diff(-worth[order[moe.topk_groups - 1 :][:2]])[0]
        ranked = np.where(allowed.ravel(), choice, -np.inf)
        order = np.argsort(-ranked, kind="stable")
        near = -np.diff(ranked[order[: moe.topk + 1]])
        gaps[t] = min(gaps[t], near.min(initial=np.inf))
        chosen = order[: moe.topk]
        share = scores[chosen]
        weights[t] = (
            share / (share.sum() + 1e-20) * moe.scale if moe.normalise else share * moe.scale
        )
        if c.real[t]:
            experts[t] = chosen
    return weights, experts, gaps


def judge(got, c: Case) -> None:
    """Equal choices where no two scores are closer than float32 can tell; close weights."""
    weights, experts, gaps = truth(c)
    clear = gaps > 1e-6
    assert clear.mean() > 0.9, "nearly everything is a tie"
    found, chosen = (np.asarray(a) for a in got)
    assert found.dtype == np.float32 and chosen.dtype == np.int32
    np.testing.assert_array_equal(chosen[clear], experts[clear])
    np.testing.assert_allclose(found[clear], weights[clear], rtol=2e-5, atol=1e-6)
    assert (chosen[~c.real] == -1).all()
