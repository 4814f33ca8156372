"""Which convention a side follows: each step of a layer computed again, in numpy, one way by one.

A step takes the tensors that the same side wrote down just before it and the checkpoint's weights,
so a mistake is named where it is made, whatever came before. The way that config.json asks for is
tried first, then every way that differs from it by one convention; the first whose result is the
side's own tensor is what that side does. Source of the conventions and of the usual mistakes:
the reports of DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and V3.2.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mla_jax.commands.trace import Trace
from mla_jax.config import ModelConfig
from mla_jax.model.reading import Tensors

__all__ = ["STAGES", "TOLERANCE", "Finding", "Site", "Stage", "difference", "find", "told_apart"]

TOLERANCE = 3e-4
"""Of the largest magnitude: above what float32 sums in another order leave, below any mistake."""
_SETS = 2e-3
"""Share of a selection that ties may turn."""

Picked = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One layer of one side's trace, with the checkpoint beside it."""

    trace: Trace
    config: ModelConfig
    tensors: Tensors
    number: int

    def has(self, name: str) -> bool:
        return f"layers.{self.number}.{name}" in self.trace

    def t(self, name: str) -> np.ndarray:
        """A tensor of this layer, float64."""
        return self.trace[f"layers.{self.number}.{name}"].astype(np.float64)

    def w(self, name: str) -> np.ndarray:
        """A weight of this layer by its released name."""
        return self.tensors[f"model.layers.{self.number}.{name}"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """``x Wᵀ (+ b)``."""
        bias = f"model.layers.{self.number}.{name}.bias"
        y = x @ self.w(f"{name}.weight").T.astype(np.float64)
        return y + self.tensors[bias] if bias in self.tensors else y

    @property
    def before(self) -> np.ndarray:
        """The residual that enters the layer."""
        last = f"layers.{self.number - 1}.residual" if self.number else "embedding"
        return self.trace[last].astype(np.float64)

    @cached_property
    def sparse(self) -> bool:
        return self.config.sparse_layers[self.number]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step: its result, its conventions (what config.json asks for first) and its formula."""

    output: str
    choices: Callable[[Site], dict[str, tuple[str, ...]]]
    compute: Callable[[Site, Picked], np.ndarray]
    when: Callable[[Site], bool] = lambda site: True


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one side does in one step. ``convention`` is empty where no known way explains it."""

    side: str
    layer: int
    output: str
    convention: str
    value: str
    expected: str
    error: float  # of the way named, relative to the largest magnitude

    def __str__(self) -> str:
        where = f"layers.{self.layer}.{self.output}"
        if not self.convention:
            return f"{where}: no known convention explains {self.side} (nearest: {self.value})"
        asked = f"config.json asks for {self.expected}"
        return f"{where}: {self.convention}: {self.side} has {self.value}; {asked}"


def difference(name: str, mine: np.ndarray, theirs: np.ndarray) -> tuple[float, bool]:
    """Largest difference, and whether it is more than rounding.

    A choice of experts is compared exactly; a selection by the share of differing entries.
    """
    if mine.shape != theirs.shape or not np.isfinite(mine).all():
        return math.inf, True
    delta = np.abs(mine.astype(np.float64) - theirs)
    largest = float(delta.max(initial=0.0))
    if name.endswith(".selected"):
        return largest, bool(np.count_nonzero(delta) > _SETS * delta.size)
    if name.endswith(".router_choice"):
        return largest, largest > 0
    return largest, largest > TOLERANCE * max(float(np.abs(theirs).max(initial=0.0)), 1e-30)


def find(stage: Stage, site: Site) -> Finding:
    """The way of ``stage`` that gives this side's tensor."""
    actual, choices = site.t(stage.output), stage.choices(site)
    defaults = {name: values[0] for name, values in choices.items()}
    nearest, least = "", math.inf
    for name, value in _ways(choices):
        got = stage.compute(site, defaults | ({name: value} if name else {}))
        error, wrong = difference(f".{stage.output}", actual, got)
        if not wrong:
            return _finding(stage, site, name, value, defaults.get(name, ""), error)
        if error < least:
            nearest, least = f"{name}: {value}" if name else "as config.json asks", error
    return _finding(stage, site, "", f"{nearest}, off by {least:.1e}", "", least)


def _finding(
    stage: Stage, site: Site, name: str, value: str, expected: str, error: float
) -> Finding:
    return Finding(
        side=site.trace.side,
        layer=site.number,
        output=stage.output,
        convention=name,
        value=value,
        expected=expected,
        error=error,
    )


def _ways(choices: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """The configured way, named ``("", "")``, then each single change."""
    yield "", ""
    for name, values in choices.items():
        for value in values[1:]:
            yield name, value


def told_apart(stage: Stage, site: Site) -> dict[str, str]:
    """Conventions of a step whose other values would give another tensor here."""
    choices = stage.choices(site)
    defaults = {name: values[0] for name, values in choices.items()}
    right = stage.compute(site, defaults)
    seen = {}
    for name, value in _ways(choices):
        if name:
            other = stage.compute(site, defaults | {name: value})
            if difference(f".{stage.output}", other, right)[1]:
                seen[name] = defaults[name]
    return seen


# ------------------------------------------------------------------------------------ norms


def _rms(x: np.ndarray, gain: np.ndarray | float, eps: float) -> np.ndarray:
    return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


_BLOCK_NORM = {
    "block norm": ("root mean square", "mean and variance", "omitted"),
    "norm gain": ("g", "1 + g"),
}


def _block_norm(x: np.ndarray, gain: np.ndarray, eps: float, picked: Picked) -> np.ndarray:
    if picked["block norm"] == "omitted":
        return x
    if picked["block norm"] == "mean and variance":
        x = x - x.mean(-1, keepdims=True)
    return _rms(x, gain if picked["norm gain"] == "g" else 1 + gain, eps)


def _attn_norm(site: Site, picked: Picked) -> np.ndarray:
    return _block_norm(site.before, site.w("input_layernorm.weight"), site.config.eps, picked)


def _mlp_norm(site: Site, picked: Picked) -> np.ndarray:
    gain = site.w("post_attention_layernorm.weight")
    return _block_norm(site.t("after_attn"), gain, site.config.eps, picked)


def _query_latent(site: Site, picked: Picked) -> np.ndarray:
    x = site.linear(site.t("attn_norm"), "self_attn.q_a_proj")
    if picked["query latent norm"] == "omitted":
        return x
    return _rms(x, site.w("self_attn.q_a_layernorm.weight"), site.config.latent_eps)


def _latent(site: Site, picked: Picked) -> np.ndarray:
    row, rank = site.t("row"), site.config.dims.rank
    gain, way = site.w("self_attn.kv_a_layernorm.weight"), picked["key/value latent norm"]
    if way == "omitted":
        return row[:, :rank]
    if way == "over the latent and the rotary key":
        ones = np.ones(site.config.dims.rope)
        return _rms(row, np.concatenate([gain, ones]), site.config.latent_eps)[:, :rank]
    return _rms(row[:, :rank], gain, site.config.latent_eps)


# --------------------------------------------------------------------------------- products


def _query(site: Site, picked: Picked) -> np.ndarray:
    d = site.config.dims
    if d.q_rank is None:
        y = site.linear(site.t("attn_norm"), "self_attn.q_proj")
    else:
        y = site.linear(site.t("query_latent"), "self_attn.q_b_proj")
    if picked["order of query heads"] == "heads last":
        return y.reshape(-1, d.qk, d.heads).swapaxes(1, 2)
    return y.reshape(-1, d.heads, d.qk)


def _row(site: Site, picked: Picked) -> np.ndarray:
    return site.linear(site.t("attn_norm"), "self_attn.kv_a_proj_with_mqa")


# --------------------------------------------------------------------------------- rotation

_PAIRS, _HALVES = "pairs (2i, 2i + 1)", "halves (i, i + rope / 2)"


def _rotation_choices(site: Site) -> dict[str, tuple[str, ...]]:
    rope = site.config.rope
    if rope.dim == 0:
        return {}
    layouts = (_PAIRS, _HALVES) if rope.interleaved else (_HALVES, _PAIRS)
    choices = {
        "rotation layout": layouts,
        "rotary channels of a head": ("last", "first"),
        "rotation": ("applied", "omitted", "backwards", "positions from 1"),
    }
    if rope.yarn is not None:
        m = 0.1 * math.log(rope.yarn.factor) + 1 if rope.yarn.factor > 1 else 1.0
        choices["rotary frequencies"] = ("YaRN", "plain, YaRN forgotten")
        choices["factor on cos and sin"] = (f"{rope.cos_sin_factor:.4g}", f"m = {m:.4g}")
    return choices


def _rotate(site: Site, x: np.ndarray, picked: Picked) -> np.ndarray:
    """``x[tokens, …, rope]`` turned by each token's position."""
    rope = site.config.rope
    if rope.dim == 0 or picked["rotation"] == "omitted":
        return x
    factor = rope.cos_sin_factor
    if picked.get("rotary frequencies", "YaRN") != "YaRN":
        rope = replace(rope, yarn=None)
    chosen = picked.get("factor on cos and sin", "")
    if chosen.startswith("m = "):
        factor = 0.1 * math.log(site.config.rope.yarn.factor) + 1  # pyright: ignore
    at = np.arange(len(x), dtype=np.float64)
    at = at + 1 if picked["rotation"] == "positions from 1" else at
    at = -at if picked["rotation"] == "backwards" else at
    angle = at[:, None] * rope.inv_freq().astype(np.float64)
    angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), -1)
    return _turn(x, np.cos(angle) * factor, np.sin(angle) * factor, picked["rotation layout"])


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, layout: str) -> np.ndarray:
    half = x.shape[-1] // 2
    pairs = layout == _PAIRS
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, a * sin + b * cos
    if pairs:
        return np.stack(turned, axis=-1).reshape(x.shape)
    return np.concatenate(turned, axis=-1)


def _query_rope(site: Site, picked: Picked) -> np.ndarray:
    d, q = site.config.dims, site.t("query")
    first = picked.get("rotary channels of a head") == "first"
    return _rotate(site, q[..., : d.rope] if first else q[..., d.nope :], picked)


def _query_nope(site: Site, picked: Picked) -> np.ndarray:
    d, q = site.config.dims, site.t("query")
    first = picked["rotary channels of a head"] == "first"
    return q[..., d.rope :] if first else q[..., : d.nope]


def _key_choices(site: Site) -> dict[str, tuple[str, ...]]:
    norm = {"norm of the rotary key": ("none", "the latent's")}
    return _rotation_choices(site) | norm


def _key_rope(site: Site, picked: Picked) -> np.ndarray:
    d, row = site.config.dims, site.t("row")
    if picked["norm of the rotary key"] != "none":
        row = _rms(row, 1.0, site.config.latent_eps)
    first = picked.get("rotary channels of a head") == "first"
    return _rotate(site, row[:, : d.rope] if first else row[:, d.rank :], picked)


# -------------------------------------------------------------------------------- selection


def _selection_choices(site: Site) -> dict[str, tuple[str, ...]]:
    if not site.config.kinds[site.number].selects:
        return {"selection of a layer without an indexer": ("of the layer before",)}
    pairs = site.config.indexer is not None and site.config.indexer.interleaved
    layouts = (_PAIRS, _HALVES) if pairs else (_HALVES, _PAIRS)
    return {
        "rotation layout of the indexer": layouts,
        "rotary channels of the indexer": ("first", "last"),
        "norm of index keys": ("layer norm with bias", "layer norm without bias", "RMS norm"),
        "ReLU of index scores": ("before the head weights", "omitted"),
        "head weights of the indexer": ("applied", "ignored"),
        "selection": ("top-k", "ignored"),
    }


def _selected(site: Site, picked: Picked) -> np.ndarray:
    """1 for each of the ``topk`` best earlier tokens of a query; all of them if they are fewer."""
    indexer = site.config.indexer
    assert indexer is not None  # asked of layers that have a selection
    if not site.config.kinds[site.number].selects:
        return site.trace[f"layers.{site.number - 1}.selected"].astype(np.float64)
    scores = _index_scores(site, picked)
    causal = np.tril(np.ones_like(scores, dtype=bool))
    if picked["selection"] == "ignored" or len(scores) <= indexer.topk:
        return causal.astype(np.float64)
    scores = np.where(causal, scores, -np.inf)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : indexer.topk]
    seen = np.zeros_like(scores)
    np.put_along_axis(seen, best, 1.0, axis=1)
    return seen * causal


def _index_scores(site: Site, picked: Picked) -> np.ndarray:
    indexer, own = site.config.indexer, "self_attn.indexer"
    assert indexer is not None
    q = site.linear(site.t("query_latent"), f"{own}.wq_b").reshape(-1, indexer.heads, indexer.dim)
    x = site.t("attn_norm")
    k = x @ site.w(f"{own}.wk.weight").T.astype(np.float64)
    way, gain = picked["norm of index keys"], site.w(f"{own}.k_norm.weight")
    k = _rms(k if way == "RMS norm" else k - k.mean(-1, keepdims=True), gain, 1e-6)
    k = k + site.w(f"{own}.k_norm.bias") if way == "layer norm with bias" else k
    turn = {"rotation layout": picked["rotation layout of the indexer"], "rotation": "applied"}
    rope, dim = site.config.dims.rope, indexer.dim
    at = (
        slice(0, rope) if picked["rotary channels of the indexer"] == "first" else slice(-rope, dim)
    )
    for part in (q, k) if rope else ():
        part[..., at] = _rotate(site, part[..., at], turn)
    s = np.einsum("thd,sd->ths", q, k)
    s = s if picked["ReLU of index scores"] == "omitted" else np.maximum(s, 0)
    if picked["head weights of the indexer"] == "ignored":
        return s.sum(1)
    w = x @ site.w(f"{own}.weights_proj.weight").T.astype(np.float64)
    return np.einsum("ths,th->ts", s, w)


# -------------------------------------------------------------------------------- attention

_ORDERS = ("[key; value] of each head", "[value; key] of each head", "all keys, then all values")


def _attention_choices(site: Site) -> dict[str, tuple[str, ...]]:
    scales = ["(nope + rope)^-1/2", "nope^-1/2", "1"]
    if site.config.rope.score_factor != 1:
        scales = [f"(nope + rope)^-1/2 m²{end}" for end in ("", ", m² left out", ", m used once")]
        scales.append("nope^-1/2 m²")
    choices = {"softmax scale": tuple(scales), "order of kv_b_proj": _ORDERS}
    choices["causal mask"] = (
        "a query sees itself",
        "a query sees all",
        "a query sees earlier only",
    )
    if site.config.indexer is not None:
        choices["selection in attention"] = ("applied", "ignored")
    return choices


def _attention(site: Site, picked: Picked) -> np.ndarray:
    d, c = site.t("query_nope").shape, site.t("latent")
    dims = site.config.dims
    up = site.w("self_attn.kv_b_proj.weight").astype(np.float64)
    order = picked["order of kv_b_proj"]
    if order == _ORDERS[2]:
        keys, values = np.split(up, [dims.heads * dims.nope])
        uk, uv = keys.reshape(dims.heads, dims.nope, -1), values.reshape(dims.heads, dims.v, -1)
    else:
        up = up.reshape(dims.heads, dims.nope + dims.v, -1)
        uk, uv = up[:, : dims.nope], up[:, dims.nope :]
        if order == _ORDERS[1]:
            uv, uk = up[:, : dims.v], up[:, dims.v :]
    s = np.einsum("thd,hdr,sr->hts", site.t("query_nope"), uk, c, optimize=True)
    s = s + np.einsum("thd,sd->hts", site.t("query_rope"), site.t("key_rope"))
    s = np.where(_seen(site, picked, d[0]), s * _scale(site, picked["softmax scale"]), -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    o = np.einsum("hts,sr,hvr->thv", p, c, uv, optimize=True)
    return site.linear(o.reshape(d[0], -1), "self_attn.o_proj")


def _scale(site: Site, way: str) -> float:
    dims, factor = site.config.dims, site.config.rope.score_factor
    if way == "1":
        return 1.0
    width = dims.nope if way.startswith("nope") else dims.qk
    if way.endswith("left out"):
        factor = 1.0
    elif way.endswith("once"):
        factor = math.sqrt(factor)
    return width**-0.5 * factor


def _seen(site: Site, picked: Picked, tokens: int) -> np.ndarray:
    which = picked["causal mask"]
    seen = np.ones((tokens, tokens), bool)
    if which != "a query sees all":
        seen = np.tril(seen, -1 if which == "a query sees earlier only" else 0)
    if picked.get("selection in attention") == "applied":
        seen = seen & (site.t("selected") > 0)
    return seen


def _after_attn(site: Site, picked: Picked) -> np.ndarray:
    y = site.t("attention")
    return y if picked["residual"] == "omitted" else site.before + y


# ---------------------------------------------------------------------------------- experts


def _router_choices(site: Site) -> dict[str, tuple[str, ...]]:
    moe = site.config.moe
    assert moe is not None
    v3 = moe.method == "noaux_tc"
    scores = ("sigmoid", "softmax") if v3 else ("softmax", "sigmoid")
    yes, no = "divided by their sum", "as scored"
    choices = {
        "router score": scores,
        "expert weights": (yes, no) if moe.normalise else (no, yes),
    }
    if v3:
        choices["router bias"] = ("in the choice only", "in the weights too", "ignored")
    if moe.groups > 1:
        kinds = ("sum of the two best", "largest")
        choices["value of a group"] = kinds if v3 else kinds[::-1]
        choices["limit of groups"] = ("applied", "ignored")
    if moe.scale != 1:
        choices["routed scale"] = (f"{moe.scale:g}", "left out")
    return choices


def _router(site: Site, picked: Picked) -> np.ndarray:
    moe = site.config.moe
    assert moe is not None
    logits = site.t("mlp_norm") @ site.w("mlp.gate.weight").T.astype(np.float64)
    if picked["router score"] == "sigmoid":
        s = 1 / (1 + np.exp(-logits))
    else:
        s = np.exp(logits - logits.max(-1, keepdims=True))
        s = s / s.sum(-1, keepdims=True)
    bias = picked.get("router bias", "ignored")
    z = s if bias == "ignored" else s + site.w("mlp.gate.e_score_correction_bias")
    z = _limited(z, moe.groups, moe.topk_groups, picked)
    chosen = np.argsort(-z, axis=1, kind="stable")[:, : moe.topk]
    weights = np.zeros_like(s)
    given = z if bias == "in the weights too" else s
    np.put_along_axis(weights, chosen, np.take_along_axis(given, chosen, 1), 1)
    if picked["expert weights"] == "divided by their sum":
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * (1 if picked.get("routed scale") == "left out" else moe.scale)


def _limited(z: np.ndarray, groups: int, kept: int, picked: Picked) -> np.ndarray:
    if picked.get("limit of groups") != "applied":
        return z
    grouped = z.reshape(len(z), groups, -1)
    value = np.sort(grouped, -1)[..., -2:].sum(-1)
    value = grouped.max(-1) if picked["value of a group"] == "largest" else value
    best = np.argsort(-value, axis=1, kind="stable")[:, :kept]
    keep = np.zeros_like(value, dtype=bool)
    np.put_along_axis(keep, best, True, axis=1)
    return np.where(keep[..., None], grouped, -np.inf).reshape(z.shape)


def _mlp_choices(site: Site) -> dict[str, tuple[str, ...]]:
    choices: dict[str, tuple[str, ...]] = {"gate and up": ("gate first", "swapped")}
    choices["activation"] = ("SiLU", "GELU")
    moe = site.config.moe
    if site.sparse and moe is not None and moe.shared:
        values = ("added as it is", "omitted", "times the routed scale")
        choices["shared expert"] = values[: 3 if moe.scale != 1 else 2]
        choices["gate and up of the shared expert"] = ("gate first", "swapped")
    return choices


def _mlp(site: Site, picked: Picked) -> np.ndarray:
    x = site.t("mlp_norm")
    if not site.sparse:
        return _swiglu_named(site, x, "mlp", picked)
    moe, router = site.config.moe, site.t("router")
    assert moe is not None
    out = np.zeros_like(x)
    for e in np.flatnonzero(router.any(0)):
        rows = np.flatnonzero(router[:, e])
        gate, up, down = site.tensors.expert(f"model.layers.{site.number}", int(e))
        gate, up = (up, gate) if picked["gate and up"] == "swapped" else (gate, up)
        y = (_activation(x[rows] @ gate.T, picked) * (x[rows] @ up.T)) @ down.T
        out[rows] += router[rows, e, None] * y
    how = picked.get("shared expert", "omitted")
    if how == "omitted":
        return out
    own = {**picked, "gate and up": picked["gate and up of the shared expert"]}
    y = _swiglu_named(site, x, "mlp.shared_experts", own)
    return out + y * (moe.scale if how == "times the routed scale" else 1)


def _swiglu_named(site: Site, x: np.ndarray, owner: str, picked: Picked) -> np.ndarray:
    names = ("gate_proj", "up_proj")
    names = names[::-1] if picked["gate and up"] == "swapped" else names
    gate, up = (site.linear(x, f"{owner}.{n}") for n in names)
    return site.linear(_activation(gate, picked) * up, f"{owner}.down_proj")


def _activation(x: np.ndarray, picked: Picked) -> np.ndarray:
    if picked["activation"] == "GELU":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def _residual(site: Site, picked: Picked) -> np.ndarray:
    y = site.t("mlp")
    return y if picked["residual"] == "omitted" else site.t("after_attn") + y


def _fixed(**choices: tuple[str, ...]) -> Callable[[Site], dict[str, tuple[str, ...]]]:
    named = {name.replace("_", " "): values for name, values in choices.items()}
    return lambda site: named


_LATENT_NORM = ("over the latent", "omitted", "over the latent and the rotary key")

STAGES = (
    Stage(output="attn_norm", choices=lambda s: _BLOCK_NORM, compute=_attn_norm),
    Stage(
        output="query_latent",
        choices=_fixed(query_latent_norm=("applied", "omitted")),
        compute=_query_latent,
        when=lambda site: site.config.dims.q_rank is not None,
    ),
    Stage(
        output="query",
        choices=_fixed(order_of_query_heads=("heads first", "heads last")),
        compute=_query,
    ),
    Stage(output="row", choices=_fixed(), compute=_row),
    Stage(
        output="latent",
        choices=lambda s: {"key/value latent norm": _LATENT_NORM},
        compute=_latent,
    ),
    Stage(
        output="query_nope",
        choices=_fixed(rotary_channels_of_a_head=("last", "first")),
        compute=_query_nope,
    ),
    Stage(output="query_rope", choices=_rotation_choices, compute=_query_rope),
    Stage(output="key_rope", choices=_key_choices, compute=_key_rope),
    Stage(
        output="selected",
        choices=_selection_choices,
        compute=_selected,
        when=lambda site: site.has("selected"),
    ),
    Stage(output="attention", choices=_attention_choices, compute=_attention),
    Stage(output="after_attn", choices=_fixed(residual=("added", "omitted")), compute=_after_attn),
    Stage(output="mlp_norm", choices=lambda s: _BLOCK_NORM, compute=_mlp_norm),
    Stage(
        output="router",
        choices=_router_choices,
        compute=_router,
        when=lambda site: site.has("router"),
    ),
    Stage(output="mlp", choices=_mlp_choices, compute=_mlp),
    Stage(output="residual", choices=_fixed(residual=("added", "omitted")), compute=_residual),
)
"""In the order of computation. Another attention adds its own steps."""
