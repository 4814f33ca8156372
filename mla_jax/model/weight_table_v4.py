"""Where every tensor of a DeepSeek V4 goes, in each of the layouts that folders have.

| layout | an example |
|---|---|
| ``published`` | ``layers.0.attn.wq_a.weight``, an expert a tensor |
| ``saved``, by transformers' ``save_pretrained`` | ``model.layers.0.attn.wq_a.weight`` |
| ``modules``, transformers' state dictionary | ``model.layers.0.self_attn.q_a_proj.weight`` |

Sizes beside those of ``weight_table``: d width of a head and of a row, G output groups of rank
``ro`` over ``i`` channels each, n streams and M = (2 + n) n mixing entries (o: n once more), m
tokens of a disjoint group, m4 tokens and c4 halves of an overlapping one, k experts of a token.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mla_jax.config_v4 import V4Config
from mla_jax.model.stack import Place, periods_of, places_of
from mla_jax.model.weight_row import Weight, make_weight
from mla_jax.types import cdiv

__all__ = ["layout_of", "published_tensors", "stays_e4m3", "weight_table_v4"]

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
    ("wo_a.weight", "o_a_proj.weight", "out_a.kernel", "(G ro) i -> G i ro"),
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


def layout_of(names: Collection[str]) -> str:
    """The layout of a folder whose tensors have these names."""
    if "lm_head.weight" in names:
        return "modules"
    return "saved" if "model.embed_tokens.weight" in names else "published"


def weight_table_v4(config: V4Config, *, layout: str = "published") -> tuple[Weight, ...]:
    """Every tensor that the model reads, layer by layer."""
    sizes, modules = _sizes(config), layout == "modules"
    rows: list[tuple[str, str, str, Place | None]] = [
        (theirs if modules else ours, path, axes, None) for ours, theirs, path, axes in _MODEL
    ]
    for i, place in enumerate(places_of(periods_of(config.kinds))):
        for ours, theirs, path, axes in _layer(config, i):
            if modules and "{e}" not in theirs:
                rows.append((f"model.layers.{i}.{theirs}", path, axes, place))
            elif not modules:
                rows.append((f"layers.{i}.{ours}", path, axes, place))
        for name, path, axes in _FUSED if modules else ():
            rows.append((f"model.layers.{i}.mlp.experts.{name}", path, axes, place))
    if layout == "saved":
        rows = [(_saved(name), path, axes, place) for name, path, axes, place in rows]
    return tuple(make_weight(name, path, axes, sizes, place) for name, path, axes, place in rows)


_FP8 = (
    "q_down.kernel", "q_up.kernel", "attn.kv.kernel", "attn.out_a.kernel",
    "attn.out_b.kernel", "moe.shared.gate.kernel", "moe.shared.up.kernel", "moe.shared.down.kernel",
)  # fmt: skip
_BLOCK, _PACKED_BLOCK = 128, 32


def stays_e4m3(weight: Weight) -> bool:
    """Whether a model with e4m3 weights has this one so: what is published in 8 bits and fewer."""
    return _stored(weight) in ("I8", "F8_E4M3")


def published_tensors(config: V4Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of a published folder: shape and safetensors dtype, scales and MTP included.

    Products are e4m3 with an E8M0 scale for each 128 x 128 block, routed experts E2M1, two codes a
    byte, with one for each 32 columns; V4-Flash and V4-Pro are counted to the byte in the tests.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for weight in weight_table_v4(config):
        for name, shape in weight.names().items():
            _put(found, name, shape, _stored(weight))
    mtp = replace(
        config, compress_ratios=(0,), hash_layers=0, ignored_layers=0
    )  # a window-only block, routed by score
    for j in range(config.ignored_layers):
        for weight in weight_table_v4(mtp):
            for name, shape in weight.names().items():
                if name.startswith("layers.0."):
                    inner = name.removeprefix("layers.0.")
                    _put(found, f"mtp.{j}.{inner}", shape, _stored(weight))
                elif name.startswith("hc_head_"):
                    _put(found, f"mtp.{j}.{name}", shape, "F32")
        square, line = (config.hidden, config.hidden), (config.hidden,)
        for name in ("e_proj", "h_proj"):
            _put(found, f"mtp.{j}.{name}.weight", square, "F8_E4M3")
        for name in ("enorm", "hnorm", "norm"):
            _put(found, f"mtp.{j}.{name}.weight", line, "BF16")
    return found


def _stored(weight: Weight) -> str:
    """The dtype of a tensor in published folders."""
    path = weight.paths[0]
    if weight.experts:
        return "I8"
    if path.endswith(_FP8):
        return "F8_E4M3"
    if weight.integer:
        return "I64"
    kept = weight.float32 and not path.endswith(("router.kernel", "head_weights.kernel"))
    return "F32" if kept else "BF16"


def _put(
    found: dict[str, tuple[tuple[int, ...], str]], name: str, shape: tuple[int, ...], dtype: str
) -> None:
    """The tensor as it is stored, and its scales."""
    scale = name.removesuffix("weight") + "scale"
    if dtype == "I8":
        out, into = shape
        found[name] = (out, into // 2), dtype
        found[scale] = (out, cdiv(into, _PACKED_BLOCK)), "F8_E8M0"
        return
    found[name] = shape, dtype
    if dtype == "F8_E4M3":
        found[scale] = tuple(cdiv(n, _BLOCK) for n in shape), "F8_E8M0"


def _saved(name: str) -> str:
    """A published name as transformers 5.23 saves it."""
    for ours, theirs in (("embed.", "embed_tokens."), ("hc_head_", "hc_head.hc_")):
        if name.startswith(ours):
            return "model." + theirs + name.removeprefix(ours)
    if name.startswith("head."):
        return name
    return "model." + name.replace(".attn.kv_norm.", ".attn.norm.")


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
