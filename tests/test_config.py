"""``ModelConfig.from_hf``: the released configurations, both dialects, and every refusal."""

import dataclasses
import json
import os
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mla_jax.cache import FORMATS
from mla_jax.config import IndexerConfig, MLADims, ModelConfig, MoEConfig
from mla_jax.config_v4 import V4Config, read_config
from mla_jax.errors import ConfigError, shown
from mla_jax.model.memory import plan_memory
from mla_jax.model.presets import PRESETS, V2, V2_LITE, V3, V3_2, V4_FLASH, released
from mla_jax.model.weight_table import num_params

TINY = sorted((Path(__file__).parent / "data" / "configs").glob("tiny_*.json"))

# name: heads, q rank, nope, rope, v, softmax scale, bytes per token in bf16
FACTS = {
    "V2_LITE": (16, None, 128, 64, 128, 0.114721387, 31_104),
    "V2": (128, 1536, 128, 64, 128, 0.135233779, 69_120),
    "V3": (128, 1536, 128, 64, 128, 0.135233779, 70_272),
    "V3_2": (128, 1536, 128, 64, 128, 0.135233779, 85_888),
    "KIMI_K2": (64, 1536, 128, 64, 128, 0.130860800, 70_272),
    "GLM_4_7_FLASH": (20, 768, 192, 64, 256, 1 / 16, 54_144),
    "GLM_5": (64, 2048, 192, 64, 256, 1 / 16, 109_824),
    "YOUTU_2B": (16, 1536, 128, 64, 128, 192**-0.5, 36_864),
}


@pytest.mark.parametrize("name", FACTS)
def test_released_configurations(name: str):
    config = PRESETS[name]
    heads, q_rank, nope, rope, v, scale, token = FACTS[name]
    assert config.dims == MLADims(heads=heads, rank=512, nope=nope, rope=rope, v=v, q_rank=q_rank)
    assert config.scale == pytest.approx(scale, abs=1e-9, rel=1e-6)
    assert config.rope.cos_sin_factor == 1.0
    assert plan_memory(config, dtype="bfloat16", format=FORMATS["bf16"]).token == token
    assert config.latent_eps == 1e-6


def test_routing_of_the_released_configurations():
    assert V2_LITE.moe == MoEConfig(experts=64, topk=6, width=1408, shared=2, method="greedy")
    assert V2.moe == MoEConfig(
        experts=160,
        topk=6,
        width=1536,
        shared=2,
        method="group_limited_greedy",
        groups=8,
        topk_groups=3,
        scale=16.0,
    )
    assert V3.moe == MoEConfig(
        experts=256,
        topk=8,
        width=2048,
        shared=1,
        method="noaux_tc",
        groups=8,
        topk_groups=4,
        normalise=True,
        scale=2.5,
    )
    assert V3.sparse_layers == (False,) * 3 + (True,) * 58
    assert PRESETS["YOUTU_2B"].moe is None
    assert PRESETS["YOUTU_2B"].tied
    assert PRESETS["GLM_4_7_FLASH"].eos == (154820, 154827, 154829)
    assert (V3.fp8_block, V3.ignored_layers) == (128, 1)


def test_indexers_of_the_released_configurations():
    assert V3_2.indexer == IndexerConfig(heads=64, dim=128, topk=2048, full=(True,) * 61)
    glm = PRESETS["GLM_5"].indexer
    assert glm == IndexerConfig(heads=32, dim=128, topk=2048, full=(True,) * 78, interleaved=True)
    fp8 = {
        name: plan_memory(PRESETS[name], dtype="bfloat16", format=FORMATS["fp8_e4m3"]).token
        for name in ("V3_2", "GLM_5")
    }
    assert fp8 == {"V3_2": 48_068, "GLM_5": 61_464}
    assert num_params(V3_2) - num_params(V3) == 61 * (
        64 * 128 * 1536 + 128 * 7168 + 256 + 64 * 7168
    )


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6, 10, 14]),
        ({"index_topk_pattern": "F" + "SF" * 38 + "S"}, [0, 2, 4, 6]),
        ({"indexer_types": ["full"] + ["shared"] * 77, "index_topk_freq": 4}, [0]),
    ],
)
def test_layers_that_select(keys, first):
    """A list, a pattern, or each so many layers, in this order."""
    indexer = ModelConfig.from_hf(_glm(**keys)).indexer
    assert [i for i, full in enumerate(indexer.full) if full][: len(first)] == first
    assert ModelConfig.from_hf(ModelConfig.from_hf(_glm(**keys)).to_hf()).indexer == indexer


def test_v4_configurations():
    """Published keys; bytes of the caches as the specification's table has them."""
    for name, layers, fours, far, token in (
        ("V4_FLASH", 43, 21, 20, 6_880),
        ("V4_PRO", 61, 30, 31, 9_848),
    ):
        config = PRESETS[name]
        assert (config.layers, config.layers_of(4), config.layers_of(128)) == (layers, fours, far)
        assert read_config(config.to_hf()) == V4Config.from_hf(released(name)) == config
        bf16 = plan_memory(config, dtype="bfloat16", format=FORMATS["bf16"])
        row, key = 2 * 512, 2 * 128  # bytes of a state and of an index key
        assert bf16.token == fours * (row + key) / 4 + far * row / 128 == token
        window = layers * 128 * 1024
        assert bf16.request == window + fours * 80 * 1024 + far * 512 * 1024
    assert V4_FLASH == V4Config(fp8_block=128, ignored_layers=1)
    fp8 = plan_memory(V4_FLASH, dtype="bfloat16", format=FORMATS["fp8_e4m3"])
    assert fp8.token == 3_900  # 3,850 of records; pages of 64 and of 2 rows are padded
    plain = dataclasses.replace(V4_FLASH.rope(4), yarn=None).inv_freq()
    ratio = V4_FLASH.rope(4).inv_freq() / plain
    np.testing.assert_allclose(ratio[:16], 1, rtol=1e-6)  # the ramp is from 15 to 25
    np.testing.assert_allclose(ratio[25:], 1 / 16, rtol=1e-6)
    assert V4_FLASH.rope(0).yarn is None
    assert V4_FLASH.scale == pytest.approx(0.0441942, abs=1e-7)


def _v4(**changes: object) -> dict:
    return released("v4_flash") | changes


def test_cos_and_sin_of_v4_are_not_scaled_unless_a_key_says_so():
    data = V4_FLASH.to_hf()
    compress = data["rope_parameters"]["compress"]
    assert compress.pop("attention_factor") == 1
    assert V4Config.from_hf(data).rope(4).cos_sin_factor == 1
    compress["attention_factor"] = 1.25
    assert V4Config.from_hf(data).rope(4).cos_sin_factor == 1.25


def test_a_row_of_v4_has_channels_that_are_not_rotated():
    config = dataclasses.replace(V4_FLASH, dim=128, index_dim=128, rope_dim=64)
    with pytest.raises(ConfigError, match=r"rope_dim: given 128; allowed: even, from 2 to"):
        dataclasses.replace(config, rope_dim=128)


def test_rotated_channels_of_v4_where_no_key_says_them():
    data = _v4(head_dim=256)
    del data["qk_rope_head_dim"]
    assert V4Config.from_hf(data).rope_dim == 32
    assert V4Config.from_hf(data | {"qk_rope_head_dim": 64}).rope_dim == 64
    assert V4Config.from_hf(data | {"partial_rotary_factor": 0.25}).rope_dim == 64


def test_rotated_channels_of_v4_that_rope_parameters_say():
    data = V4_FLASH.to_hf()
    rope = {k: dict(v) for k, v in data["rope_parameters"].items()}
    for part in rope.values():
        part.pop("partial_rotary_factor", None)
    del data["qk_rope_head_dim"]
    data.pop("partial_rotary_factor", None)
    assert V4Config.from_hf(data | {"rope_parameters": rope}).rope_dim == 64
    for part in ("main", "compress"):
        inner = rope | {part: rope[part] | {"partial_rotary_factor": 0.25}}
        assert V4Config.from_hf(data | {"rope_parameters": inner}).rope_dim == 128
        with pytest.raises(ConfigError, match=f"128, as rope_parameters.{part}.partial"):
            V4Config.from_hf(data | {"rope_parameters": inner, "qk_rope_head_dim": 32})
    both = {k: v | {"partial_rotary_factor": 0.25} for k, v in rope.items()}
    both["compress"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match=r"compress\.partial_rotary_factor: given 0\.5"):
        V4Config.from_hf(data | {"rope_parameters": both})


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (_v4(compress_ratios=[0, 4]), r"compress_ratios.*0, 4 or 128 for each of 43 layers"),
        (_v4(compress_ratios=[2] * 44), "compress_ratios"),
        (_v4(layer_types=["sliding_attention"] * 43), "compress_ratios.*as in layer_types"),
        (_v4(mlp_layer_types=["moe"] * 42 + ["hash_moe"]), "mlp_layer_types.*first layers"),
        (_v4(num_key_value_heads=2), "num_key_value_heads"),
        (_v4(scoring_func="sigmoid"), "scoring_func"),
        (_v4(o_groups=7), "out_groups: given 7; allowed: a divisor of 64 heads"),
        (_v4(rope_scaling={"type": "linear", "factor": 2}), "default or yarn"),
        (_v4(partial_rotary_factor=0.5), "qk_rope_head_dim.*256"),
        (_v4(swiglu_limt=3), "swiglu_limt.*swiglu_limit"),
        (_v4(tie_word_embeddings=True), "tie_word_embeddings"),
    ],
)
def test_v4_keys_that_are_refused(data, match):
    with pytest.raises(ConfigError, match=match):
        read_config(data)


def test_yarn_ramp_of_kimi_is_one_channel_wide():
    config = PRESETS["KIMI_K2"]
    plain = dataclasses.replace(config.rope, yarn=None).inv_freq()
    ratio = config.rope.inv_freq() / plain
    np.testing.assert_allclose(ratio[:20], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[20:], 1 / 32, rtol=1e-6)


def test_parameters_and_memory():
    assert num_params(V3) == 671_026_419_200
    assert num_params(V2_LITE) == 15_706_484_224
    plan = plan_memory(V2_LITE, dtype="bfloat16", format=FORMATS["bf16"])
    router = 26 * 64 * 2048
    assert plan.weights == 2 * num_params(V2_LITE) + 2 * router
    assert plan.token == 31_104
    assert plan.tokens(plan.weights + plan.absorbed + 10 * plan.token + 5) == 10
    assert plan.tokens(0) == 0


@pytest.mark.parametrize("name", FACTS)
def test_released_keys_round_trip(name: str):
    config = PRESETS[name]
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def _changed(name: str, part: str = "", **facts: object) -> ModelConfig:
    config = ModelConfig.from_hf(released(name))
    if part:
        facts = {part: dataclasses.replace(getattr(config, part), **facts)}
    return dataclasses.replace(config, **facts)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (_changed("v2", "moe", normalise=True), "moe.normalise: given True; allowed: False"),
        (_changed("v3", latent_eps=1e-5), "latent_eps: given 1e-05; allowed: 1e-06"),
        (_changed("v3", sparse_layers=(True, *(False,) * 60)), "sparse_layers"),
        (_changed("v2", "rope", interleaved=False), "rope_interleave: given False"),
        (_changed("v3", family="youtu", ignored_layers=0), "moe: given MoEConfig"),
        (_changed("v3_2", "indexer", hadamard=True), "indexer.hadamard: given True"),
        (dataclasses.replace(V4_FLASH, yarn=V3.rope.yarn), "yarn.mscale: given 1.0"),
    ],
    ids=lambda v: shown(v)[:24],
)
def test_what_the_keys_cannot_say_is_not_written(config, match):
    with pytest.raises(ConfigError, match=match):
        config.to_hf()


@pytest.mark.parametrize("path", TINY, ids=lambda p: p.stem)
def test_transformers_5_keys(path: Path):
    """``to_json_string(use_diff=False)`` of transformers 5.23 for tiny models."""
    config = ModelConfig.from_hf(path)
    full = PRESETS[path.stem.removeprefix("tiny_").upper()]
    assert config.moe is None or config.moe.method == full.moe.method
    assert (config.rope.yarn is None) == (full.rope.yarn is None)
    assert ModelConfig.from_hf(config.to_hf()) == config


def _v3(**changes: object) -> dict:
    return released("v3") | changes


def _v32(**changes: object) -> dict:
    return released("v3_2") | changes


def _glm(**changes: object) -> dict:
    return released("glm_5") | changes


def _yarn(**changes: object) -> dict:
    return _v3(rope_scaling=released("v3")["rope_scaling"] | changes)


def test_both_dialects_agree():
    data = released("v3")
    rope = data.pop("rope_scaling") | {"rope_theta": data.pop("rope_theta")}
    rope["rope_type"] = rope.pop("type")
    data["num_mtp_layers"] = data.pop("num_nextn_predict_layers")
    data["num_local_experts"] = data.pop("n_routed_experts")
    data["dtype"] = data.pop("torch_dtype")
    extra = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    assert ModelConfig.from_hf(data | {"rope_parameters": rope} | extra) == V3


@pytest.mark.parametrize(
    ("mscale", "all_dim", "cos_sin", "score"),
    [
        (1.0, 1.0, 1.0, 1.368888**2),
        (0, 1.0, 1.368888, 1.368888**2),
        (None, None, 1.368888, 1.0),
        (1.0, 0, 1.368888, 1.0),
        (0.707, 1.0, 1.260804 / 1.368888, 1.368888**2),
    ],
)
def test_yarn_magnitudes(mscale: object, all_dim: object, cos_sin: float, score: float):
    rope = ModelConfig.from_hf(_yarn(mscale=mscale, mscale_all_dim=all_dim)).rope
    assert rope.cos_sin_factor == pytest.approx(cos_sin, rel=1e-6)
    assert rope.score_factor == pytest.approx(score, rel=1e-6)


def test_yarn_details():
    given = ModelConfig.from_hf(_yarn(attention_factor=1.5, truncate=False, beta_fast=None))
    assert given.rope.cos_sin_factor == 1.5
    assert not given.rope.yarn.truncate
    assert given.rope.yarn.beta_fast == 32.0
    beside = ModelConfig.from_hf(_yarn() | {"original_max_position_embeddings": 2048})
    assert beside.rope.yarn.original == 2048
    assert ModelConfig.from_hf(_yarn(factor=None)).rope.yarn.factor == 40.0


def test_what_transformers_ignores_or_keeps():
    lite = released("v2_lite")
    assert ModelConfig.from_hf(lite | {"norm_topk_prob": True}) == V2_LITE
    assert ModelConfig.from_hf(lite | {"n_group": 8, "topk_group": 3}) == V2_LITE
    assert ModelConfig.from_hf(lite | {"mlp_bias": True}).mlp_bias
    assert not ModelConfig.from_hf(_v3(rope_interleave=False)).rope.interleaved
    assert ModelConfig.from_hf(_v3(attention_bias=True)).attention_bias
    assert ModelConfig.from_hf(_v3(q_lora_rank=None)).dims.q_rank is None
    assert ModelConfig.from_hf(_v3(first_k_dense_replace=61)).moe is None
    assert ModelConfig.from_hf(_v3(eos_token_id=None)).eos == ()
    types = ["sparse", "dense"] + ["sparse"] * 45
    glm = ModelConfig.from_hf(released("glm_4_7_flash") | {"mlp_layer_types": types})
    assert glm.sparse_layers[:3] == (True, False, True)


def _deep(n: int) -> list:
    nested: list = []
    for _ in range(n):
        nested = [nested]
    return nested


REFUSED = [
    (_v3(rope_teta=1), "unknown key rope_teta", "Nearest known name: rope_theta."),
    (_yarn(beta_fst=1), "unknown key rope_scaling.beta_fst", "beta_fast"),
    (_v3(index_topk=2048), "unknown key index_topk", ""),
    (_v3(model_type="deepseek_v5"), "model_type", "deepseek_v3"),
    (_v3(model_type="deepseek_v41"), "model_type", "youtu, deepseek_v4."),
    (_v3(model_type="deepseek_v4"), "model_type", "V4Config.from_hf reads it."),
    (_v32(rope_interleave=False), "rope_interleave", "rotates pairs"),
    (_v32(q_lora_rank=None), "q_rank with an indexer", "query latent"),
    (_v32(index_head_dim=32), "IndexerConfig.dim", "at least rope=64"),
    (_v32(indexer_types=["full"] * 61), "unknown key indexer_types", ""),
    (_glm(indexer_types=["shared"] * 78), "indexer_types", "the first 'full'"),
    (_glm(index_topk_pattern="FS"), "indexer_types", "78 times"),
    (_v3(hidden_act="gelu"), "hidden_act", "silu"),
    (_v3(num_key_value_heads=8), "num_key_value_heads", "128"),
    (_v3(moe_layer_freq=2), "moe_layer_freq", "1"),
    (_v3(scoring_func="softmax"), "scoring_func", "sigmoid"),
    (_v3(topk_method="greedy"), "topk_method", "noaux_tc"),
    (released("v2") | {"topk_method": "noaux_tc"}, "topk_method", "group_limited_greedy"),
    (released("v2") | {"scoring_func": "sigmoid"}, "scoring_func", "softmax"),
    (released("v2") | {"rope_interleave": False}, "rope_interleave", "rotates pairs"),
    (_v3(mlp_bias=True), "mlp_bias", "deepseek_v2"),
    (_v3(head_dim=128), "head_dim", "64"),
    (_v3(n_group=7), "MoEConfig.groups", "divisor of 256"),
    (_v3(topk_group=9), "MoEConfig.topk_groups", "at most 8"),
    (_v3(topk_group=1, num_experts_per_tok=33), "MoEConfig.topk", "at most 32"),
    (_v3(n_group=256, topk_group=8), "MoEConfig.groups", "two best"),
    (_v3(num_local_experts=128), "n_routed_experts and num_local_experts", "equal"),
    (_v3(qk_rope_head_dim=63, head_dim=None), "MLADims.rope", "even"),
    (_v3(kv_lora_rank=0), "kv_lora_rank", ">= 1"),
    (_v3(hidden_size=True), "hidden_size", "integer"),
    (_v3(rms_norm_eps=float("nan")), "rms_norm_eps", "a number > 0, at most 1"),
    (_v3(rms_norm_eps=1e30), "rms_norm_eps: given 1e+30", "a number > 0, at most 1"),
    (_v3(routed_scaling_factor=1e300), "routed_scaling_factor", "finite in float32"),
    (_v3(rope_scaling=None, rope_parameters=0), "config.json: rope_parameters", "object"),
    (_v3(rope_scaling=[]), "config.json: rope_scaling", "object"),
    (_v3(mlp_layer_types=["dense"] * 61), "mlp_layer_types", "3 dense layers"),
    (released("glm_4_7_flash") | {"first_k_dense_replace": 2}, "first_k_dense", "mlp_layer_types"),
    (_yarn(type="longrope"), "rope_type", "default or yarn"),
    (_v3(rope_scaling={"type": "linear", "factor": 2}), "rope_type", "default or yarn"),
    (_yarn(factor=0), "factor: given 0", "> 0"),
    (_yarn(attention_factor=0), "attention_factor: given 0", "> 0"),
    (_v3(rope_scaling={"rope_type": "llama3"}), "rope_type", "llama3"),
    (_v3(rope_parameters={"rope_type": "default"}), "rope_scaling and rope_parameters", "one"),
    (_v3(partial_rotary_factor=0.5), "partial_rotary_factor", "1"),
    (_yarn(factor=0.5), "YarnConfig.factor", ">= 1"),
    (_v3(quantization_config={"quant_method": "awq"}), "quantization_config.quant_method", "fp8"),
    (
        _v3(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "weight_block_size",
        "[128, 128]",
    ),
    (_v3(eos_token_id="end"), "eos_token_id", "token id"),
    (_v3(eos_token_id=[1, 10**400]), "eos_token_id", "token id"),
    (_v3(num_hidden_layers=10**9), "num_hidden_layers", "at most 1,024"),
    (_v3(n_routed_experts=10**9), "n_routed_experts", "at most 65,536"),
    (_v3(vocab_size=2**31), "vocab_size: given 2147483648", "at most 2,147,483,647"),
    (_v3(max_position_embeddings=10**400), "max_position_embeddings", "(401 characters)"),
    (_v3(rope_theta=10**400), "rope_theta", "finite"),
    (_v3(rope_theta=1e31), "RopeConfig.theta", "at most 1e+30"),
    (_yarn(mscale=1e30), "YarnConfig.mscale: given 1e+30", "at most 1e+06"),
    (_yarn(mscale_all_dim=1e20), "YarnConfig.mscale_all_dim", "at most 1e+06"),
    (_yarn(beta_slow=1e-320), "YarnConfig.beta_slow", ">= 1e-09"),
    (_yarn(beta_fast=1e30), "YarnConfig.beta_fast", "at most 1e+09"),
    (_yarn(factor=1e30), "YarnConfig.factor", "at most 1e+09"),
    (_yarn(attention_factor=1e30), "YarnConfig.attention_factor", "at most 1e+06"),
    (_yarn(original_max_position_embeddings=10**400), "original_max_position", "at most"),
    (_v3(hidden_act=_deep(100_000)), "hidden_act: given list", "silu"),
    (_v3(x=_deep(100_000)), "unknown key x", ""),
    (_v3(**{f"x{i}": i for i in range(50_000)}), "x10004 and 49,990 more", "ignore_keys=['x0']"),
    (_v3(**{"x" * 1_000_000: 1}), "unknown key xxx", "(1,000,000 characters)"),
]


@pytest.mark.parametrize(("data", "what", "also"), REFUSED, ids=lambda v: shown(v)[:24])
def test_refusals_name_key_and_remedy(data: object, what: str, also: str):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(data)
    assert what in str(error.value)
    assert also in str(error.value)
    assert len(str(error.value)) < 2000


def test_a_missing_width_is_named_with_what_is_similar():
    data = _v3(kv_lora_rnk=512)
    del data["kv_lora_rank"]
    with pytest.raises(ConfigError, match=r"kv_lora_rank: given nothing.*kv_lora_rnk"):
        ModelConfig.from_hf(data)


def test_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json: given No such file"):
        ModelConfig.from_hf(tmp_path / "config.json")
    file = tmp_path / "config.json"
    file.write_text("{" * 100_000)
    with pytest.raises(ConfigError, match="not JSON"):
        ModelConfig.from_hf(tmp_path)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelConfig.from_hf(tmp_path)
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="a JSON object"):
        ModelConfig.from_hf(tmp_path)
    file.write_text(json.dumps(released("v3")))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(str(file)) == V3


def test_files_that_would_hang_or_not_end_are_refused(tmp_path: Path):
    file = tmp_path / "config.json"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="given a pipe, not a regular file"):
        ModelConfig.from_hf(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="given a device, not a regular file"):
        ModelConfig.from_hf(tmp_path)
    file.unlink()
    with file.open("wb") as f:
        f.truncate(20 * 2**30)
    with pytest.raises(ConfigError, match="21,474,836,480 bytes, at most 16,777,216"):
        ModelConfig.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="File name too long"):
        ModelConfig.from_hf("n" * 5000)


def test_a_folder_that_is_not_there_is_one_that_can_be_downloaded():
    """README's third example, without the checkpoint that it names."""
    message = r"model: given DeepSeek-V2-Lite, which is not here.*hf download"
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf("DeepSeek-V2-Lite")


def test_who_wrote_the_file_is_a_warning():
    with pytest.warns(UserWarning, match="nothing is computed from: _x, unsloth_version"):
        assert ModelConfig.from_hf(_v3(unsloth_version="2025.1", _x=1)) == V3
    with pytest.warns(UserWarning, match=r"rope_scaling\._note"):
        assert ModelConfig.from_hf(_yarn(_note="")) == V3


def test_unknown_keys_may_be_passed_over_by_name():
    data = _yarn(note=1) | {"my_key": 3}
    with pytest.raises(ConfigError, match=r"ignore_keys=\['rope_scaling.note'\].*--ignore-key"):
        ModelConfig.from_hf(data)
    with pytest.raises(ConfigError, match="unknown key my_key"):
        ModelConfig.from_hf(data, ignore_keys=["rope_scaling.note"])
    keys = ["rope_scaling.note", "my_key", "absent"]
    assert ModelConfig.from_hf(data, ignore_keys=keys) == V3
    with pytest.raises(ConfigError, match=r"ignored keys: given rope_scaling\.factor"):
        ModelConfig.from_hf(data, ignore_keys=[*keys, "rope_scaling.factor"])
    with pytest.raises(ConfigError, match="ignored keys: given hidden_size"):
        ModelConfig.from_hf(data, ignore_keys=[*keys, "hidden_size"])
    with pytest.raises(ConfigError, match="a list of names"):
        ModelConfig.from_hf(data, ignore_keys="my_key")
    with pytest.raises(ConfigError, match="a list of names"):
        ModelConfig.from_hf(data, ignore_keys=5)


NUMBERS = st.none() | st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-1, 10**18),
    st.sampled_from([10**400, 5e-324, 1e308, 1e-9, 1e9, 1e6, 0, True, "1"]),
)
YARN = [
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor"),
]


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.dictionaries(st.sampled_from(YARN), NUMBERS), NUMBERS, NUMBERS)
def test_any_yarn_numbers_are_refused_or_give_finite_ones(changes: dict, theta, positions):
    data = _yarn(**changes)
    data |= {"rope_theta": theta or 1e4, "max_position_embeddings": positions or 4096}
    try:
        config = ModelConfig.from_hf(data)
    except ConfigError:
        return
    assert np.isfinite(config.rope.inv_freq()).all()
    assert np.isfinite([config.scale, config.rope.cos_sin_factor]).all()


def test_a_routing_method_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="method: given noaux-tc; allowed: greedy, group_limited"):
        MoEConfig(experts=4, topk=2, width=4, shared=0, method="noaux-tc")
