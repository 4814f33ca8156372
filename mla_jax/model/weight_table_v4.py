"""Where every tensor of a DeepSeek V4 goes, in the published names and in those of transformers.

Sizes beside those of ``weight_table``: d width of a head and of a row, G output groups of rank
``ro`` over ``i`` channels each, n streams and M = (2 + n) n mixing entries (o: n once more), m
tokens of a disjoint group, m4 tokens and c4 halves of an overlapping one, k experts of a token.
"""

from collections.abc import Mapping

from mla_jax.config_v4 import V4Config
from mla_jax.model.stack import periods_of, places_of
from mla_jax.model.weight_row import Weight, make_weight

__all__ = ["weight_table_v4"]

# published name, name in transformers, path of the leaf, axes
_MODEL = (
    ("embed.weight", "model.embed_tokens.weight", "embed.embedding", "V D -> V D"),
    ("head.weight", "lm_head.weight", "lm_head.kernel", "V D -> D V"),
    ("norm.weight", "model.norm.weight", "final_norm.scale", "D -> D"),
    ("hc_head_fn", "model.hc_head.hc_fn", "stream_head.proj", "o (n D) -> n D o"),
    ("hc_head_base", "model.hc_head.hc_base", "stream_head.bias", "o -> o"),
    ("hc_head_scale", "model.hc_head.hc_scale", "stream_head.scale", "1 -> 1"),
)
_STREAMS = (
    ("fn", "proj", "M (n D) -> n D M"),
    ("base", "bias", "M -> M"),
    ("scale", "scale", "3 -> 3"),
)
_POOL = (
    ("wkv.weight", "kv_proj.weight", "value.kernel", "({c} {d}) D -> D {c} {d}"),
    ("wgate.weight", "gate_proj.weight", "gate.kernel", "({c} {d}) D -> D {c} {d}"),
    ("ape", "position_bias", "gate_bias", "{m} ({c} {d}) -> {m} {c} {d}"),
    ("norm.weight", "kv_norm.weight", "norm.scale", "{d} -> {d}"),
)
_ATTENTION = (
    ("wq_a.weight", "q_a_proj.weight", "q_down.kernel", "rq D -> D rq"),
    ("q_norm.weight", "q_a_norm.weight", "q_norm.scale", "rq -> rq"),
    ("wq_b.weight", "q_b_proj.weight", "q_up.kernel", "(H d) rq -> rq H d"),
    ("wkv.weight", "kv_proj.weight", "kv.kernel", "d D -> D d"),
    ("kv_norm.weight", "kv_norm.weight", "kv_norm.scale", "d -> d"),
    ("attn_sink", "sinks", "sink", "H -> H"),
    ("wo_a.weight", "o_a_proj.weight", "out_a", "(G ro) i -> G i ro"),
    ("wo_b.weight", "o_b_proj.weight", "out_b.kernel", "D (G ro) -> G ro D"),
)
_INDEXER = (
    ("wq_b.weight", "q_b_proj.weight", "q_up.kernel", "(N di) rq -> rq N di"),
    ("weights_proj.weight", "scorer.weights_proj.weight", "head_weights.kernel", "N D -> D N"),
)
_EXPERTS = (
    ("w1", "gate_proj", "gate", "I D -> D I"),
    ("w3", "up_proj", "up", "I D -> D I"),
    ("w2", "down_proj", "down", "D I -> I D"),
)
_FUSED = (
    ("gate_up_proj", "moe.experts.gate moe.experts.up", "(2 I) D -> 2 D I"),
    ("down_proj", "moe.experts.down", "D I -> I D"),
)


def weight_table_v4(config: V4Config, *, released: bool = True) -> tuple[Weight, ...]:
    """Every tensor that the model reads, layer by layer; ``released``: in the published names."""
    sizes = _sizes(config)
    rows = []
    for ours, theirs, path, axes in _MODEL:
        rows.append(make_weight(ours if released else theirs, path, axes, sizes))
    for i, place in enumerate(places_of(periods_of(config.kinds))):
        prefix = f"layers.{i}." if released else f"model.layers.{i}."
        for ours, theirs, path, axes in _layer(config, i):
            if released or "{e}" not in theirs:
                name = prefix + (ours if released else theirs)
                rows.append(make_weight(name, path, axes, sizes, place))
        if not released:
            for name, path, axes in _FUSED:
                rows.append(make_weight(f"{prefix}mlp.experts.{name}", path, axes, sizes, place))
    return tuple(rows)


def _layer(config: V4Config, i: int) -> list[tuple[str, str, str, str]]:
    """Published names, those of transformers, paths and axes of one layer."""
    kind = config.kinds[i]
    rows = [
        ("attn_norm.weight", "input_layernorm.weight", "attn_norm.scale", "D -> D"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "mlp_norm.scale", "D -> D"),
    ]
    for ours, path in (("attn", "attn_streams"), ("ffn", "mlp_streams")):
        for name, leaf, axes in _STREAMS:
            rows.append((f"hc_{ours}_{name}", f"{ours}_hc.{name}", f"{path}.{leaf}", axes))
    rows += [(f"attn.{a}", f"self_attn.{b}", f"attn.{p}", x) for a, b, p, x in _ATTENTION]
    compressor = "attn.compressor", "self_attn.compressor", "attn.pool"
    if kind.ratio == config.overlapping:
        rows += _pool(*compressor, m="m4", c="c4", d="d")
        ours, theirs, path = "attn.indexer", "self_attn.compressor.indexer", "attn.indexer"
        rows += [(f"{ours}.{a}", f"{theirs}.{b}", f"{path}.{p}", x) for a, b, p, x in _INDEXER]
        rows += _pool(f"{ours}.compressor", theirs, f"{path}.pool", m="m4", c="c4", d="di")
    elif kind.ratio:
        rows += _pool(*compressor, m="m", c="1", d="d")
    rows.append(("ffn.gate.weight", "mlp.gate.weight", "moe.router.kernel", "E D -> D E"))
    if kind.hashed:
        rows.append(("ffn.gate.tid2eid", "mlp.gate.tid2eid", "moe.router.table", "V k -> V k"))
    else:
        bias = "mlp.gate.e_score_correction_bias", "moe.router.choice_bias", "E -> E"
        rows.append(("ffn.gate.bias", *bias))
    for ours, theirs, leaf, axes in _EXPERTS:
        wide = axes.replace("I", "S")
        if config.moe.shared:
            names = f"ffn.shared_experts.{ours}.weight", f"mlp.shared_experts.{theirs}.weight"
            rows.append((*names, f"moe.shared.{leaf}.kernel", wide))
        name = f"ffn.experts.{{e}}.{ours}.weight"
        rows.append((name, f"mlp.experts.{{e}}.{theirs}.weight", f"moe.experts.{leaf}", axes))
    return rows


def _pool(ours: str, theirs: str, path: str, **sizes: str) -> list[tuple[str, str, str, str]]:
    return [
        (f"{ours}.{a}", f"{theirs}.{b}", f"{path}.{p}", x.format(**sizes)) for a, b, p, x in _POOL
    ]


def _sizes(config: V4Config) -> Mapping[str, int]:
    n, moe = config.streams.count, config.moe
    return {
        "V": config.vocab,
        "D": config.hidden,
        "H": config.heads,
        "d": config.dim,
        "rq": config.q_rank,
        "G": config.out_groups,
        "ro": config.out_rank,
        "i": config.heads * config.dim // config.out_groups,
        "n": n,
        "o": n,
        "M": (2 + n) * n,
        "m4": config.overlapping,
        "c4": 2,
        "m": config.disjoint,
        "N": config.index_heads,
        "di": config.index_dim,
        "E": moe.experts,
        "I": moe.width,
        "S": moe.shared * moe.width,
        "k": moe.topk,
    }
