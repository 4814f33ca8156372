"""Folders in the layouts that occur: transformers' ``save_pretrained`` and the released one.

The released layout has one tensor per expert projection, shards with an index, the older rope
keys, and the next-token-prediction layer that the main model ignores. Its fp8 variant stores
e4m3 blocks of 128 x 128 with one multiplier each.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.parity.families import Case
from tests.parity.reference import tensor

BLOCK = 128
E4M3_MAX = 448.0
_QUANTISED = re.compile(
    r"layers\.\d+\.(?!.*weights_proj).*(_proj|_proj_with_mqa|indexer\.w(q_b|k))\.weight$"
)

Tensors = dict[str, torch.Tensor]


def save_pretrained(model: torch.nn.Module, folder: Path, *, shard: str = "4MB") -> Path:
    """As transformers writes it, in several shards."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


_PUBLISHED_V4 = (  # in transformers' state dictionary, in published folders
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"(compressor)\.position_bias$", r"\1.ape"),
    (r"(compressor)\.kv_norm\.", r"\1.norm."),
    (r"(compressor)\.kv_proj\.", r"\1.wkv."),
    (r"(compressor)\.gate_proj\.", r"\1.wgate."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".attn.w\1."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
)
_RATIOS_V4 = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def published_v4(model: torch.nn.Module) -> Tensors:
    """Tensors by their published names, and one of an MTP block that the main model ignores."""
    out: Tensors = {}
    for name, value in split_experts(model.state_dict()).items():
        for pattern, new in _PUBLISHED_V4:
            name = re.sub(pattern, new, name)
        out[name] = value.contiguous()
    out["mtp.0.enorm.weight"] = torch.ones(model.config.hidden_size)
    return out


def published_v4_config(model: torch.nn.Module) -> dict:
    """The keys of published folders; rates other than 4 and 128 they cannot say."""
    config = model.config.to_dict()
    drop = "layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"
    out = {k: v for k, v in config.items() if k not in (*drop, "partial_rotary_factor")}
    rope = config["rope_parameters"]["compress"]
    names = "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"
    return out | {
        "compress_ratios": [_RATIOS_V4[t] for t in config["layer_types"]] + [0],
        "num_hash_layers": config["mlp_layer_types"].count("hash_moe"),
        "rope_scaling": {"type": "yarn"} | {name: rope[name] for name in names},
    }


def save_published_v4(model: torch.nn.Module, folder: Path) -> Path:
    """As DeepSeek publishes it, unquantised."""
    save_file(published_v4(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published_v4_config(model), indent=1))
    return folder


def split_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """One tensor per expert and projection; fused gate-and-up rows have the gate first."""
    out: Tensors = {}
    for name, value in tensors.items():
        head, _, leaf = name.rpartition(".")
        if not head.endswith("experts") or leaf not in ("gate_up_proj", "down_proj"):
            out[name] = value
            continue
        for i, expert in enumerate(value):
            parts = {"down_proj": expert}
            if leaf == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            out |= {f"{head}.{i}.{part}.weight": x for part, x in parts.items()}
    return out


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` padded with zeros and cut into ``[out / 128, 128, in / 128, 128]``."""
    rows, cols = (-n % BLOCK for n in x.shape)
    padded = torch.nn.functional.pad(x, (0, cols, 0, rows))
    tall, wide = padded.shape
    return padded.reshape(tall // BLOCK, BLOCK, wide // BLOCK, BLOCK)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and their float32 multipliers ``[ceil(out / 128), ceil(in / 128)]``."""
    blocks = _blocks(x)
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    scaled = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    tall, wide = (n * BLOCK for n in scale.shape)
    flat = scaled.reshape(tall, wide)[: x.shape[0], : x.shape[1]]
    return flat.contiguous().to(torch.float8_e4m3fn), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``value * multiplier`` of each block, float32."""
    grown = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * grown[: values.shape[0], : values.shape[1]]


def _quantise_all(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, value in tensors.items():
        if not _QUANTISED.search(name):
            out[name] = value
            continue
        out[name], out[f"{name}_scale_inv"] = quantise(value)
    return out


def round_to_fp8(model: torch.nn.Module) -> None:
    """Give the model exactly the weights that its fp8 folder holds."""
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if _QUANTISED.search(name):
                value.copy_(dequantise(*quantise(value)))
            elif ".experts." in name:
                for expert in value:  # rows of the gate and of the up projection apart
                    parts = expert.chunk(2) if name.endswith("gate_up_proj") else (expert,)
                    for part in parts:
                        part.copy_(dequantise(*quantise(part)))


def released_config(config: dict, case: Case, *, fp8: bool) -> dict:
    """The key dialect of published checkpoints."""
    out = {k: v for k, v in config.items() if k not in ("rope_parameters", "num_mtp_layers")}
    rope = dict(config["rope_parameters"])
    out["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    out["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if case.family in ("DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa"):
        out |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        out["num_nextn_predict_layers"] = config.get("num_mtp_layers", 0)
    if case.family == "DeepseekV2":
        out |= {"scoring_func": "softmax", "moe_layer_freq": 1, "aux_loss_alpha": 0.001}
    if case.released_type:
        out["model_type"] = case.released_type
    if fp8:
        out["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return out


def _prediction_layer(case: Case, tensors: Tensors, layers: int) -> Tensors:
    """The extra layer for multi-token prediction: a copy of the last block and its own parts."""
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    out = {
        name.replace(last, extra): value.clone()
        for name, value in tensors.items()
        if name.startswith(last)
    }
    d = case.config["hidden_size"]
    vocab = case.config["vocab_size"]
    own = {
        "enorm.weight": (d,),
        "hnorm.weight": (d,),
        "eh_proj.weight": (d, 2 * d),
        "embed_tokens.weight": (vocab, d),
        "shared_head.norm.weight": (d,),
        "shared_head.head.weight": (vocab, d),
    }
    for name, shape in own.items():
        drawn = tensor(extra + name, shape, seed=case.seed, tied=False)
        out[extra + name] = torch.from_numpy(drawn)
    return out


def save_released(
    model: torch.nn.Module, case: Case, folder: Path, *, fp8: bool = False, shards: int = 3
) -> Path:
    """As checkpoints are published; with ``fp8`` the model is rounded to what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    if fp8:
        round_to_fp8(model)
    config = model.config.to_dict()
    tied = config["tie_word_embeddings"]
    state = {k: v for k, v in model.state_dict().items() if not (tied and k.startswith("lm_head"))}
    tensors = split_experts(state)
    if config.get("num_mtp_layers"):
        tensors |= _prediction_layer(case, tensors, config["num_hidden_layers"])
    if fp8:
        tensors = _quantise_all(tensors)
    where = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {k: tensors[k].contiguous() for k in sorted(tensors)[i::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    released = released_config(config, case, fp8=fp8)
    (folder / "config.json").write_text(json.dumps(released, indent=1))
    return folder
