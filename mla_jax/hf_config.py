"""Hugging Face ``config.json`` to plain facts and back, in both key dialects.

``read`` turns an object into the nested keyword arguments of ``ModelConfig``, ``write`` turns
them back. Meanings are those of transformers 5.23. A key is consumed, known to be inert, held
to the only value it may have, or refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from mla_jax.hf_keys import LARGEST, Keys

__all__ = [
    "FAMILIES",
    "INERT",
    "MOST_EXPERTS",
    "MOST_LAYERS",
    "V4_TYPE",
    "read",
    "read_fp8",
    "read_stops",
    "read_yarn",
    "write",
]

# Far above every published model. What files must hold one by one is bounded here, so that a
# small config.json cannot ask for a table without end; widths are compared with the tensors.
MOST_LAYERS: Final = 1024
MOST_EXPERTS: Final = 65_536

_DEEPSEEK_V2 = {
    "eps": 1e-6,
    "tied": False,
    "bos": 1,
    "eos": 2,
    "dense": 0,
    "groups": None,
    "kept": None,
    "scale": 1.0,
    "shared": 2,
    "mtp": 0,
}
_DEEPSEEK_V3 = {
    "eps": 1e-6,
    "tied": False,
    "bos": 0,
    "eos": 1,
    "dense": 3,
    "groups": 8,
    "kept": 4,
    "scale": 2.5,
    "shared": 1,
    "mtp": 1,
}

FAMILIES: Mapping[str, Mapping] = {
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3 | {"eps": 1e-5, "dense": 1, "groups": 1, "kept": 1, "scale": 1.8},
    "deepseek_v32": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3 | {"eps": 1e-5, "groups": 1, "kept": 1},
    "youtu": {"eps": 1e-6, "tied": True, "bos": 128000, "eos": 128001, "mtp": 0},
}
"""What an absent key means, per ``model_type``. Widths have no defaults: absence is an error."""

V4_TYPE: Final = "deepseek_v4"
"""Its keys are read by ``hf_config_v4``."""

_SPARSE_ATTENTION = {"deepseek_v32": (64, 128, 2048), "glm_moe_dsa": (32, 128, 2048)}
"""Families with an indexer: its heads, their width and the tokens it selects, by default."""

# Training, generation and bookkeeping: no effect on the forward pass of any family here.
INERT = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embedding_initializer_range encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label index_share_for_mtp_iteration initializer_range label2id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()  # noqa: SIM905

_MOE_KEYS = """
    n_routed_experts num_local_experts num_experts num_experts_per_tok moe_intermediate_size
    n_shared_experts n_group topk_group routed_scaling_factor norm_topk_prob topk_method
    scoring_func
    """.split()  # noqa: SIM905


def read(data: object, where: str = "config.json", *, ignored: Collection[str] = ()) -> dict:
    """Keyword arguments of ``ModelConfig``, with nested dictionaries for its parts.

    ``ignored`` names unknown keys to pass over (``"name"``, ``"rope_scaling.name"``).
    Raises ConfigError for a key that is unknown, missing, inconsistent or not implemented.
    """
    keys = Keys(data, where, ignored=ignored)
    family = keys.take("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        other = family == V4_TYPE
        allowed = FAMILIES if other else (*FAMILIES, V4_TYPE)
        hint = "V4Config.from_hf reads it." if other else ""
        raise keys.refusal("model_type", family, ", ".join(allowed), hint)
    default = FAMILIES[family]
    keys.ignore(INERT)
    keys.only("hidden_act", ("silu", "swish"))
    for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"):
        keys.only(key, (False,))
    dims = _read_dims(keys)
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    positions = keys.integer("max_position_embeddings")
    sparse = _read_sparse(keys, family, layers)
    if family != "youtu" and not any(sparse):
        keys.ignore(_MOE_KEYS)
    facts = {
        "family": family,
        "vocab": keys.integer("vocab_size"),
        "hidden": keys.integer("hidden_size"),
        "layers": layers,
        "dims": dims,
        "rope": _read_rope(keys, family, dims["rope"], positions),
        "mlp": keys.integer("intermediate_size"),
        "moe": _read_moe(keys, family) if any(sparse) else None,
        "sparse_layers": sparse,
        "eps": keys.number("rms_norm_eps", default["eps"], most=1),
        "tied": keys.flag("tie_word_embeddings", default["tied"]),
        "attention_bias": keys.flag("attention_bias", False),
        "mlp_bias": keys.flag("mlp_bias", False),
        "max_positions": positions,
        "fp8_block": read_fp8(keys),
        "bos": keys.maybe_integer("bos_token_id", default=default["bos"]),
        "eos": read_stops(keys, default["eos"]),
        "indexer": _read_indexer(keys, family, layers),
        "ignored_layers": keys.maybe_integer(
            "num_nextn_predict_layers", "num_mtp_layers", default=default["mtp"]
        )
        or 0,
    }
    if facts["mlp_bias"] and family != "deepseek_v2":
        raise keys.refusal("mlp_bias", True, False, "Only deepseek_v2 has a bias there.")
    keys.finish()
    return facts


def _read_dims(keys: Keys) -> dict:
    heads = keys.integer("num_attention_heads")
    keys.only("num_key_value_heads", (heads,), "Latent attention expands keys for every head.")
    dims = {
        "heads": heads,
        "rank": keys.integer("kv_lora_rank"),
        "nope": keys.integer("qk_nope_head_dim"),
        "rope": keys.integer("qk_rope_head_dim", low=2),
        "v": keys.integer("v_head_dim"),
        "q_rank": keys.maybe_integer("q_lora_rank", low=1),
    }
    keys.only("head_dim", (dims["rope"],), "It counts rotated channels: qk_rope_head_dim.")
    keys.only("qk_head_dim", (dims["nope"] + dims["rope"],))
    return dims


def _read_indexer(keys: Keys, family: str, layers: int) -> dict | None:
    """Which layers select: GLM lists them, or says how often; all of DeepSeek's do."""
    if family not in _SPARSE_ATTENTION:
        return None
    heads, dim, topk = _SPARSE_ATTENTION[family]
    glm = family == "glm_moe_dsa"
    keys.only("layer_types", (["indexed_attention"] * layers,))
    return {
        "heads": keys.integer("index_n_heads", default=heads),
        "dim": keys.integer("index_head_dim", default=dim),
        "topk": keys.integer("index_topk", default=topk),
        "full": _read_selecting(keys, layers) if glm else (True,) * layers,
        "interleaved": keys.flag("indexer_rope_interleave", glm),
    }


def _read_selecting(keys: Keys, layers: int) -> tuple[bool, ...]:
    """``indexer_types``, or a pattern of F and S, or every ``index_topk_freq``-th layer."""
    types = keys.take("indexer_types", default=None)
    pattern = keys.take("index_topk_pattern", default=None)
    every = keys.integer("index_topk_freq", default=1)
    offset = keys.integer("index_skip_topk_offset", default=2, low=0)
    if types is None and pattern is not None:
        names = {"F": "full", "S": "shared"}
        types = [names.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
    if types is None:
        return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    known = isinstance(types, list) and all(t in ("full", "shared") for t in types)
    if not known or len(types) != layers or types[0] != "full":
        allowed = f"{layers} times 'full' or 'shared', the first 'full'"
        raise keys.refusal("indexer_types", types, allowed)
    return tuple(t == "full" for t in types)


def rope_keys(keys: Keys, old: Any, new: Any) -> Keys:
    """Of ``rope_scaling`` or of ``rope_parameters``, its newer name; null and {} say nothing."""
    said = [x for x in (old, new) if x is not None and x != {}]
    if len(said) == 2 and old != new:
        raise keys.refusal("rope_scaling and rope_parameters", [old, new], "one of them")
    is_old = old is not None and old != {}
    return keys.inner(said[0] if said else {}, "rope_scaling." if is_old else "rope_parameters.")


def _read_rope(keys: Keys, family: str, dim: int, positions: int) -> dict:
    interleaved = keys.flag("rope_interleave", True)
    if (family == "deepseek_v2" or family in _SPARSE_ATTENTION) and not interleaved:
        raise keys.refusal("rope_interleave", False, True, f"{family} always rotates pairs.")
    theta = keys.take("rope_theta", default=10000.0)
    outer = keys.maybe_integer("original_max_position_embeddings", default=None, low=1)
    keys.only("partial_rotary_factor", (1,))
    old = keys.take("rope_scaling", default=None)
    new = keys.take("rope_parameters", default=None)
    rope = rope_keys(keys, old, new)
    kinds = rope.take("rope_type", default=None), rope.take("type", default=None)
    kind = kinds[0] or kinds[1] or "default"
    if kind not in ("default", "yarn"):
        raise rope.refusal("rope_type", kind, "default or yarn", "No other kind is implemented.")
    rope.only("partial_rotary_factor", (1,))
    facts = {"dim": dim, "theta": rope.number("rope_theta", theta), "interleaved": interleaved}
    facts["yarn"] = read_yarn(rope, outer, positions) if kind == "yarn" else None
    rope.finish()
    return facts


def read_yarn(rope: Keys, outer: int | None, positions: int) -> dict:
    """``original_max_position_embeddings`` beside the object wins over the one inside."""
    inner = rope.integer("original_max_position_embeddings", default=outer or positions)
    original = outer or inner
    factor = rope.maybe_number("factor", zero=False)
    return {
        "factor": positions / original if factor is None else factor,
        "original": original,
        "beta_fast": rope.maybe_number("beta_fast") or 32.0,
        "beta_slow": rope.maybe_number("beta_slow") or 1.0,
        "mscale": rope.maybe_number("mscale") or 0.0,
        "mscale_all_dim": rope.maybe_number("mscale_all_dim") or 0.0,
        "attention_factor": rope.maybe_number("attention_factor", zero=False),
        "truncate": rope.flag("truncate", True),
    }


def _read_sparse(keys: Keys, family: str, layers: int) -> tuple[bool, ...]:
    """Which layers route: GLM lists them, the others count the dense ones at the front."""
    if family == "youtu":
        return (False,) * layers
    keys.only("moe_layer_freq", (1,), "Every layer after the dense ones routes.")
    dense = keys.integer("first_k_dense_replace", default=FAMILIES[family]["dense"], low=0)
    counted = tuple(i >= dense for i in range(layers))
    types = keys.take("mlp_layer_types", default=None)
    if types is None:
        if family == "glm4_moe_lite" and dense != 1:
            hint = "This family lists its dense layers in mlp_layer_types."
            raise keys.refusal("first_k_dense_replace", dense, 1, hint)
        return counted
    known = isinstance(types, list) and all(t in ("dense", "sparse") for t in types)
    if not known or len(types) != layers:
        raise keys.refusal("mlp_layer_types", types, f"{layers} times 'dense' or 'sparse'")
    listed = tuple(t == "sparse" for t in types)
    lists = family == "glm4_moe_lite" or family in _SPARSE_ATTENTION
    if not lists and listed != counted:
        hint = "This family reads first_k_dense_replace."
        raise keys.refusal("mlp_layer_types", types, f"{dense} dense layers in front", hint)
    return listed


def _read_moe(keys: Keys, family: str) -> dict:
    default = FAMILIES[family]
    v2 = family == "deepseek_v2"
    methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
    method = keys.take("topk_method", default=methods[0])
    if method not in methods:
        raise keys.refusal("topk_method", method, " or ".join(methods) + f" for {family}")
    keys.only("scoring_func", ("softmax" if v2 else "sigmoid",), f"{family} fixes its router.")
    normalise = keys.flag("norm_topk_prob", not v2)
    if method == "greedy":
        keys.ignore(("n_group", "topk_group"))
    grouped = method != "greedy"
    also = "num_experts" if v2 else "num_local_experts"
    return {
        "experts": keys.integer("n_routed_experts", also, high=MOST_EXPERTS),
        "topk": keys.integer("num_experts_per_tok"),
        "width": keys.integer("moe_intermediate_size"),
        "shared": keys.maybe_integer("n_shared_experts", default=default["shared"]) or 0,
        "method": method,
        "groups": keys.integer("n_group", default=default["groups"]) if grouped else 1,
        "topk_groups": keys.integer("topk_group", default=default["kept"]) if grouped else 1,
        "normalise": normalise and not v2,  # transformers' V2 ignores the key
        "scale": keys.number("routed_scaling_factor", default["scale"]),
    }


def read_fp8(keys: Keys, *, experts: Sequence[str] = ("fp8",)) -> int | None:
    """128 if weights are e4m3 in blocks of 128 x 128, None if they are not quantised.

    ``experts`` are the dtypes that experts may have beside.
    """
    value = keys.take("quantization_config", default=None)
    if value is None:
        return None
    quant = keys.inner(value, "quantization_config.")
    method = quant.take("quant_method")
    if method != "fp8":
        raise quant.refusal("quant_method", method, "'fp8' in 128 x 128 blocks, or unquantised")
    quant.only("fmt", ("e4m3",))
    quant.only("weight_block_size", ([128, 128],))
    quant.only("expert_dtype", experts)
    quant.ignore(("activation_scheme", "dequantize", "scale_fmt", "ignored_layers"))
    quant.ignore(("modules_to_convert", "modules_to_not_convert"))
    quant.finish()
    return 128


def read_stops(keys: Keys, default: int) -> tuple[int, ...]:
    """Token ids that end a request."""
    value = keys.take("eos_token_id", default=default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in ids):
        raise keys.refusal("eos_token_id", value, "a token id, a list of them, or null")
    return tuple(ids)


def write(facts: Mapping) -> dict:
    """The released key dialect of what ``read`` returns: ``read(write(facts)) == facts``."""
    dims, rope, eos = facts["dims"], facts["rope"], facts["eos"]
    data = {
        "model_type": facts["family"],
        "vocab_size": facts["vocab"],
        "hidden_size": facts["hidden"],
        "num_hidden_layers": facts["layers"],
        "intermediate_size": facts["mlp"],
        "num_attention_heads": dims["heads"],
        "num_key_value_heads": dims["heads"],
        "kv_lora_rank": dims["rank"],
        "qk_nope_head_dim": dims["nope"],
        "qk_rope_head_dim": dims["rope"],
        "v_head_dim": dims["v"],
        "q_lora_rank": dims["q_rank"],
        "hidden_act": "silu",
        "rms_norm_eps": facts["eps"],
        "tie_word_embeddings": facts["tied"],
        "attention_bias": facts["attention_bias"],
        "mlp_bias": facts["mlp_bias"],
        "max_position_embeddings": facts["max_positions"],
        "bos_token_id": facts["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "num_nextn_predict_layers": facts["ignored_layers"],
        "rope_theta": rope["theta"],
        "rope_scaling": _write_yarn(rope["yarn"]),
        "rope_interleave": rope["interleaved"],
    }
    if facts["fp8_block"]:
        block = [facts["fp8_block"]] * 2
        data["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
        }
    data |= _write_indexer(facts["family"], facts["indexer"])
    return data | _write_moe(facts["family"], facts["sparse_layers"], facts["moe"])


def _write_indexer(family: str, indexer: Mapping | None) -> dict:
    if indexer is None:
        return {}
    data = {
        "index_n_heads": indexer["heads"],
        "index_head_dim": indexer["dim"],
        "index_topk": indexer["topk"],
        "indexer_rope_interleave": indexer["interleaved"],
    }
    if family == "glm_moe_dsa":
        data["indexer_types"] = ["full" if full else "shared" for full in indexer["full"]]
    return data


def _write_yarn(yarn: Mapping | None) -> dict | None:
    if yarn is None:
        return None
    names = {"original": "original_max_position_embeddings"}
    # transformers computes with a present null or 0 as with an absent key
    return {"type": "yarn"} | {names.get(k, k): v for k, v in yarn.items() if v is not None}


def _write_moe(family: str, sparse: Sequence[bool], moe: Mapping | None) -> dict:
    if family == "youtu":
        return {}
    data: dict = {"first_k_dense_replace": list(sparse).index(True) if moe else len(sparse)}
    if family == "glm4_moe_lite" or (family in _SPARSE_ATTENTION and moe):
        data = {"mlp_layer_types": ["sparse" if s else "dense" for s in sparse]}
    if moe is None:
        return data
    return data | {
        "n_routed_experts": moe["experts"],
        "num_experts_per_tok": moe["topk"],
        "moe_intermediate_size": moe["width"],
        "n_shared_experts": moe["shared"],
        "topk_method": moe["method"],
        "scoring_func": "softmax" if family == "deepseek_v2" else "sigmoid",
        "n_group": moe["groups"],
        "topk_group": moe["topk_groups"],
        "norm_topk_prob": moe["normalise"],
        "routed_scaling_factor": moe["scale"],
    }
