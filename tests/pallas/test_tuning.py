"""Measured choices: the nearest within reach, else the heuristic; the packaged tables are sound."""

import json
from importlib import resources

import pytest

from mla_jax import ops
from mla_jax.pallas import tuning
from mla_jax.pallas.dense_decode import mosaic
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem

H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)
UNKNOWN = DeviceInfo(platform="gpu", kind="NVIDIA H999", sm=90, sms=132)


def record(tokens, width, us):
    features = {"heads": 16, "tokens": tokens, "width": width}
    return tuning.Record(features=features, tuning={}, us=us, others={})


TABLE = tuning.Table(
    measured="here",
    exact=("heads",),
    near=("tokens", "width"),
    records=(record(128, 64, 1.0), record(128, 128, 2.0), record(1, 1024, 3.0)),
)


@pytest.mark.parametrize(
    ("features", "us", "octaves"),
    [
        ({"heads": 16, "tokens": 128, "width": 64}, 1.0, 0.0),
        ({"heads": 16, "tokens": 64, "width": 256}, 2.0, 2.0),
        ({"heads": 16, "tokens": 2, "width": 1024}, 3.0, 1.0),
    ],
)
def test_the_nearest_record(features, us, octaves):
    found, distance = TABLE.nearest(Problem.of("dense_decode", **features))
    assert (found.us, distance) == (us, octaves)


@pytest.mark.parametrize(
    "features",
    [{"heads": 20, "tokens": 128, "width": 64}, {"heads": 16, "tokens": 20, "width": 64}],
)
def test_nothing_near(features):
    assert TABLE.nearest(Problem.of("dense_decode", **features)) is None


def test_an_unknown_device_has_the_heuristic():
    sizes = {"heads": 16, "max_query_len": 1, "page": 64, "tokens": 8, "width": 4}
    problem = Problem.of("dense_decode", cache="bf16", **sizes)
    found = mosaic.tune(problem, UNKNOWN)
    assert found.value == mosaic.heuristic(16, 1, workers=132)
    assert "nothing near was measured on NVIDIA H999" in found.source


OTHERS = {"prefill_crossover.json"}  # rates of whole paths: tests/model/test_prefill_crossover.py


def packaged():
    root = resources.files("mla_jax.pallas").joinpath("tuned")
    return [p for d in root.iterdir() for p in d.iterdir() if p.name not in OTHERS]


@pytest.mark.parametrize("path", packaged(), ids=lambda p: p.name)
def test_packaged_records_are_tunings(path):
    data = json.loads(path.read_text())
    (backend,) = [b for b in ops.REGISTRY.of(path.name.removesuffix(".json")) if b.tuning]
    for entry in data["records"]:
        assert backend.tuning is not None
        backend.tuning(**entry["tuning"])
        assert set(entry["features"]) == {*data["exact"], *data["near"]}
        assert entry["us"] <= min(entry["others"].values(), default=entry["us"])
