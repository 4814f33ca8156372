"""Every setting of engines, caches and configurations, replaced by something wrong, is refused in
our own words; an engine that was abused goes on as before."""

import dataclasses
import inspect
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import (
    Engine,
    EngineError,
    IndexerConfig,
    LatentCache,
    MLADims,
    MLAError,
    MoEConfig,
    RecordCache,
    RopeConfig,
    SamplingParams,
    StreamConfig,
    V4Config,
    YarnConfig,
)
from mla_jax.demo import FOLDER
from mla_jax.engine import load_model
from mla_jax.model.family import Settings

WRONG = (
    None, "x", -1, 1.5, float("nan"), [1, 2], (), {}, object(), np.zeros((0,)),
    np.array(["a"]), b"x", {1}, float("inf"),
)  # fmt: skip
MOE = {"experts": 4, "topk": 2, "width": 8, "shared": 0, "method": "greedy"}
PARTS = {
    MLADims: {"heads": 4, "rank": 32, "nope": 16, "rope": 8, "v": 16, "q_rank": None},
    RopeConfig: {"dim": 8, "theta": 1e4},
    YarnConfig: {"factor": 2.0, "original": 64},
    MoEConfig: MOE,
    IndexerConfig: {"heads": 2, "dim": 8, "topk": 4, "full": (True,)},
    StreamConfig: {},
    V4Config: {},
    LatentCache.alloc: {"num_pages": 2, "page": 4, "rank": 8, "rope": 4, "format": "fp32"},
    RecordCache.alloc: {"num_pages": 2, "page": 4, "format": "v4"},
    SamplingParams: {},
}
SETTINGS = {
    "num_pages": 9,
    "page": 16,
    "max_requests": 2,
    "prefill_chunk": 64,
    "max_model_len": 128,
    "dtype": jnp.float32,
}


def strangers(call, facts, names):
    """What raised something else than an error of the library, for which wrong value."""
    found = {}
    for name in names:
        for wrong in WRONG:
            try:
                call(**{**facts, name: wrong})
            except MLAError as error:
                if len(str(error)) > 1500:
                    found[f"{name}={repr(wrong)[:20]}"] = "a long message"
            except Exception as error:  # what this test is about
                found[f"{name}={repr(wrong)[:20]}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.__qualname__)
def test_parts_refuse_what_is_no_size_number_or_name(part, our_errors):
    part(**PARTS[part])
    found = inspect.signature(part).parameters.values()
    names = [p.name for p in found if not isinstance(p.default, bool)]  # whatever counts as true
    assert not strangers(part, PARTS[part], names)


@pytest.fixture(scope="module")
def loaded():
    return load_model(FOLDER, dtype=jnp.float32)


def test_an_engine_refuses_wrong_settings(loaded, our_errors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a folder of programs named "x" is made
    model, config = loaded
    facts = {"model": model, "config": config, **SETTINGS}
    named = {*inspect.signature(Engine.__init__).parameters, *Settings.__annotations__}
    names = sorted(named - {"self", "settings"})
    assert not strangers(Engine, facts, names)
    opened = {"folder": FOLDER, **SETTINGS}
    some = ["folder", "dtype", "progress", "fp8_weights"]
    assert not strangers(Engine.from_pretrained, opened, some)
    assert not strangers(load_model, {"folder": FOLDER}, ["folder", "dtype", "progress"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("absorb_prefills", "no"), ("fp8_weights", 0), ("fp8_activations", 0), ("progress", "x")],
)
def test_what_counts_as_true_is_no_setting(setting, value):
    with pytest.raises(EngineError, match=rf"{setting}: given {value!r}.*; allowed: "):
        Engine.from_pretrained(FOLDER, **SETTINGS, **{setting: value})


def test_end_tokens_that_no_step_draws_are_a_warning(loaded):
    model, config = loaded
    with pytest.warns(UserWarning, match=r"end tokens \[999\] are not among the 42"):
        Engine(model, dataclasses.replace(config, eos=(999, 41)), **SETTINGS)


def test_an_unknown_key_may_be_passed_over(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"my_key": 1}))
    with pytest.raises(MLAError, match=r"ignore_keys=\['my_key'\]"):
        load_model(folder)
    assert load_model(folder, ignore_keys=["my_key"])[1].vocab == 42


@pytest.mark.parametrize("wrong", ["bf16", jnp.int32, jnp.float8_e4m3fn, None])
def test_a_dtype_that_is_not_one_of_weights_is_refused_at_once(wrong):
    for call in (Engine.from_pretrained, load_model):
        with pytest.raises(EngineError, match=r"dtype: given .*: float32, bfloat16, float16"):
            call("no folder", dtype=wrong)


def test_a_configuration_of_another_model_is_refused(loaded):
    """What differs is named, on both sides; ends of sequences may be others."""
    model, config = loaded
    other = dataclasses.replace(config, hidden=2 * config.hidden, eos=(3,))
    with pytest.raises(
        EngineError, match=r"config: given {'hidden': 256}; .*model: {'hidden': 128}"
    ):
        Engine(model, other, **SETTINGS)
    Engine(model, dataclasses.replace(config, eos=(3,)), **SETTINGS)


@pytest.mark.slow
def test_an_engine_that_was_abused_goes_on(loaded, our_errors):
    engine = Engine(*loaded, **SETTINGS)
    two = SamplingParams(max_new_tokens=2)
    before = engine.generate([[5, 6, 7]], two)[0].token_ids
    calls = {
        "prompts": lambda wrong: engine.generate(wrong, two),
        "prompt": lambda wrong: engine.generate([wrong], two),
        "token": lambda wrong: engine.generate([[5, wrong]], two),
        "params": lambda wrong: engine.generate([[5]], [wrong]),
        "id": lambda wrong: engine.cancel(engine.add([5], two, id=wrong)),
        "cancel": lambda wrong: engine.cancel(wrong),
        "encode": lambda wrong: engine.encode(wrong),
        "take": lambda wrong: engine.take(wrong),
    }
    for name, call in calls.items():
        assert not strangers(lambda c=call, **given: c(given["it"]), {}, ["it"]), name
    engine.step()
    stats = engine.stats()
    assert (stats.live, stats.pages_used, stats.recoveries) == (0, 0, 0)
    assert engine.generate([[5, 6, 7]], two)[0].token_ids == before
