"""Weights of DeepSeek V4: published tensors to the byte, layouts, E8M0 scales, packed E2M1."""

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mla_jax import V4Config
from mla_jax.engine import load_model
from mla_jax.errors import WeightsError
from mla_jax.model.presets import V4_FLASH, V4_PRO
from mla_jax.model.safetensors_io import write_safetensors
from mla_jax.model.sharding import named_leaves
from mla_jax.model.weight_table import num_params
from mla_jax.model.weight_table_v4 import published_tensors, weight_table_v4
from mla_jax.model.weights import checked_config, dequantise_fp4, save
from tests.model import v4

PLAIN = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}
BYTES = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I64": 8}


@pytest.mark.parametrize(
    ("config", "tensors", "size"),
    [(V4_FLASH, 69_187, 159_609_485_896), (V4_PRO, 145_116, 864_704_792_696)],
)
def test_published_folders_to_the_byte(config, tensors, size):
    """As many tensors and bytes as the published folders have, the MTP block among them."""
    found = published_tensors(config)
    assert len(found) == tensors
    assert sum(math.prod(shape) * BYTES[dtype] for shape, dtype in found.values()) == size


def leaves_of(module):
    leaves = named_leaves(nnx.state(module, nnx.Param))
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def tensors_of(module, layout="published"):
    """The module's weights by checkpoint name, float32 and int64."""
    leaves, found = leaves_of(module), {}
    for weight in weight_table_v4(module.config, layout=layout):
        parts = [leaves[path] for path in weight.paths]
        parts = [p if weight.place is None else p[weight.place.index] for p in parts]
        for e, name in enumerate(weight.names()):
            if weight.fused:  # [experts, parts, in, out] of gate and up
                joined = np.stack(parts, 1) if len(parts) > 1 else parts[0][:, None]
                found[name] = np.ascontiguousarray(
                    joined.swapaxes(2, 3).reshape(len(joined), -1, joined.shape[2])
                )
                continue
            x = weight.to_checkpoint(parts[0][e] if weight.experts else parts[0])
            found[name] = np.ascontiguousarray(x.astype(np.int64) if weight.integer else x)
    return found


def folder_of(path, cfg, tensors, **changes):
    write_safetensors(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(cfg.to_hf() | changes))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["published", "saved", "modules"])
def test_every_layout_is_the_same_model(layout, tmp_path):
    cfg = v4.config()
    module = v4.model(cfg)
    folder_of(tmp_path, cfg, tensors_of(module, layout))
    loaded, config = load_model(tmp_path, dtype=jnp.float32)
    assert config == cfg
    want, got = leaves_of(module), leaves_of(loaded)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)


def test_saved_and_loaded_again(tmp_path):
    cfg = v4.config()
    module = v4.model(cfg, "bfloat16")
    save(tmp_path, cfg, {k: jnp.asarray(x) for k, x in leaves_of(module).items()})
    loaded, _ = load_model(tmp_path, dtype=jnp.bfloat16)
    for path, leaf in leaves_of(loaded).items():
        np.testing.assert_array_equal(leaf, leaves_of(module)[path], err_msg=path)
        kept = ("streams.", "stream_head", "sink", "gate_bias", "choice_bias")
        if any(name in path for name in kept):  # these survive a cast of the model
            assert leaf.dtype == np.float32, path


def test_packed_codes():
    """The low nibble is the even column; bit 3 the sign; one power of two for 32 columns."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.arange(16, dtype=np.uint8)
    row = np.concatenate([codes, codes, codes, codes])  # 64 columns
    packed = (row[0::2] | row[1::2] << 4).view(np.int8)[None]
    scale = np.array([[0.25, 8.0]]).astype(ml_dtypes.float8_e8m0fnu)
    got = dequantise_fp4(packed, scale)[0]
    values = np.array(magnitudes + [-m for m in magnitudes])
    np.testing.assert_array_equal(got[:32], np.tile(values, 2) * 0.25)
    np.testing.assert_array_equal(got[32:], np.tile(values, 2) * 8)


def quantised(module, rng):
    """A published folder's dtypes for a tiny model, and the float32 numbers that they stand for."""
    cfg, plain = module.config, tensors_of(module)
    stored, exact = {}, dict(plain)
    for name, (shape, dtype) in published_tensors(cfg).items():
        if name.startswith("mtp."):
            stored[name] = np.zeros(shape, np.int8 if dtype == "I8" else np.float32)
        elif dtype == "I8":
            out, half = shape
            codes = rng.integers(0, 256, shape, dtype=np.uint8).view(np.int8)
            power = rng.integers(-6, 0, (out, -(-half // 16)))
            scale = (2.0**power).astype(ml_dtypes.float8_e8m0fnu)
            stored[name], stored[name.removesuffix("weight") + "scale"] = codes, scale
            exact[name] = dequantise_fp4(codes, scale)
        elif dtype == "F8_E4M3":
            low = plain[name].astype(ml_dtypes.float8_e4m3fn)
            blocks = [-(-n // 128) for n in shape]
            scale = (2.0 ** rng.integers(-2, 2, blocks)).astype(ml_dtypes.float8_e8m0fnu)
            stored[name], stored[name.removesuffix("weight") + "scale"] = low, scale
            grown = scale.astype(np.float32).repeat(128, 0).repeat(128, 1)
            exact[name] = low.astype(np.float32) * grown[: shape[0], : shape[1]]
        elif dtype != "F8_E8M0":
            stored[name] = plain[name].astype(
                {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}[dtype]
            )
            exact[name] = stored[name].astype(np.int64 if dtype == "I64" else np.float32)
    return stored, exact


@pytest.mark.slow
def test_published_dtypes(tmp_path, rng):
    """e4m3 with E8M0 scales and packed E2M1 experts are the numbers that they stand for."""
    cfg = v4.config(hidden=64, q_rank=160, heads=8, dim=32, out_rank=32, ignored_layers=1)
    module = v4.model(cfg)
    stored, exact = quantised(module, rng)
    (tmp_path / "low").mkdir()
    (tmp_path / "exact").mkdir()
    block = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    folder_of(tmp_path / "low", cfg, stored, quantization_config=block, expert_dtype="fp4")
    folder_of(tmp_path / "exact", cfg, exact)
    low, config = load_model(tmp_path / "low", dtype=jnp.float32)
    want, _ = load_model(tmp_path / "exact", dtype=jnp.float32)
    assert config.fp8_block == 128
    for path, leaf in leaves_of(want).items():
        np.testing.assert_array_equal(leaves_of(low)[path], leaf, err_msg=path)


def test_what_is_wrong_with_a_folder(tmp_path):
    cfg = v4.config()
    tensors = tensors_of(v4.model(cfg))
    del tensors["layers.1.attn.compressor.ape"]
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].astype(np.float32)
    tensors["layers.2.attn.indexer.wq_b.weight"] = np.zeros((2, 2), np.float32)
    tensors["mtp.0.enorm.weight"] = np.zeros(3, np.float32)  # of no interest
    tensors["layers.0.ffn.experts.0.w1.weight"] = np.zeros((16, 16), np.int8)
    folder_of(tmp_path, cfg, tensors)
    with pytest.raises(WeightsError) as caught:
        load_model(tmp_path, dtype=jnp.float32)
    text = str(caught.value)
    for problem in (
        "missing: layers.1.attn.compressor.ape [4, 32]",
        "mistyped: layers.0.ffn.gate.tid2eid is F32; allowed: I64, I32",
        "unexpected: layers.2.attn.indexer.wq_b.weight [2, 2]",
        "missing: layers.0.ffn.experts.0.w1.scale [16, 1], the scales of an I8 tensor",
    ):
        assert problem in text, text
    assert "mtp" not in text


def test_packed_experts_of_odd_width_are_refused_by_name(tmp_path):
    cfg = v4.config(moe=replace(v4.config().moe, width=15))
    tensors = tensors_of(v4.model(cfg))
    name = "layers.0.ffn.experts.0.w2"
    tensors[f"{name}.weight"] = np.zeros((cfg.hidden, 8), np.int8)
    tensors[f"{name}.scale"] = np.ones((cfg.hidden, 1), ml_dtypes.float8_e8m0fnu)
    folder_of(tmp_path, cfg, tensors)
    with pytest.raises(WeightsError) as caught:
        checked_config(tmp_path)
    expected = f"mistyped: {name}.weight is I8, two columns a byte; it has 15, odd"
    assert caught.value.problems == [expected]


def test_parameters():
    """The whole of V4-Flash, its table of token ids not counted."""
    tables = 3 * 129280 * 6
    shapes = published_tensors(V4Config())
    packed = sum(
        math.prod(s) * (2 if d == "I8" else 1) for n, (s, d) in shapes.items() if d != "F8_E8M0"
    )
    assert num_params(V4Config()) == packed - tables
