"""A model whose weights stay block-scaled e4m3: the model of its widened weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax.engine import Engine
from mla_jax.errors import ArgumentError, EngineError, WeightsError
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.linear import Linear
from mla_jax.model.safetensors_io import Checkpoint, write_safetensors
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.weights import keeps_fp8, load, place
from mla_jax.pallas import fp8_matmul
from tests.model import fp8

GPU = jax.default_backend() == "gpu"
LONG = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [[1, 5, 9, 30], [2], list(range(3, 40))]
BOUND = 1.25
"""How much farther from float32 logits may be than those of the widened weights in bfloat16."""


@pytest.fixture(scope="module")
def cfg():
    return fp8.config()


@pytest.fixture(scope="module")
def folder(cfg, tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8")
    fp8.write(path, cfg)
    return path


def serve(folder, dtype: str, fp8: bool | None, **more):
    settings = {"num_pages": 64, "page": 8, "max_requests": 4, "prefill_chunk": 64}
    engine = Engine.from_pretrained(
        folder, dtype=jnp.dtype(dtype), fp8_weights=fp8, want_logits=True, **(settings | more)
    )
    return engine.generate(PROMPTS, LONG), engine


def test_bytes_and_scales_stay_as_they_are(folder, cfg):
    tensors = {n: t.read() for n, t in Checkpoint.open(folder).tensors.items()}
    leaves = load(folder, cfg, dtype="bfloat16", fp8=True)
    for path, name in (
        ("stacks.1.blocks.0.attn.q_up", "self_attn.q_b_proj"),
        ("stacks.1.blocks.0.attn.out", "self_attn.o_proj"),
        ("stacks.1.blocks.0.moe.shared.down", "mlp.shared_experts.down_proj"),
    ):
        for row, layer in enumerate((1, 2)):
            stored = tensors[f"model.layers.{layer}.{name}.weight"]
            kept = np.asarray(leaves[f"{path}.kernel"][row])
            assert kept.dtype == stored.dtype and kept.tobytes() == stored.tobytes()
            scale = tensors[f"model.layers.{layer}.{name}.weight_scale_inv"]
            np.testing.assert_array_equal(leaves[f"{path}.scale"][row], scale)
    up = np.asarray(leaves["stacks.1.blocks.0.moe.experts.up"][1, 5])
    assert up.tobytes() == tensors["model.layers.2.mlp.experts.5.up_proj.weight"].tobytes()
    assert leaves["stacks.1.blocks.0.moe.router.kernel"].dtype == jnp.float32
    assert leaves["embed.embedding"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_in_float32_it_is_the_widened_model(folder):
    want, widened = serve(folder, "float32", False)
    got, kept = serve(folder, "float32", True)
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logits, b.logits, atol=2e-4, rtol=2e-4)
    assert kept.stats().weight_bytes < 0.45 * widened.stats().weight_bytes


@pytest.mark.slow
def test_in_bfloat16_it_is_as_near_to_float32_as_the_widened_model(folder, record_property):
    """The same tokens are fed to all: the error of the logits of each request's first token."""
    true, _ = serve(folder, "float32", False)
    errors = {}
    for kept in (False, True):
        got, _ = serve(folder, "bfloat16", kept)
        pairs = [(a.logits[0], b.logits[0]) for a, b in zip(got, true, strict=True)]
        errors[kept] = np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs)) / np.sqrt(
            sum((b**2).sum() for _, b in pairs)
        )
        record_property(f"relative error, fp8 {kept}", float(errors[kept]))
    assert errors[True] < BOUND * errors[False], errors
    assert errors[False] < 0.05, errors


def test_by_itself_a_gpu_keeps_them_and_a_cpu_does_not(folder):
    _, engine = serve(folder, "bfloat16", None)
    leaves = jax.tree.leaves(engine._step.leaves)
    assert any(x.dtype == jnp.float8_e4m3fn for x in leaves) == GPU


@pytest.mark.slow
def test_activations_in_e4m3_of_many_rows(folder, cfg, monkeypatch):
    """A prompt of 37 tokens has them, its decodes and a prompt of one token have not."""
    monkeypatch.setattr(fp8_matmul, "MANY", 16)
    monkeypatch.setattr(fp8_matmul, "MANY_EACH", 4)
    (_, few, many), exact = serve(folder, "float32", True)
    (_, same, got), engine = serve(folder, "float32", True, fp8_activations=True, max_requests=1)
    assert same.token_ids == few.token_ids
    np.testing.assert_allclose(same.logits, few.logits, atol=2e-4, rtol=2e-4)
    module = nnx.merge(engine._step._graph, nnx.state(_module(exact)))
    want = module.logits(module.full(jnp.asarray([PROMPTS[2]]))[0, -1:])[0]
    off = np.linalg.norm(got.logits[0] - want) / np.linalg.norm(want)
    moved = np.linalg.norm(got.logits[0] - many.logits[0]) / np.linalg.norm(want)
    assert off < 0.01 < moved < 0.3
    assert not any(x.quantise_rows for _, x in nnx.iter_graph(_module(exact)) if type(x) is Linear)


def _module(engine):
    return engine._step._merged(engine._step.leaves)


def test_activations_of_a_model_without_e4m3_weights_are_refused(folder):
    with pytest.raises(ArgumentError, match="given True; allowed: None or False"):
        serve(folder, "float32", False, fp8_activations=True)
    with pytest.raises(EngineError, match=r"given 'yes' \(str\); allowed: True, False or None"):
        serve(folder, "float32", True, fp8_activations="yes")


def test_what_cannot_stay(folder, cfg, tmp_path):
    """One product that is not e4m3."""
    assert keeps_fp8(folder, cfg)
    tensors = {n: t.read() for n, t in Checkpoint.open(folder).tensors.items()}
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    del tensors[f"{name}_scale_inv"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert not keeps_fp8(tmp_path, cfg)
    with pytest.raises(WeightsError, match=r"o_proj\.weight: given F32; allowed: F8_E4M3"):
        serve(tmp_path, "bfloat16", True)
    serve(tmp_path, "bfloat16", None)


def test_settings_that_are_none_are_refused_in_words(folder):
    allowed = r"given 'auto' \(str\); allowed: True, False or None"
    with pytest.raises(EngineError, match=f"fp8_weights: {allowed}"):
        serve(folder, "bfloat16", "auto")
    with pytest.raises(EngineError, match=r"^family: given"):
        serve(folder, "bfloat16", True, family="deepseek_v3")


@pytest.mark.slow
def test_an_engine_of_a_loaded_module(folder, cfg):
    """Its dtype is that of what is not e4m3."""
    make = partial(DeepseekV3, cfg, dtype=jnp.bfloat16, fp8=True)
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    place(module, load(folder, cfg, dtype="bfloat16", fp8=True))
    engine = Engine(module, cfg, num_pages=64, page=8, max_requests=4, prefill_chunk=64)
    want, _ = serve(folder, "bfloat16", True)
    got = engine.generate(PROMPTS, LONG)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
