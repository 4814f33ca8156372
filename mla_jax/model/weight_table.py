"""Where every checkpoint tensor goes: name, path in the module, and how the axes move.

Axes are written as ``"(H qk) rq -> rq H qk"``: the checkpoint's ``[out, in]`` matrix with its
merged axes spelled out, then the order of the leaf. Sizes: V vocabulary, D hidden, H heads,
``qk`` nope + rope, ``kv`` nope + v, ``row`` rank + rope, r and rq the latents, F dense width,
E experts, I expert width, S width of the shared experts, N index heads of width ``di``.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.model.stack import periods_of, places_of
from mla_jax.model.weight_row import Weight, make_weight, shapes_of
from mla_jax.model.weight_table_v4 import weight_table_v4

__all__ = ["expected_shapes", "fused_experts", "num_params", "weight_table"]

# condition, checkpoint name, path of the leaf, axes
_MODEL = (
    ("", "model.embed_tokens.weight", "embed.embedding", "V D -> V D"),
    ("untied", "lm_head.weight", "lm_head.kernel", "V D -> D V"),
    ("", "model.norm.weight", "final_norm.scale", "D -> D"),
)
_LAYER = (
    ("", "input_layernorm.weight", "attn_norm.scale", "D -> D"),
    ("", "post_attention_layernorm.weight", "mlp_norm.scale", "D -> D"),
    ("q_rank", "self_attn.q_a_proj.weight", "attn.q_down.kernel", "rq D -> D rq"),
    ("q_rank bias", "self_attn.q_a_proj.bias", "attn.q_down.bias", "rq -> rq"),
    ("q_rank", "self_attn.q_a_layernorm.weight", "attn.q_norm.scale", "rq -> rq"),
    ("q_rank", "self_attn.q_b_proj.weight", "attn.q_up.kernel", "(H qk) rq -> rq H qk"),
    ("q_full", "self_attn.q_proj.weight", "attn.q.kernel", "(H qk) D -> D H qk"),
    ("", "self_attn.kv_a_proj_with_mqa.weight", "attn.kv_down.kernel", "row D -> D row"),
    ("bias", "self_attn.kv_a_proj_with_mqa.bias", "attn.kv_down.bias", "row -> row"),
    ("", "self_attn.kv_a_layernorm.weight", "attn.kv_norm.scale", "r -> r"),
    ("", "self_attn.kv_b_proj.weight", "attn.kv_up.kernel", "(H kv) r -> r H kv"),
    ("", "self_attn.o_proj.weight", "attn.out.kernel", "D (H v) -> H v D"),
    ("bias", "self_attn.o_proj.bias", "attn.out.bias", "D -> D"),
    (
        "selects",
        "self_attn.indexer.wq_b.weight",
        "attn.indexer.q_up.kernel",
        "(N di) rq -> rq N di",
    ),
    ("selects", "self_attn.indexer.wk.weight", "attn.indexer.k.kernel", "di D -> D di"),
    ("selects", "self_attn.indexer.k_norm.weight", "attn.indexer.k_norm.scale", "di -> di"),
    ("selects", "self_attn.indexer.k_norm.bias", "attn.indexer.k_norm.bias", "di -> di"),
    (
        "selects",
        "self_attn.indexer.weights_proj.weight",
        "attn.indexer.head_weights.kernel",
        "N D -> D N",
    ),
    ("dense", "mlp.gate_proj.weight", "mlp.gate.kernel", "F D -> D F"),
    ("dense", "mlp.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
    ("dense", "mlp.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
    ("dense mlp_bias", "mlp.gate_proj.bias", "mlp.gate.bias", "F -> F"),
    ("dense mlp_bias", "mlp.up_proj.bias", "mlp.up.bias", "F -> F"),
    ("dense mlp_bias", "mlp.down_proj.bias", "mlp.down.bias", "D -> D"),
    ("moe", "mlp.gate.weight", "moe.router.kernel", "E D -> D E"),
    ("moe choice", "mlp.gate.e_score_correction_bias", "moe.router.choice_bias", "E -> E"),
    ("moe", "mlp.experts.{e}.gate_proj.weight", "moe.experts.gate", "I D -> D I"),
    ("moe", "mlp.experts.{e}.up_proj.weight", "moe.experts.up", "I D -> D I"),
    ("moe", "mlp.experts.{e}.down_proj.weight", "moe.experts.down", "D I -> I D"),
    ("shared", "mlp.shared_experts.gate_proj.weight", "moe.shared.gate.kernel", "S D -> D S"),
    ("shared", "mlp.shared_experts.up_proj.weight", "moe.shared.up.kernel", "S D -> D S"),
    ("shared", "mlp.shared_experts.down_proj.weight", "moe.shared.down.kernel", "D S -> S D"),
    ("shared mlp_bias", "mlp.shared_experts.gate_proj.bias", "moe.shared.gate.bias", "S -> S"),
    ("shared mlp_bias", "mlp.shared_experts.up_proj.bias", "moe.shared.up.bias", "S -> S"),
    ("shared mlp_bias", "mlp.shared_experts.down_proj.bias", "moe.shared.down.bias", "D -> D"),
)
# transformers in memory: all experts in one tensor, the gate's rows before the up-projection's
_FUSED = (
    ("mlp.experts.gate_up_proj", "moe.experts.gate moe.experts.up", "(2 I) D -> 2 D I"),
    ("mlp.experts.down_proj", "moe.experts.down", "D I -> I D"),
)


@lru_cache(maxsize=1)  # commands ask for one model's several times
def weight_table(config: AnyConfig) -> tuple[Weight, ...]:
    """Every tensor of the released layout that the model reads, layer by layer."""
    if isinstance(config, V4Config):
        return weight_table_v4(config)
    sizes = _sizes(config)
    heads = {""} if config.tied else {"", "untied"}
    rows = [make_weight(n, p, axes, sizes) for when, n, p, axes in _MODEL if when in heads]
    for i, place in enumerate(places_of(periods_of(config.kinds))):
        flags = _flags(config, i)
        for when, name, path, axes in _LAYER:
            if flags.issuperset(when.split()):
                rows.append(make_weight(f"model.layers.{i}.{name}", path, axes, sizes, place))
    return tuple(rows)


def fused_experts(config: ModelConfig, layer: int) -> tuple[Weight, ...]:
    """What replaces a layer's expert tensors in transformers' own layout."""
    sizes = _sizes(config)
    place = places_of(periods_of(config.kinds))[layer]
    return tuple(
        make_weight(f"model.layers.{layer}.{name}", paths, axes, sizes, place)
        for name, paths, axes in _FUSED
    )


def expected_shapes(config: AnyConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Leaf path to shape and ``Weight.kind``."""
    return shapes_of(weight_table(config))


def num_params(config: AnyConfig) -> int:
    """Weights of the model without its MTP layers, the router's choice bias included.

    A table of hash routing holds no weights.
    """
    shapes = expected_shapes(config).values()
    return sum(math.prod(shape) for shape, kind in shapes if kind != "int32")


def _sizes(config: ModelConfig) -> Mapping[str, int]:
    d, moe = config.dims, config.moe
    sizes = {
        "V": config.vocab,
        "D": config.hidden,
        "H": d.heads,
        "F": config.mlp,
        "qk": d.qk,
        "v": d.v,
        "r": d.rank,
    }
    sizes |= {"kv": d.nope + d.v, "row": d.row, "rq": d.q_rank or 0}
    if config.indexer is not None:
        sizes |= {"N": config.indexer.heads, "di": config.indexer.dim}
    if moe is not None:
        sizes |= {"E": moe.experts, "I": moe.width, "S": moe.shared * moe.width}
    return sizes


def _flags(config: ModelConfig, layer: int) -> set[str]:
    flags = {"q_full" if config.dims.q_rank is None else "q_rank"}
    flags |= {"bias"} if config.attention_bias else set()
    flags |= {"mlp_bias"} if config.mlp_bias else set()
    flags |= {"selects"} if config.kinds[layer].selects else set()
    if not config.sparse_layers[layer] or config.moe is None:
        return flags | {"dense"}
    flags |= {"shared"} if config.moe.shared else set()
    return flags | {"moe"} | ({"choice"} if config.moe.biased else set())
