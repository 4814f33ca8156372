"""``mla-jax parity`` of a DeepSeek V4: all tensors agree, and a mistake shows where it is made."""

import jax.numpy as jnp
import pytest
import torch

from mla_jax import cli
from mla_jax.commands import parity, trace_v4, transformers_trace
from mla_jax.commands.trace_v4 import trace_model_v4
from mla_jax.config_v4 import V4Config, read_config
from mla_jax.errors import ArgumentError, ConfigError
from mla_jax.model.reading import Tensors
from tests.parity import checkpoint, reference
from tests.parity.families import BY_NAME

torch.set_num_threads(1)
TOKENS = 70  # beyond the window, and the end of several groups of either ratio


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference.build(BY_NAME["v4_small"])
    return checkpoint.save_pretrained(model, tmp_path_factory.mktemp("v4"))


def test_the_command_agrees(folder, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["parity", str(folder), "--tokens", str(TOKENS)])
    out = capsys.readouterr().out
    assert left.value.code == 0, out
    assert "deepseek_v4, 3 layers" in out
    for name in ("layers.0.attn_input", "layers.1.states", "layers.1.selected", "served.decode.3"):
        assert name in out
    assert "equal: no tensor differs by more than" in out
    assert "conventions" not in out


def test_fewer_tokens_than_a_group_have_no_state(folder):
    """A real V4 has groups of 128: transformers gives no mask then."""
    found = parity.compare(folder, parity.prompt_ids(read_config(folder), 3), serve=False)
    assert found.agrees


def scaled(leaf, factor):
    leaf.set_value(leaf.get_value() * factor)


FAULTS = {
    "final_norm": lambda m: scaled(m.stream_head.scale, 2.0),
    "logits": lambda m: scaled(m.lm_head.kernel, 1.01),
}


@pytest.fixture(scope="module")
def sides(folder):
    config, tensors = read_config(folder), Tensors(folder)
    assert isinstance(config, V4Config)
    ids = parity.prompt_ids(config, TOKENS)
    model = transformers_trace.load(tensors, config)
    theirs = transformers_trace.trace_v4(model, config, ids)

    def judge(edit):
        mine = parity.load_ours(folder, config)
        edit(mine)
        return parity.judge(tensors, config, trace_model_v4(mine, config, ids), theirs)

    return judge


def test_both_sides_write_the_same_tensors(sides):
    found = sides(lambda model: None)
    assert found.agrees
    assert len(found.rows) == 2 + 1 + 3 * 14 + 2 * 2


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_tensor_that_diverges_is_named(sides, name):
    assert sides(FAULTS[name]).first == name


def test_what_it_does_not_do_is_refused(folder):
    with pytest.raises(ArgumentError, match="layers of a DeepSeek V4: given 1"):
        parity.compare(folder, layers=1)
    config = read_config(folder)
    quantised = config.__class__(**{**vars(config), "fp8_block": 128})
    with pytest.raises(ConfigError, match="given e4m3; allowed: 16 or 32 bits"):
        transformers_trace.load(Tensors(folder), quantised)


def test_more_tokens_than_positions_are_refused(folder):
    config = read_config(folder)
    most = config.max_positions - 4
    assert len(parity.prompt_ids(config)) == min(96, most)
    with pytest.raises(
        ArgumentError, match=f"parity: tokens: given {most + 1}; allowed: 1 to {most}"
    ):
        parity.prompt_ids(config, most + 1)
    with pytest.raises(
        ArgumentError, match=f"token ids: given {most + 1}; allowed: at most {most}"
    ):
        parity.compare(folder, [1] * (most + 1))


def test_a_wrong_rotation_shows_in_the_states_of_groups(sides, monkeypatch):
    real = trace_v4.cos_sin
    monkeypatch.setattr(trace_v4, "cos_sin", lambda t, rope: real(t + jnp.int32(1), rope))
    assert sides(lambda model: None).first == "layers.1.states"
