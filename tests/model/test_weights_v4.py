"""Weights of DeepSeek V4: published tensors to the byte, layouts, E8M0 scales, packed E2M1."""

import math
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import V4Config
from mla_jax.engine import Engine, load_model
from mla_jax.errors import WeightsError
from mla_jax.model.presets import V4_FLASH, V4_PRO
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.weight_table import num_params
from mla_jax.model.weight_table_v4 import published_tensors, stays_e4m3, weight_table_v4
from mla_jax.model.weights import (
    checked_config,
    dequantise,
    dequantise_fp4,
    e4m3_of_fp4,
    keeps_fp8,
    load,
    save,
)
from tests.model import v4
from tests.model.v4_published import (
    PUBLISHED,
    folder_of,
    leaves_of,
    quantised,
    tensors_of,
    write,
)

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


@pytest.mark.parametrize("shape", [(256, 512), (200, 288), (3, 64), (128, 32)])
def test_packed_codes_as_e4m3_are_the_same_numbers(shape, rng):
    """Also where blocks are not whole; scales of a block differ by 2^14, blocks by more."""
    out, into = shape
    packed = rng.integers(0, 256, (out, into // 2), dtype=np.uint8).view(np.int8)
    power = rng.integers(-14, 1, (out, -(-into // 32))) + 40 * (np.arange(out) // 128 % 2)[:, None]
    scale = np.exp2(power.astype(np.float32)).astype(ml_dtypes.float8_e8m0fnu)
    values, blocks = e4m3_of_fp4(packed, scale)
    assert values.dtype == ml_dtypes.float8_e4m3fn and values.shape == shape
    assert blocks.shape == (-(-out // 128), -(-into // 128)) and blocks.dtype == np.float32
    np.testing.assert_array_equal(dequantise(values, blocks), dequantise_fp4(packed, scale))


def test_packed_codes_far_below_their_block_become_the_nearest_that_e4m3_has(rng):
    packed = rng.integers(0, 256, (128, 64), dtype=np.uint8).view(np.int8)
    power = rng.integers(-127, 1, (128, 4))
    power[0, 0] = 0
    scale = np.exp2(power.astype(np.float32)).astype(ml_dtypes.float8_e8m0fnu)
    got, want = dequantise(*e4m3_of_fp4(packed, scale)), dequantise_fp4(packed, scale)
    assert np.abs(got - want).max() <= 2.0**-16
    near = np.repeat(power >= -14, 32, axis=1)
    np.testing.assert_array_equal(got[near], want[near])


@pytest.mark.slow
def test_weights_stay_e4m3(tmp_path):
    """The model of the widened weights in a byte each; what is published wider stays wider."""
    cfg = v4.config(hidden=64, q_rank=160, heads=8, dim=32, out_rank=32)
    write(tmp_path, cfg)
    assert keeps_fp8(tmp_path, checked_config(tmp_path))
    wish, prompts = SamplingParams(max_new_tokens=12, ignore_eos=True), [[1, 5], [*range(3, 60)]]
    found, held = [], []
    for fp8 in (False, True):
        settings = {"num_pages": 64, "page": 16, "max_requests": 4, "prefill_chunk": 32}
        settings |= {"dtype": jnp.float32, "cache_format": "fp32", "want_logits": True}
        engine = Engine.from_pretrained(tmp_path, fp8_weights=fp8, **settings)
        found.append(engine.generate(prompts, wish))
        held.append(engine.stats().weight_bytes)
    for got, want in zip(*found, strict=True):
        assert got.token_ids == want.token_ids
        np.testing.assert_allclose(got.logits, want.logits, atol=2e-4, rtol=2e-4)
    assert held[1] < 0.45 * held[0]
    leaves = load(tmp_path, cfg, dtype="bfloat16", fp8=True)
    kept = {path for path, leaf in leaves.items() if leaf.dtype == jnp.float8_e4m3fn}
    low = {w.paths[0] for w in weight_table_v4(cfg) if stays_e4m3(w)}
    assert kept == low and not any(".pool." in path for path in kept)


@pytest.mark.parametrize("scale", ["of 32 bits", "NaN"])
def test_packed_experts_whose_scales_are_no_powers_of_two_do_not_stay_in_8_bits(scale, tmp_path):
    """Other dtypes are widened by default and refused if asked for; NaN is refused."""
    cfg = v4.config(compress_ratios=(0,))
    stored, _ = quantised(v4.model(cfg), np.random.default_rng(0))
    name = "layers.0.ffn.experts.1.w2.scale"
    if scale == "NaN":
        stored[name].view(np.uint8)[0, 0] = 255
        message = f"{name}: NaN among the scales"
    else:
        stored[name] = stored[name].astype(np.float32) * 1.5
        message = r"w2.weight: given I8 with scales of F32; allowed: F8_E4M3, or packed with scales"
    folder_of(tmp_path, cfg, stored, **PUBLISHED)
    assert keeps_fp8(tmp_path, cfg) == (scale == "NaN")
    with pytest.raises(WeightsError, match=message):
        load(tmp_path, cfg, dtype="bfloat16", fp8=True)
    if scale != "NaN":
        load(tmp_path, cfg, dtype="bfloat16")


@pytest.mark.slow
def test_published_dtypes(tmp_path, rng):
    """e4m3 with E8M0 scales and packed E2M1 experts are the numbers that they stand for."""
    cfg = v4.config(hidden=64, q_rank=160, heads=8, dim=32, out_rank=32, ignored_layers=1)
    module = v4.model(cfg)
    stored, exact = quantised(module, rng)
    (tmp_path / "low").mkdir()
    (tmp_path / "exact").mkdir()
    folder_of(tmp_path / "low", cfg, stored, **PUBLISHED)
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


@pytest.mark.parametrize("expert", [-1, 10**6])
def test_a_table_of_experts_that_there_are_not_is_refused(tmp_path, expert):
    cfg = v4.config()
    tensors = tensors_of(v4.model(cfg))
    table = np.array(tensors["layers.0.ffn.gate.tid2eid"])
    table[3, 0] = expert
    folder_of(tmp_path, cfg, tensors | {"layers.0.ffn.gate.tid2eid": table})
    with pytest.raises(WeightsError, match=rf"tid2eid: experts .*{expert}.*; the model has 0 to"):
        load_model(tmp_path, dtype=jnp.float32)


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
