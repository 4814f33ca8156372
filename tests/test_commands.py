"""``mla-jax roofline`` and ``mla-jax fit``: sums against numbers worked out by hand."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax import cli
from mla_jax.commands.fit import Settings, compiled, fit
from mla_jax.commands.models import model_of
from mla_jax.commands.roofline import Roofline, roofline
from mla_jax.config import ModelConfig
from mla_jax.errors import ArgumentError, ConfigError, EngineError
from mla_jax.model.presets import GLM_5, KIMI_K2, PRESETS, V2_LITE, V3, V3_2, V4_FLASH
from mla_jax.model.weight_table import num_params
from tests import imports
from tests.consoles import assert_promised, consoles
from tests.model import sparse, tiny, v4

RESULTS = imports.ROOT / "benchmarks" / "results"


@pytest.fixture
def run(capsys):
    """Run a command in this process: its exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in args])
        return end.value.code, *capsys.readouterr()

    return run


def kernel(found: Roofline, name: str):
    return next(k for k in found.kernels if k.name == name)


# ------------------------------------------------------------------------------------- page


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 2], ids=["roofline", "fit"])
def test_the_page_shows_what_is_printed(run, index):
    """Each console example, with ``...`` for any text; V2-Lite's program is compiled whole."""
    command, promised = consoles()[index]
    code, out, _ = run(*command)
    assert code == 0
    assert_promised(promised, out)


def test_every_console_example_is_run():
    """That of parity where transformers is installed: tests/parity/test_faults.py."""
    assert [command[0] for command, _ in consoles()] == ["parity", "roofline", "fit"]


# --------------------------------------------------------------------------------- roofline


@pytest.mark.parametrize(
    "config, cache, each",
    [(V2_LITE, "bf16", 31_104), (V3, "bf16", 70_272), (KIMI_K2, "bf16", 70_272),
     (V3_2, "bf16", 85_888), (V3_2, "fp8_e4m3", 48_068), (GLM_5, "bf16", 109_824),
     (GLM_5, "fp8_e4m3", 61_464)],
    ids=lambda x: getattr(x, "family", x),
)  # fmt: skip
def test_one_more_cached_token_is_read_once(config, cache, each):
    """Bytes of a token in all layers, as published; short of what an indexer selects."""
    short, long = (
        roofline(config, batch=3, context=n, cache=cache).total("cache") for n in (1000, 1001)
    )
    assert long - short == pytest.approx(3 * each)


def test_beyond_the_selection_only_index_keys_grow():
    short, long = (roofline(V3_2, context=n, cache="fp8_e4m3").total("cache") for n in (4096, 4097))
    assert long - short == pytest.approx(61 * 132)


def test_weights_are_read_once():
    """All of V2-Lite but the embedding's other rows and norm gains; the router is float32."""
    found = roofline(V2_LITE, phase="prefill", context=100_000)
    embedding, router = 102_400 * 2048, 26 * 64 * 2048
    gains = 27 * (2 * 2048 + 512) + 2048
    expected = 2 * (num_params(V2_LITE) - embedding - gains) + 2 * router
    assert found.total("weights") == pytest.approx(expected, rel=1e-9)


def test_one_token_reads_its_own_experts():
    """6 of 64 experts of V2-Lite, three matrices of 2048 x 1408 in bf16."""
    assert kernel(roofline(V2_LITE), "routed experts").weights == pytest.approx(
        6 * 3 * 2048 * 1408 * 2
    )


def test_fp8_weights_are_a_byte_and_a_scale_per_block():
    one, half = (kernel(roofline(V3, weights=w), "output").weights for w in ("bf16", "fp8"))
    assert half == pytest.approx(one / 2 * (1 + 4 / 128**2))


def test_attention_of_a_decode_step_by_hand():
    """128 requests of 4,096 rows, 128 heads: 2 * 128 * 128 * 4096 * 1088 FLOPs, rows of 1152."""
    found = kernel(roofline(V3, batch=128, context=4096), "attention")
    assert found.flops == 2 * 128 * 128 * 4096 * 1088
    assert found.cache == 128 * 4096 * 1152


@pytest.mark.parametrize(
    "phase, batch, context, table",
    [("decode", 128, 4096, "decode"), ("prefill", 1, 8192, "prefill")],
)
def test_flops_are_those_of_the_benchmarks(phase, batch, context, table):
    """A benchmark's rate times its time is the number of operations counted here."""
    names = {"decode": "b128_q1_h128_k4096", "prefill": "h128_q1x8192_causal"}
    (path,) = RESULTS.glob(f"nvidia_h200_{table}_2*.json")
    row = next(r for r in json.loads(path.read_text())["rows"] if r["case"] == names[table])
    found = kernel(roofline(V3, phase=phase, batch=batch, context=context), "attention")
    assert found.flops == pytest.approx(row["tflops"] * row["ours_span_us"] * 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("case", "ratio"),
    [("window_b128_k65536", 0), ("c4_b128_k65536", 4), ("c128_b128_k65536", 128)],
)
def test_floors_of_v4_are_those_of_the_benchmarks(case, ratio):
    """``benchmarks.v4_layer`` adds up weights and rows by itself; without activations."""
    files = sorted(RESULTS.glob("nvidia_h200_v4_layer_2*.json"), reverse=True)
    rows = (r for file in files for r in json.loads(file.read_text())["rows"])
    row = next(r for r in rows if r["case"] == case)
    one = replace(V4_FLASH, compress_ratios=(ratio,), hash_layers=0)
    found = roofline(one, batch=128, context=65536)
    parts = [k for k in found.kernels if k.name not in ("embedding", "head", "sampling")]
    moved = sum(k.calls * (k.weights + k.cache) for k in parts)
    assert 1e6 * moved / 4.25e12 == pytest.approx(row["floor_us"], rel=0.01)


def test_128_more_cached_tokens_of_v4():
    """32 index keys in each layer of ratio 4, a state in each of ratio 128, of each request."""
    short, long = (roofline(V4_FLASH, batch=3, context=n) for n in (65536, 65664))
    more = long.total("cache") - short.total("cache")
    assert more == 3 * (21 * 32 * 2 * 128 + 20 * 2 * 512)


@pytest.mark.parametrize("context", [1, 5, 40, 300])
@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_pairs_of_a_v4_prefill(ratio, context):
    """Token by token: the window's rows, and the complete groups or the selected ones."""
    sizes = {"overlapping": 4, "disjoint": 16, "window": 7, "index_topk": 5}
    one = replace(V4_FLASH, compress_ratios=(ratio,), hash_layers=0, **sizes)
    found = roofline(one, phase="prefill", batch=2, context=context)
    rows = 0
    for seen in range(1, context + 1):
        groups = seen // ratio if ratio else 0
        rows += min(seen, 7) + (min(groups, 5) if ratio == 4 else groups)
    attention = next(k for k in found.kernels if k.name.startswith("attention"))
    assert attention.flops == 4 * 2 * rows * one.heads * one.dim


def test_a_measured_row_is_named_and_scaled():
    exact, far = (
        kernel(roofline(V3, batch=128, context=n, results=RESULTS), "attention")
        for n in (4096, 5000)
    )
    assert exact.measured.us == pytest.approx(209.4225)
    assert exact.measured.row == far.measured.row == "decode, b128_q1_h128_k4096"
    assert far.measured.us / exact.measured.us == pytest.approx(5000 / 4096, rel=0.01)
    packaged = kernel(roofline(V2_LITE), "routed experts").measured
    assert (packaged.us, packaged.row) == (21.91, "routed_experts, 1 tokens")


@pytest.mark.parametrize(
    "facts",
    [{"batch": 1000}, {"device": "H100"}, {"cache": "fp8_e4m3", "context": 100}],
    ids=["far", "another card", "another size"],
)
def test_no_row_is_near_enough(facts):
    assert kernel(roofline(V3, results=RESULTS, **facts), "attention").measured is None


@given(
    config=st.sampled_from([c for c in PRESETS.values() if isinstance(c, ModelConfig)]),
    phase=st.sampled_from(["decode", "prefill"]),
    batch=st.integers(1, 300),
    context=st.integers(1, 40_000),
    device=st.sampled_from(["H200", "H100", "A100"]),
)
@settings(max_examples=30, deadline=None)
def test_more_work_takes_no_less_time(config, phase, batch, context, device):
    less, more, longer = (
        roofline(config, device=device, phase=phase, batch=b, context=c)
        for b, c in ((batch, context), (batch + 1, context), (batch, context + 1))
    )
    assert 0 < less.floor_us <= min(more.floor_us, longer.floor_us)
    for k in less.kernels:
        assert k.floor_us(less.peaks) <= k.predicted_us(less.peaks)
        assert math.isfinite(k.bytes) and k.bytes > 0


def test_the_picture(run, tmp_path):
    svg, page = tmp_path / "step.svg", tmp_path / "step.html"
    code, out, _ = run("roofline", "v2-lite", "--batch", 4, "--out", svg)
    assert code == 0
    assert "routed experts" in out
    assert "measured row: routed_experts," in out
    assert "<svg" in svg.read_text()
    assert run("roofline", "V3_2", "--weights", "fp8", "--out", page)[0] == 0
    assert "select top-k" in page.read_text()


# -------------------------------------------------------------------------------------- fit


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, facts",
    [
        (tiny.config(hidden=512, vocab=2048), {}),
        (sparse.config(hidden_size=512, vocab_size=2048), {"page": 8}),
        (tiny.config(hidden=512, vocab=2048), {"fp8": True, "dtype": "bfloat16"}),
        (v4.config(hidden=512, vocab=2048), {"page": 4, "prefill_chunk": 16}),
        (
            v4.config(hidden=512, vocab=2048),
            {"page": 4, "prefill_chunk": 16, "fp8": True, "dtype": "bfloat16"},
        ),
    ],
    ids=["v3", "v32", "fp8", "v4", "v4_fp8"],
)
def test_the_program_needs_what_was_predicted(config, facts):
    """Within two percent of the compiler's own figure of a program's arguments."""
    formats = {"float32": "fp32", "bfloat16": "bf16"}
    facts = {"dtype": "float32", **facts}
    wish = Settings(config=config, cache_format=formats[facts["dtype"]], **facts)
    found = compiled(wish, batch=4, context=64)
    assert abs(found.error) < 0.02, found


@pytest.mark.slow
def test_weights_divided_over_cards():
    """Of two devices each program holds what is predicted of one card."""
    source = """
import jax
from mla_jax.commands.fit import Settings, compiled, fit
from tests.model import tiny
config = tiny.config(hidden=512, vocab=2048)
found = compiled(Settings(config=config, cards=2, dtype="float32", cache_format="fp32"),
                 batch=4, context=64)
assert abs(found.error) < 0.02, found
whole = fit(Settings(config=config), memory=2**30).weights
assert fit(Settings(config=config, cards=2), memory=2**30).weights < 0.7 * whole
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | flags,
        cwd=imports.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_largest_batch_is_the_largest():
    """By hand: V2-Lite in bf16 on 141 GB of which JAX takes three quarters."""
    found = fit(Settings(config=V2_LITE), memory=141e9)
    plan = 31_419_784_192, 113_246_208 + 27 * 2048 * 2
    assert (found.weights, found.derived) == plan
    left = int(141e9 * 0.75) - sum(plan)
    for context, batch in found.largest.items():
        each = math.ceil(context / 64) * 64 * 31_104 + 102_400 * 12  # and its token history
        spare = 64 * 31_104  # the page that is never given
        assert spare + batch * each <= left < spare + (batch + 1) * each
    assert found.tokens == (left - 102_400 * 12) // 31_104 - 64


def test_e4m3_weights_halve_what_products_take():
    wide, narrow = (fit(Settings(config=V3, fp8=fp8), memory=1e12) for fp8 in (False, True))
    assert narrow.weights / wide.weights == pytest.approx(0.5, rel=0.01)
    assert not any(wide.largest.values())
    assert narrow.largest[4096] > 0


def test_a_window_costs_each_request_the_same():
    config = v4.config()
    found = fit(Settings(config=config, page=4), memory=2**30)
    assert found.fixed > 0
    assert found.groups["window"] == 0
    assert found.largest == {256: found.largest[256]}


def test_the_largest_batch_of_a_tiny_model_has_no_bound():
    """Not 2^20, where a search could stop; bytes add up."""
    found = fit(Settings(config=v4.config(), page=4), memory=2**44)
    batch = found.largest[256]
    assert batch > 2**20
    each = found.fixed + found.history + 256 * found.token
    used = found.weights + found.derived + found.once + batch * each
    assert used == pytest.approx(found.room, rel=1e-3)


def test_where_nothing_fits(run):
    code, out, _ = run("fit", "V3", "--share", 0.9)
    assert code == 0
    assert "nothing fits: weights alone need 1,217.4 GB more on each card" in out


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("memory", ["nan", "inf", "-inf", "1e300", "-1", "0", "1e10"])
def test_what_is_no_memory(run, memory):
    code, out, err = run("fit", "V2_LITE", "--memory", memory)
    assert (code, out) == (2, "")
    assert "--memory: given" in err
    assert "GiB above 0, at most 1,000,000,000" in err


@pytest.mark.parametrize(
    "args, message",
    [
        (("roofline", "nothing"), "a folder with config.json, a hub id, or one of V2_LITE, V2, V3"),
        (("roofline", "V3", "--device", "B9"), "given B9; allowed: one of H200, H100"),
        (("roofline", "V3", "--batch", "0"), "batch: given 0; allowed: 1 or more"),
        (("roofline", "V3", "--out", "x.png"), "whose name ends in .html or .svg"),
        (("fit", "V3", "--cards", "0"), "cards: given 0; allowed: 1 or more"),
        (("fit", "V3", "--share", "1.5"), "share: given 1.5; allowed: above 0, at most 1"),
        (("fit", "V2_LITE", "--cards", "4096", "--compile"), "those of this machine"),
        (("parity", "V4_FLASH"), "model: given V4_FLASH, which is not here"),
        (("roofline", "V3", "--out", "no-such-folder/x.html"), "a file in a folder that exists"),
        (("roofline", "V3", "--results", "no-such-folder"), "results: given no-such-folder"),
        (("parity", "nothing"), "nothing"),
    ],
)
def test_bad_input_is_one_message(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_models_by_name_and_by_folder(tmp_path):
    assert model_of("v3.2") is model_of("V3_2") is V3_2
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE.to_hf()))
    assert model_of(str(tmp_path)) == V2_LITE
    assert model_of(str(tmp_path / "config.json")) == V2_LITE
    with pytest.raises(ConfigError, match="model: given v5; allowed: a folder"):
        model_of("v5")


def test_functions_refuse_too():
    with pytest.raises(ArgumentError, match="device: given TPU"):
        roofline(V3, device="TPU")
    with pytest.raises(EngineError, match="context"):
        roofline(V3, context=0)
    with pytest.raises(ArgumentError, match="fit: memory"):
        fit(Settings(config=V2_LITE), memory=float("nan"))
