"""The machinery itself: folders hold the model they say, and the reference is robust."""

import numpy as np
import pytest
import torch
import transformers

from tests.parity import checkpoint, reference
from tests.parity.families import BY_NAME, FAMILIES

torch.set_num_threads(1)


def test_weights_break_symmetries():
    gain = reference.tensor("model.layers.0.input_layernorm.weight", (64,), seed=0, tied=False)
    assert 0.02 < gain.std() < 0.3
    assert abs(gain.mean() - 1) < 0.1
    bias = reference.tensor("gate.e_score_correction_bias", (64,), seed=0, tied=False)
    assert 0.02 < bias.std() < 0.3
    again = reference.tensor("gate.e_score_correction_bias", (64,), seed=0, tied=False)
    np.testing.assert_array_equal(bias, again)


def test_quantised_blocks_round_trip():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    values, scale = checkpoint.quantise(x)
    assert scale.shape == (2, 3)
    back = checkpoint.dequantise(values, scale)
    assert float((back - x).abs().max()) < 0.07 * float(x.abs().max())
    again, _ = checkpoint.quantise(back)
    assert torch.equal(values.float(), again.float())


@pytest.mark.parametrize("case", [c for c in FAMILIES if c.name.endswith("small")], ids=str)
def test_transformers_reads_the_released_layout_as_the_same_model(case, tmp_path):
    """Only tensors are judged: the key dialect of our folder is for our loader."""
    model = reference.build(case)
    folder = checkpoint.save_released(model, case, tmp_path / "released")
    model.config.save_pretrained(folder)
    kind = getattr(transformers, f"{case.family}ForCausalLM")
    loaded, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_greedy_equals_generate():
    case = BY_NAME["v3_small"]
    model = reference.build(case)
    prompt = reference.prompts(case, (17,))
    ref = reference.greedy(model, prompt, steps=8)
    ids = torch.tensor(prompt)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert out[0, 17:].tolist() == ref.tokens[0].tolist()
