"""DeepSeek V4's ``config.json`` to plain facts and back, in both key dialects.

Published folders say ``compress_ratios`` (with entries of MTP blocks behind those of the layers),
``num_hash_layers``, ``rope_scaling`` and ``qk_rope_head_dim``; transformers writes ``layer_types``,
``compress_rates``, ``mlp_layer_types``, ``rope_parameters`` and ``partial_rotary_factor``.
"""

from collections.abc import Collection, Mapping
from typing import Final

from mla_jax.checks import is_real
from mla_jax.hf_config import (
    INERT,
    MOST_EXPERTS,
    MOST_LAYERS,
    V4_TYPE,
    read_fp8,
    read_stops,
    read_yarn,
    rope_keys,
)
from mla_jax.hf_keys import Keys

__all__ = ["MODEL_TYPE", "read", "write"]

MODEL_TYPE: Final = V4_TYPE

_WINDOW: Final = "sliding_attention"
_OVERLAPPING: Final = "compressed_sparse_attention"
_DISJOINT: Final = "heavily_compressed_attention"
_INERT: Final = (*INERT, "router_jitter_noise")


def read(data: object, where: str = "config.json", *, ignored: Collection[str] = ()) -> dict:
    """Keyword arguments of ``V4Config``, with nested dictionaries for its parts.

    Raises ConfigError for a key that is unknown, missing, inconsistent or not implemented.
    """
    keys = Keys(data, where, ignored=ignored)
    keys.only("model_type", (MODEL_TYPE,))
    keys.ignore(_INERT)
    keys.only("hidden_act", ("silu", "swish"))
    keys.only("num_key_value_heads", (1,), "One row of a token serves all heads.")
    for key in (
        "attention_bias", "mlp_bias", "tie_word_embeddings", "is_encoder_decoder", "is_decoder",
        "add_cross_attention", "tie_encoder_decoder",
    ):  # fmt: skip
        keys.only(key, (False,))
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    dim = keys.integer("head_dim", default=512)
    positions = keys.integer("max_position_embeddings")
    rates, ratios = _read_ratios(keys, layers)
    rope = keys.take("rope_parameters", default=None)
    facts = {
        "vocab": keys.integer("vocab_size"),
        "hidden": keys.integer("hidden_size"),
        "heads": keys.integer("num_attention_heads"),
        "dim": dim,
        "rope_dim": _read_rope_dim(keys, dim, rope),
        "q_rank": keys.integer("q_lora_rank"),
        "out_groups": keys.integer("o_groups"),
        "out_rank": keys.integer("o_lora_rank"),
        "window": keys.integer("sliding_window", default=128),
        "compress_ratios": ratios,
        "overlapping": rates[0],
        "disjoint": rates[1],
        "hash_layers": _read_hashed(keys, layers),
        "moe": _read_moe(keys),
        "swiglu_limit": keys.number("swiglu_limit", 10.0),
        "index_heads": keys.integer("index_n_heads", default=64),
        "index_dim": keys.integer("index_head_dim", default=128),
        "index_topk": keys.integer("index_topk", default=512),
        "streams": {
            "count": keys.integer("hc_mult", default=4),
            "rounds": keys.integer("hc_sinkhorn_iters", default=20),
            "eps": keys.number("hc_eps", 1e-6),
        },
        "eps": keys.number("rms_norm_eps", 1e-6, most=1),
        **_read_rope(keys, positions, rope),
        "max_positions": positions,
        "fp8_block": read_fp8(keys, experts=("fp8", "fp4")),
        "bos": keys.maybe_integer("bos_token_id", default=0),
        "eos": read_stops(keys, 1),
        "ignored_layers": keys.maybe_integer("num_nextn_predict_layers", default=1) or 0,
    }
    keys.only("expert_dtype", ("fp8", "fp4"), "Of published checkpoints; tensors say it too.")
    keys.finish()
    return facts


def _read_ratios(keys: Keys, layers: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The two ratios of compressed layers, and each layer's."""
    given = keys.take("compress_rates", default=None)
    near, far = 4, 128
    if given is not None:
        rates = keys.inner(given, "compress_rates.")
        near, far = rates.integer(_OVERLAPPING, default=4), rates.integer(_DISJOINT, default=128)
        rates.finish()
    near = keys.integer("compress_rate_csa", default=near)
    far = keys.integer("compress_rate_hca", default=far)
    of_type = {_WINDOW: 0, _OVERLAPPING: near, _DISJOINT: far}
    types = keys.take("layer_types", default=None)
    ratios = keys.take("compress_ratios", default=None)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= set(of_type):
            raise keys.refusal("layer_types", types, f"{layers} times one of {', '.join(of_type)}")
        listed = tuple(of_type[t] for t in types)
        if ratios is not None and tuple(ratios[:layers]) != listed:
            raise keys.refusal("compress_ratios", ratios, f"{list(listed)}, as in layer_types")
        return (near, far), listed
    if ratios is None:  # what transformers takes where neither is given
        turns = (near if i % 2 else far for i in range(max(layers - 2, 0)))
        return (near, far), (*(far,) * min(layers, 2), *turns)
    known = isinstance(ratios, list) and all(r in (0, near, far) for r in ratios)
    if not known or len(ratios) < layers:
        allowed = f"0, {near} or {far} for each of {layers} layers, then for MTP blocks"
        raise keys.refusal("compress_ratios", ratios, allowed)
    return (near, far), tuple(ratios[:layers])


def _read_hashed(keys: Keys, layers: int) -> int:
    """Leading layers whose experts follow from the token id."""
    count = keys.maybe_integer("num_hash_layers", default=None)
    types = keys.take("mlp_layer_types", default=None)
    if types is None:
        return min(3 if count is None else count, layers)
    hashed = types.count("hash_moe") if isinstance(types, list) else 0
    if types != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        allowed = f"{layers} entries, 'hash_moe' for the first layers, then 'moe'"
        raise keys.refusal("mlp_layer_types", types, allowed)
    if count not in (None, hashed):
        raise keys.refusal("num_hash_layers", count, f"{hashed}, as in mlp_layer_types")
    return hashed


def _read_rope_dim(keys: Keys, dim: int, rope: object) -> int:
    """Rotated channels, the same wherever they are said; 64 of 512 where nothing says it, as in
    transformers. ``rope``: what ``rope_parameters`` is."""
    name = "partial_rotary_factor"
    said = {name: keys.take(name, default=None)}
    if isinstance(rope, Mapping):
        inner = {f"{kind}.": rope.get(kind) for kind in ("main", "compress")} | {"": rope}
        parts = {part: x.get(name) for part, x in inner.items() if isinstance(x, Mapping)}
        said |= {f"rope_parameters.{part}{name}": factor for part, factor in parts.items()}
    found = keys.maybe_integer("qk_rope_head_dim", default=None, low=2)
    first = "qk_rope_head_dim"
    for where, factor in said.items():
        if factor is None:
            continue
        if not is_real(factor) or not 0 < factor <= 1:
            raise keys.refusal(where, factor, "a number above 0, at most 1")
        width = int(dim * factor)
        if found not in (None, width):
            if first == "qk_rope_head_dim":
                raise keys.refusal(first, found, f"{width}, as {where} says")
            allowed = f"a factor that gives {found} of {dim} channels, as {first} does"
            raise keys.refusal(where, factor, allowed)
        found, first = width, where
    return dim * 64 // 512 if found is None else found


def _read_rope(keys: Keys, positions: int, new: object) -> dict:
    """Both bases, and YaRN of the compressed layers.

    cos and sin are scaled by ``attention_factor`` alone, and not where it is absent: V4's own code
    does not scale them. transformers 5.23 says so too, but where ``rope_parameters`` has ``main``
    and ``compress`` without ``attention_factor``, it takes ``0.1 ln(factor) + 1``.
    """
    theta = keys.number("rope_theta", 1e4)
    compressed = keys.number("compress_rope_theta", 1.6e5)
    old = keys.take("rope_scaling", default=None)
    if isinstance(new, Mapping) and {"main", "compress"} <= set(new):
        main = keys.inner(new["main"], "rope_parameters.main.")
        main.only("rope_type", ("default",))
        main.only("type", ("default",))
        main.take("partial_rotary_factor", default=None)
        theta = main.number("rope_theta", theta)
        main.finish()
        rope = keys.inner(new["compress"], "rope_parameters.compress.")
    else:
        rope = rope_keys(keys, old, new)
        rope.take("rope_theta", default=None)  # of the window-only layers, said already
    kind = rope.take("rope_type", "type", default="default")
    if kind not in ("default", "yarn"):
        raise rope.refusal("rope_type", kind, "default or yarn", "No other kind is implemented.")
    rope.take("partial_rotary_factor", default=None)
    compressed = rope.number("rope_theta", compressed)
    yarn = None
    if kind == "yarn":
        rope.only("mscale", (0, 1))
        rope.only("mscale_all_dim", (0, 1))
        yarn = read_yarn(rope, None, positions)
        yarn |= {"mscale": 0.0, "mscale_all_dim": 0.0}
        yarn["attention_factor"] = yarn["attention_factor"] or 1.0
    rope.finish()
    return {"theta": theta, "compressed_theta": compressed, "yarn": yarn}


def _read_moe(keys: Keys) -> dict:
    keys.only("scoring_func", ("sqrtsoftplus",), "deepseek_v4 fixes its router.")
    keys.only("topk_method", ("noaux_tc",))
    keys.only("norm_topk_prob", (True,))
    return {
        "experts": keys.integer("n_routed_experts", "num_local_experts", high=MOST_EXPERTS),
        "topk": keys.integer("num_experts_per_tok"),
        "width": keys.integer("moe_intermediate_size"),
        "shared": keys.integer("n_shared_experts", default=1, low=0),
        "method": "sqrtsoftplus",
        "normalise": True,
        "scale": keys.number("routed_scaling_factor", 1.5),
    }


def write(facts: Mapping) -> dict:
    """Keys of transformers for what ``read`` returns: ``read(write(facts)) == facts``."""
    near, far = facts["overlapping"], facts["disjoint"]
    names = {0: _WINDOW, near: _OVERLAPPING, far: _DISJOINT}
    layers, hashed = len(facts["compress_ratios"]), facts["hash_layers"]
    moe, streams, eos = facts["moe"], facts["streams"], facts["eos"]
    factor = {"partial_rotary_factor": facts["rope_dim"] / facts["dim"]}
    data = {
        "model_type": MODEL_TYPE,
        "vocab_size": facts["vocab"],
        "hidden_size": facts["hidden"],
        "num_hidden_layers": layers,
        "num_attention_heads": facts["heads"],
        "num_key_value_heads": 1,
        "head_dim": facts["dim"],
        "qk_rope_head_dim": facts["rope_dim"],
        **factor,
        "q_lora_rank": facts["q_rank"],
        "o_groups": facts["out_groups"],
        "o_lora_rank": facts["out_rank"],
        "sliding_window": facts["window"],
        "compress_rates": {_OVERLAPPING: near, _DISJOINT: far},
        "layer_types": [names[r] for r in facts["compress_ratios"]],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "n_routed_experts": moe["experts"],
        "num_experts_per_tok": moe["topk"],
        "moe_intermediate_size": moe["width"],
        "n_shared_experts": moe["shared"],
        "scoring_func": moe["method"],
        "routed_scaling_factor": moe["scale"],
        "swiglu_limit": facts["swiglu_limit"],
        "index_n_heads": facts["index_heads"],
        "index_head_dim": facts["index_dim"],
        "index_topk": facts["index_topk"],
        "hc_mult": streams["count"],
        "hc_sinkhorn_iters": streams["rounds"],
        "hc_eps": streams["eps"],
        "hidden_act": "silu",
        "rms_norm_eps": facts["eps"],
        "rope_theta": facts["theta"],
        "compress_rope_theta": facts["compressed_theta"],
        "max_position_embeddings": facts["max_positions"],
        "bos_token_id": facts["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "num_nextn_predict_layers": facts["ignored_layers"],
    }
    compress = {"rope_type": "default", "rope_theta": facts["compressed_theta"], **factor}
    if facts["yarn"]:
        names = {"original": "original_max_position_embeddings"}
        yarn = {k: v for k, v in facts["yarn"].items() if not k.startswith("mscale")}
        compress |= {"rope_type": "yarn"} | {names.get(k, k): v for k, v in yarn.items()}
    main = {"rope_type": "default", "rope_theta": facts["theta"], **factor}
    data["rope_parameters"] = {"main": main, "compress": compress}
    if facts["fp8_block"]:
        block = [facts["fp8_block"]] * 2
        data["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": block,
        }  # fmt: skip
    return data
