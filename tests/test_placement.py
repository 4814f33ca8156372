"""Eight devices: tokens of one device, an eighth of what is divided on each of them."""

import json
import os
import re
import statistics
import subprocess
import sys

import pytest

from tests import placement
from tests.imports import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return _in_a_process("tests.placement")


def _in_a_process(module):
    """What a process of eight forced CPU devices says."""
    flags = "--xla_force_host_platform_device_count=8"
    more = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | more,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_tokens_are_those_of_one_device_under_random_traffic(found):
    assert (found["devices"], found["explicit"]) == (8, True)
    assert (found["wrong"], found["lost"], found["appended"]) == (0, 0, 0)
    assert found["completed"] > placement.MIXES
    assert found["preemptions"] > 0
    assert found["compiles"] == found["rungs"] == 3


def test_each_device_holds_an_eighth_of_what_is_divided(found):
    """Loaded from a folder, each leaf as the file has it."""
    parts = found["leaves"]
    assert all(same for _, _, same in parts.values())
    assert all(share == (1 / 8 if divided else 1) for divided, share, _ in parts.values())
    assert sum(divided for divided, _, _ in parts.values()) >= 8
    assert set(found["absorbed"]) == {1 / 8}
    assert set(found["gains"]) == {1}


def test_caches_are_whole_and_the_same_on_every_device(found):
    for caches in (found["caches"], found["caches_after"]):
        assert all(cache == [8, 1, True] for cache in caches)


def test_an_error_of_the_devices_is_overcome_without_a_compilation(found):
    assert "deleted" in found["error"]
    assert found["after"] == [0, 1, 3]


def test_a_mesh_of_auto_axes_is_the_same_placement(found):
    wrong, equal, parts = found["auto"]
    assert (wrong, equal, parts) == (0, True, [1 / 8, 1])


def test_an_engine_works_whatever_mesh_its_caller_works_under(found):
    """``jax.set_mesh`` with Explicit axes: on those devices, and on one of them."""
    assert (found["inside"], found["lone"]) == (0, True)


def test_stored_programs_of_eight_devices_are_read(found):
    """Engines of the same placement make no others."""
    assert found["stored"] == [3, 3]


def test_words_may_go_through_memory_of_the_host_that_each_device_reads(found):
    assert found["page_locked"] == [0, 0, 3]
    assert found["staged"] == [5 * sum(range(8)), 1]


def test_logits_are_collected_once_and_no_weights(found):
    assert found["collected"] == {"wanted": ["f32"], "not": ["f32"]}


def test_what_the_devices_do_not_divide_is_whole_everywhere(found):
    assert found["three"] == [[1], True]


def test_a_mesh_of_two_axes_and_a_device_twice_are_refused(found):
    mesh, twice = found["refusals"]
    assert "a mesh of one axis" in mesh
    assert "each device once" in twice


@pytest.mark.slow
def test_sparse_attention_over_eight_devices():
    """V3.2, GLM-5 and V4: heads divided, selection whole on each device; the same tokens."""
    found = _in_a_process("tests.sparse_placement")
    assert found["devices"] == 8
    for kind in ("deepseek_v32", "glm_moe_dsa", "deepseek_v4"):
        assert found[kind] == [True, [1 / 8, 1]]


@pytest.mark.slow
def test_e4m3_weights_stay_so_over_eight_devices():
    """Divided by outputs, inputs, width or experts where each has whole blocks; else whole."""
    found = _in_a_process("tests.fp8_placement")
    assert found["devices"] == 8
    for kind, (sums, off) in found["experts"].items():  # shared experts divided, with biases
        assert off < 1e-4 and sums == (2 if kind.endswith("True True") else 1), kind
    for kind in ("wide", "by_width", "v4"):
        # Eight devices add up in another order, which moves an activation of a few prompts to the
        # next e4m3 code (apart). Rounding activations to e4m3 changes every prompt (changed).
        apart, changed = found[f"{kind} rounded"]
        assert statistics.median(apart) < 1e-3 < min(changed), kind
        assert max(apart) < max(changed), kind
    for kind in ("wide", "by_width", "narrow", "v4"):
        assert found[kind]["tokens"] and found[kind]["off"] < 2e-4
        assert found[kind]["e4m3"]
        held, predicted = found[kind]["bytes"]
        assert held == predicted, "what `mla-jax fit --cards 8 --fp8-weights` says"
    whole = ("attn.q_down.", "attn.kv_down.", "attn.kv_up.")
    for path in found["wide"]["e4m3"]:
        scale = path.replace(".kernel", ".scale") if path.endswith("kernel") else f"{path}_scale"
        share = 1 if any(name in path for name in whole) else 1 / 8
        for kind in ("wide", "by_width"):
            assert found[kind]["shares"][path] == found[kind]["shares"][scale] == share, path
        narrow = 1 / 8 if "experts" in path else 1
        assert found["narrow"]["shares"][path] == narrow, path
    for path in found["v4"]["e4m3"]:
        divided = re.search(r"experts|shared|attn\.(q_up|out_a|out_b)\.kernel", path)
        inside = "indexer" not in path
        assert found["v4"]["shares"][path] == (1 / 8 if divided and inside else 1), path
