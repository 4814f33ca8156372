"""Two processes with four devices each serve one model: tokens of one device in both."""

import json
import os
import subprocess
import sys

import pytest
from flax import nnx

from benchmarks.processes import free_port
from mla_jax.model.sharding import named_leaves
from mla_jax.model.weights import save
from tests import processes, traffic
from tests.imports import ROOT

COUNT = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process says."""
    folder = tmp_path_factory.mktemp("model")
    save(folder, traffic.CONFIG, named_leaves(nnx.state(traffic.model(), nnx.Param)))
    port = free_port()
    flags = "--xla_force_host_platform_device_count=4"
    more = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", *map(str, (i, COUNT, port, folder))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | more,
        )
        for i in range(COUNT)
    ]
    try:
        said = [process.communicate(timeout=400) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, error) in zip(running, said, strict=True):
        assert process.returncode == 0, error[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_tokens_are_those_of_one_device_under_random_traffic(found):
    for one in found:
        assert one["devices"] == [4, 8]
        assert (one["wrong"], one["lost"]) == (0, 0)
        assert one["completed"] > processes.MIXES
        assert one["preemptions"] > 0


def test_a_process_holds_its_part_of_the_weights(found):
    """Of what is divided a half, of all else four copies."""
    assert [one["weights"] for one in found] == [[0.5, 4.0]] * COUNT


def test_each_process_finds_its_programs_again(found):
    for one in found:
        rungs, compiled = one["compiles"]
        assert rungs == compiled
        assert one["stored"] == [rungs, "read"]
        assert one["again"]


def test_words_may_go_through_memory_of_the_host_that_each_device_reads(found):
    for one in found:
        assert one["page_locked"][:2] == [0, 0]


def test_they_agree_on_numbers(found):
    assert [one["least"] for one in found] == [10, 10]


def test_devices_without_this_process_are_refused(found):
    for i, one in enumerate(found):
        others, some = one["refusals"]
        assert f"Placement: given devices of processes [{1 - i}]" in others
        assert f"those of this one ({i}), or some of each of all 2" in others
        assert some == "none: 2"
