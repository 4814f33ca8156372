"""Greedy decoding equals transformers: 32 tokens, ten prompts served together, every family."""

import pytest
import torch

from mla_jax.model import stack
from tests.parity import checkpoint, reference
from tests.parity.compare import assert_robust, assert_same, serve
from tests.parity.families import BY_NAME, FAMILIES, FIVE_LAYERS, V32_FP8, VARIATIONS

torch.set_num_threads(1)

SLOW = pytest.mark.slow
BY_SIZE = [pytest.param(c, marks=[SLOW] * c.name.endswith("_dims")) for c in FAMILIES]


def _judge(case, folder, model, record_property, **settings):
    ref = reference.greedy(model, reference.prompts(case))
    assert_robust(ref)
    completions, engine = serve(folder, ref.prompts, **settings)
    worst = assert_same(completions, ref)
    record_property("max_abs_logit_difference", worst)
    assert engine.stats().pages_used == 0
    return engine


@pytest.mark.parametrize("case", BY_SIZE, ids=str)
def test_family(case, tmp_path, record_property):
    """True widths in the released layout, narrow ones as transformers saves them."""
    model = reference.build(case)
    if case.name.endswith("_dims"):
        checkpoint.save_released(model, case, tmp_path)
    else:
        checkpoint.save_pretrained(model, tmp_path, shard="400KB")
    _judge(case, tmp_path, model, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_NAME["v3_dims"], BY_NAME["v3_small"], V32_FP8], ids=str)
def test_fp8_blocks(case, tmp_path, record_property):
    model = reference.build(case)
    checkpoint.save_released(model, case, tmp_path, fp8=True)
    _judge(case, tmp_path, model, record_property)


def test_several_layers_of_a_turn(tmp_path, record_property, monkeypatch):
    """As decoders of many layers have them, here of five: two turns of two blocks."""
    for name in ("LAYERS_A_TURN", "MANY_REPEATS"):
        monkeypatch.setattr(stack, name, 2)
    case = FIVE_LAYERS
    model = reference.build(case)
    checkpoint.save_released(model, case, tmp_path)
    engine = _judge(case, tmp_path, model, record_property)
    assert [(len(p.kinds), p.repeats) for p in stack.periods_of(engine.config.kinds)] == [
        (1, 1),
        (2, 2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIATIONS, ids=str)
def test_variation(case, tmp_path, record_property):
    model = reference.build(case)
    checkpoint.save_released(model, case, tmp_path, shards=1)
    _judge(case, tmp_path, model, record_property)


@pytest.mark.parametrize("name", ["v3_small", "v32_small"])
def test_a_pool_too_small_changes_nothing(name, tmp_path, record_property):
    """Half the pages that all prompts need: requests queue and are preempted."""
    case = BY_NAME[name]
    model = reference.build(case)
    checkpoint.save_pretrained(model, tmp_path)
    engine = _judge(case, tmp_path, model, record_property, num_pages=33)
    assert engine.stats().pages_peak <= 32 * len(engine.groups)


def test_a_wrong_model_is_seen(tmp_path):
    """The comparison fails when one norm gain is off by one part in a hundred."""
    case = BY_NAME["v3_small"]
    model = reference.build(case)
    ref = reference.greedy(model, reference.prompts(case, (5, 20)), steps=4)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_a_layernorm.weight.mul_(1.01)
    checkpoint.save_pretrained(model, tmp_path)
    completions, _ = serve(tmp_path, ref.prompts, steps=4)
    with pytest.raises(AssertionError, match="Δlogit"):
        assert_same(completions, ref)
