"""Tiny configurations of every family: true latent widths (``_dims``), narrow ones (``_small``).

A case is data: the transformers configuration class by name, its arguments, and the seed of the
weights and prompts. Seeds were chosen (``python -m tests.parity.scan``) so that no router or
greedy decision of the reference is within rounding of flipping.
"""

from dataclasses import dataclass, field, replace

_TOKENS = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1}
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_NARROW = {"hidden_size": 64, "intermediate_size": 96}
_EXPERTS = {"moe_intermediate_size": 96}
_NARROW_EXPERTS = {"moe_intermediate_size": 32}
_MLA = {
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_NARROW_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_NO_QUERY_RANK = {"q_lora_rank": None}


def _yarn(**changes: float) -> dict:
    """YaRN with a short original length, so that prompts reach far beyond it."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        **changes,
    }


def _plain(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


_V2 = {
    **_TOKENS,
    **_WIDE,
    **_EXPERTS,
    **_MLA,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
    "norm_topk_prob": False,
    "max_position_embeddings": 2560,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _yarn(),
}
_V2_LITE = {
    **_V2,
    **_NO_QUERY_RANK,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rope_parameters": _yarn(mscale=0.707, mscale_all_dim=0.707),
}
_V3 = {
    **_TOKENS,
    **_WIDE,
    **_EXPERTS,
    **_MLA,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 2560,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "num_mtp_layers": 1,
    "rope_parameters": _yarn(),
}
_KIMI = {
    **_V3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 2048,
    "num_mtp_layers": 0,
    "rope_parameters": _yarn(rope_theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0),
}
_GLM = {
    **_TOKENS,
    **_WIDE,
    **_EXPERTS,
    **_MLA,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": _plain(1e6),
}
_SPARSE = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 16}
_NARROW_SPARSE = {"index_head_dim": 16, "index_topk": 8}
_V32 = {k: v for k, v in (_V3 | _SPARSE).items() if k not in ("rope_interleave", "num_mtp_layers")}
_GLM_DSA = {
    **{k: v for k, v in _GLM.items() if k not in ("rope_interleave", "mlp_layer_types")},
    **_SPARSE,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "shared", "full"],
}
_WINDOW, _OVERLAPPING, _DISJOINT = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_V4 = {
    **_TOKENS,
    **_EXPERTS,
    **_SPARSE,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 1.0,  # so small that it binds
    "sliding_window": 128,
    "layer_types": [_WINDOW, _OVERLAPPING, _DISJOINT],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_mult": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_NARROW_V4 = {
    **_NARROW_EXPERTS,
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 2,
    "compress_rates": {_OVERLAPPING: 4, _DISJOINT: 16},
    "max_position_embeddings": 512,
    "rope_parameters": {**_V4["rope_parameters"], "original_max_position_embeddings": 32},
}
_YOUTU = {
    **_TOKENS,
    **_WIDE,
    **_MLA,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "tie_word_embeddings": True,
    "rope_parameters": _plain(1.6e6),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model: what to build and from which seed."""

    name: str
    family: str  # transformers class prefix: DeepseekV2, DeepseekV32, Glm4MoeLite, Youtu, …
    config: dict = field(hash=False)
    seed: int
    released_type: str | None = None  # model_type in released folders, if not transformers'

    def __str__(self) -> str:
        return self.name

    def reseed(self, seed: int) -> "Case":
        return replace(self, seed=seed)


def _pair(
    name: str, family: str, dims: dict, seeds: tuple[int, int], *, small: dict, **more
) -> list[Case]:
    narrow = {**dims, **_NARROW, **_NARROW_MLA, **small}
    return [
        Case(name=f"{name}_dims", family=family, config=dims, seed=seeds[0], **more),
        Case(name=f"{name}_small", family=family, config=narrow, seed=seeds[1], **more),
    ]


FAMILIES = [
    *_pair(
        "v2_lite",
        "DeepseekV2",
        _V2_LITE,
        (6, 8),
        small={**_NARROW_EXPERTS, **_NO_QUERY_RANK},
    ),
    *_pair("v2", "DeepseekV2", _V2, (8, 9), small=_NARROW_EXPERTS),
    *_pair("v3", "DeepseekV3", _V3, (5, 5), small=_NARROW_EXPERTS),
    *_pair(
        "kimi_k2",
        "DeepseekV3",
        _KIMI,
        (14, 6),
        small=_NARROW_EXPERTS,
        released_type="kimi_k2",
    ),
    *_pair(
        "glm_flash",
        "Glm4MoeLite",
        _GLM,
        (7, 10),
        small={**_NARROW_EXPERTS, "qk_nope_head_dim": 24, "v_head_dim": 32},
    ),
    *_pair("youtu", "Youtu", _YOUTU, (1, 41), small={}),
    *_pair("v32", "DeepseekV32", _V32, (48, 32), small={**_NARROW_EXPERTS, **_NARROW_SPARSE}),
    *_pair(
        "glm_dsa",
        "GlmMoeDsa",
        _GLM_DSA,
        (12, 25),
        small={**_NARROW_EXPERTS, **_NARROW_SPARSE, "qk_nope_head_dim": 24, "v_head_dim": 32},
    ),
]
V4_FAMILY = [
    Case(name="v4_dims", family="DeepseekV4", config=_V4, seed=2),
    *(
        Case(name=f"v4_{name}", family="DeepseekV4", config=_V4 | _NARROW_V4 | more, seed=seed)
        for name, seed, more in (
            ("small", 3, {}),
            ("small_window", 2, {"layer_types": [_WINDOW] * 3}),
            ("small_overlapping", 16, {"layer_types": [_OVERLAPPING] * 3}),
            ("small_disjoint", 3, {"layer_types": [_DISJOINT] * 3}),
        )
    ),
]
V32_FP8 = next(case for case in FAMILIES if case.name == "v32_dims").reseed(41)
"""A seed whose decisions are as far from flipping after its weights were rounded to e4m3."""

BY_NAME = {case.name: case for case in (*FAMILIES, *V4_FAMILY)}


def _variation(name: str, base: str, seed: int, **changes) -> Case:
    case = BY_NAME[base]
    return replace(case, name=name, seed=seed, config={**case.config, **changes})


VARIATIONS = [
    _variation("v3_other_seed", "v3_small", 11),
    _variation("v3_no_yarn", "v3_small", 12, rope_parameters=_plain(10000.0)),
    _variation("v3_halves", "v3_small", 13, rope_interleave=False),
    _variation("v3_no_query_rank", "v3_small", 16, **_NO_QUERY_RANK),
    _variation("v3_attention_bias", "v3_small", 17, attention_bias=True),
    _variation("v3_all_dense", "v3_small", 16, first_k_dense_replace=3),
    _variation("v3_rope_factor", "v3_small", 22, rope_parameters=_yarn(mscale=0.5)),
    _variation("v3_unnormalised", "v3_small", 18, norm_topk_prob=False),
    _variation("v2_attention_bias", "v2_small", 21, attention_bias=True, mlp_bias=True),
    _variation("glm_halves", "glm_flash_small", 34, rope_interleave=False),
    _variation("v32_dense", "v32_small", 5, index_topk=2048),
    _variation("v32_all_dense", "v32_small", 29, first_k_dense_replace=3),
    _variation("glm_dsa_all_full", "glm_dsa_small", 35, indexer_types=["full"] * 3),
    _variation("glm_dsa_two_shared", "glm_dsa_small", 4, indexer_types=["full"] + ["shared"] * 2),
    _variation("youtu_untied", "youtu_small", 21, tie_word_embeddings=False),
]

FIVE_LAYERS = _variation("v3_five_layers", "v3_small", 39, num_hidden_layers=5)
"""One dense layer and four of experts."""
