"""Steps of every released model at its own widths, a layer of each kind, compiled for an H200.

What a kernel cannot take (shared memory, a size that nobody tried) fails here, without a GPU.
"""

import dataclasses
import re

import numpy as np
import pytest

from benchmarks.random_model import of_layers
from mla_jax.commands import fit
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.metadata.buckets import MLALadder
from mla_jax.model.family import Serving
from mla_jax.model.presets import PRESETS
from mla_jax.placement import Placement
from tests import aot
from tools.host_calls import host_calls

REASON = aot.available()
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(bool(REASON), reason=REASON or "available"),
]

BATCHES = {"decodes": [1] * 8, "prompts": [1] * 31 + [2049]}
"""New tokens of each request."""


def one_of_each(config: AnyConfig) -> AnyConfig:
    """The first layer of each kind, in order."""
    if isinstance(config, V4Config):
        ratios = tuple(dict.fromkeys(config.compress_ratios))
        return dataclasses.replace(config, compress_ratios=ratios, hash_layers=1)
    kept = sorted({config.sparse_layers.index(kind) for kind in set(config.sparse_layers)})
    sparse = tuple(config.sparse_layers[i] for i in kept)
    changes: dict = {"layers": len(kept), "sparse_layers": sparse}
    if config.indexer is not None:
        full = tuple(config.indexer.full[i] for i in kept)
        changes["indexer"] = dataclasses.replace(config.indexer, full=full)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_step_compiles(name, batch):
    """e4m3 weights where the model is published so; a step of few decodes copies no weight."""
    config = one_of_each(PRESETS[name])
    fp8 = config.fp8_block is not None
    new = np.array(BATCHES[batch], np.int32)
    settings = fit.Settings(
        config=config, fp8=fp8, cache_format="fp8_e4m3" if fp8 else "bf16", prefill_chunk=4096
    )
    program = fit.program(settings, Placement.of(aot.h200()), new, context=8192)
    if batch == "decodes":
        assert program.memory_analysis().temp_size_in_bytes < 2**28


def test_settings_of_a_gpu_that_a_step_compiles_for():
    where = Placement.of(aot.h200())
    serving = Serving.of(PRESETS["V3"], placement=where)
    assert (serving.prefill_chunk, serving.fp8_activations) == (2048, None)
    for changes in ({"dtype": "float32"}, {"backend": "xla"}):
        assert Serving.of(PRESETS["V3"], placement=where, **changes).fp8_activations is False
    ladder = MLALadder.default(max_requests=8, max_prefill_tokens=256, max_pages=64)
    assert Serving.of(PRESETS["V3"], placement=where, ladder=ladder).prefill_chunk == 256


@pytest.mark.parametrize(
    ("name", "layers"), [("V2_LITE", 27), ("V3", 9), ("V3_2", 7), ("V4_FLASH", None)]
)
def test_a_step_of_decodes_compiles_to_one_graph(name, layers):
    """The host calls one CUDA graph, and few kernels and copies behind it that prepare results."""
    config = one_of_each(PRESETS[name]) if layers is None else of_layers(PRESETS[name], layers)
    calls = host_calls(fit.Settings(config=config, fp8=config.fp8_block is not None), {})
    assert set(calls) == {"the step"}
    assert calls["the step"]["CommandBuffer"] == 1
    assert calls["the step"].total() < 16 and not calls["the step"]["Conditional"], calls


@pytest.mark.parametrize(("name", "layers"), [("V3_2", 7), ("V4_FLASH", 7)])
def test_the_choice_of_experts_is_launched_before_what_runs_beside_it(name, layers):
    """In each layer it comes before the shared experts' products, of which it needs nothing."""
    config = of_layers(PRESETS[name], layers)
    settings = fit.Settings(config=config, fp8=True, cache_format="fp8_e4m3")
    new = np.array(BATCHES["decodes"], np.int32)
    text = fit.program(settings, Placement.of(aot.h200()), new, context=8192).as_text()
    moe = config.moe
    results = {
        "choice": rf"\(f32\[8,{moe.topk}\]\S* s32\[8,{moe.topk}\]",
        "product": rf"f32\[\d+,8,{moe.shared * moe.width}\]",
    }
    calls = dict(re.findall(r"^%(\S+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    kinds = {
        call: kind
        for call, body in calls.items()
        for kind, result in results.items()
        if re.search(rf"ROOT \S+ = {result}.*custom-call", body)
    }
    orders = [
        [kinds[call] for call in re.findall(r"calls=%([^,\s]+)", body) if call in kinds]
        for body in calls.values()
    ]
    orders = [order for order in orders if "choice" in order]
    assert orders
    for order in orders:
        assert order == ["choice", "product", "product"] * (len(order) // 3), orders


@pytest.mark.parametrize(("name", "layers"), [("V3", 5), ("V3_2", 5), ("V4_FLASH", 7)])
def test_a_step_over_four_devices_compiles_to_few_calls(name, layers):
    """All layers are in one graph; embeddings are added up before it, logits collected behind."""
    settings = fit.Settings(config=of_layers(PRESETS[name], layers), cards=4, fp8=True)
    (calls,) = host_calls(settings, {}).values()
    assert calls["AllReduce"] == calls["AllGather"] == 1, calls
    assert calls["CommandBuffer"] <= 3 and calls.total() < 12, calls


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["V3", "V3_2", "V4_FLASH"])
def test_a_step_over_four_devices_compiles(name, batch):
    """Kernels over a device's share of heads and experts; no device gets another's weights."""
    config = one_of_each(PRESETS[name])
    fp8 = config.fp8_block is not None
    facts = {"cache_format": "fp8_e4m3" if fp8 else "bf16", "prefill_chunk": 4096}
    settings = fit.Settings(config=config, cards=4, fp8=fp8, **facts)
    new = np.array(BATCHES[batch], np.int32)
    program = fit.program(settings, Placement.of(aot.h200s(4)), new, context=8192)
    assert "all-reduce" in program.as_text()
    if batch == "decodes":
        assert program.memory_analysis().temp_size_in_bytes < 2**28


@pytest.mark.parametrize("rounded", [None, False], ids=["by_default", "refused"])
def test_compiles_products_of_e4m3_rows(rounded):
    """Products of many rows and e4m3 weights have them, experts' too, unless they are refused."""
    settings = fit.Settings(
        config=one_of_each(PRESETS["V3"]), fp8=True, cache_format="fp8_e4m3", prefill_chunk=4096
    )
    new = np.array([1] * 31 + [4065], np.int32)
    where = Placement.of(aot.h200())
    program = fit.program(settings, where, new, context=8192, fp8_activations=rounded)
    text = program.as_text()
    for kernel in ("mla_fp8_matmul", "mla_fp8_gate_up", "mla_fp8_down"):
        assert (f"/{kernel}/" in text) == (rounded is None)
