"""Measured choices: the nearest within reach, else the heuristic; the packaged tables are sound."""

import dataclasses
import functools
import json
from importlib import resources

import pytest

from benchmarks import decode, tune
from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.pallas import tuning
from mla_jax.pallas.cache_io import mosaic as cache_io
from mla_jax.pallas.dense_decode import mosaic
from mla_jax.pallas.dense_prefill import mosaic as prefill
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
    found, distance = TABLE.nearest(Problem.of("mla_decode", **features))
    assert (found.us, distance) == (us, octaves)


@pytest.mark.parametrize(
    "features",
    [{"heads": 20, "tokens": 128, "width": 64}, {"heads": 16, "tokens": 20, "width": 64}],
)
def test_nothing_near(features):
    assert TABLE.nearest(Problem.of("mla_decode", **features)) is None


def test_an_unknown_device_has_the_heuristic():
    sizes = {"heads": 16, "max_query_len": 1, "page": 64, "tokens": 8, "width": 4}
    problem = Problem.of("mla_decode", cache="bf16", **sizes)
    found = mosaic.tune(problem, UNKNOWN)
    assert found.value == mosaic.heuristic(16, 1, workers=132)
    assert "nothing near was measured on NVIDIA H999" in found.source


DECODE = functools.partial(
    mosaic.Tuning, **{"defer": True, "prefetch": False, "early_launch": True, "workers": 4}
)
PREFILL = functools.partial(prefill.Tuning, **{"heads_together": 1, "block": 64, "workers": 4})
OTHERS = {"prefill_crossover.json"}  # rates of whole paths: tests/model/test_prefill_crossover.py


def packaged():
    root = resources.files("mla_jax.pallas").joinpath("tuned")
    return [p for d in root.iterdir() for p in d.iterdir() if p.name not in OTHERS]


def fields_of(kind):
    return {field.name for field in dataclasses.fields(kind)}


def sound(op, data):
    """Every record is the best of at least two tunings of one of the operation's kernels."""
    names = {name for entry in data["records"] for name in entry["tuning"]}
    (backend,) = [b for b in ops.REGISTRY.of(op) if b.tuning and names <= fields_of(b.tuning)]
    assert backend.tuning is not None
    of_device = {"workers": H200.sms} if "workers" in fields_of(backend.tuning) else {}
    for entry in data["records"]:
        assert set(entry["tuning"]) | set(of_device) == fields_of(backend.tuning)
        backend.tuning(**entry["tuning"], **of_device)
        assert set(entry["features"]) == {*data["exact"], *data["near"]}
        assert entry["others"], "the best of one is no measurement"
        assert entry["us"] <= min(entry["others"].values())


def test_packaged_records_are_tunings():
    pytest.importorskip("triton")
    for path in packaged():
        sound(path.name.removesuffix(".json"), json.loads(path.read_text()))


@pytest.mark.parametrize("case", decode.CASES, ids=lambda case: case.name)
def test_what_was_not_compared_is_the_heuristics(case):
    """``explain`` says so, of every case of the benchmark that no packaged record holds."""
    shape = {"tokens": case.batch * case.queries, "width": -(-max(case.lens) // decode.PAGE)}
    problem = Problem.of(
        "mla_decode", cache=case.format, heads=case.heads, max_query_len=case.queries,
        page=decode.PAGE, **shape,
    )  # fmt: skip
    found = mosaic.tune(problem, H200)
    if tuning.lookup(problem, H200) is None:
        assert found.source == "heuristic: nothing near was measured on NVIDIA H200"
        assert found.value == mosaic.heuristic(case.heads, case.queries, workers=H200.sms)


def rows(case, **times):
    return [{"case": f"{case.name}{change}", "ours_slope_us": us} for change, us in times.items()]


def test_records_are_the_best_of_two(tmp_path, monkeypatch, capsys):
    one, two = decode.CASES[:2]
    measured = [
        *rows(one, **{"": 5.0}),
        *rows(two, **{"/defer=0/prefetch=0": 9.04, "/defer=1/prefetch=0": 8.0, "": 8.5}),
    ]
    record = {"device": "NVIDIA H999", "versions": {"jax": "0"}, "rows": measured}
    monkeypatch.setattr(tune, "ROOT", tmp_path)

    def main(rows):
        results = tmp_path / "results_2026-11-23.json"
        results.write_text(json.dumps(record | {"rows": rows}))
        monkeypatch.setattr("sys.argv", ["tune", str(results)])
        tune.main()

    with pytest.raises(SystemExit):
        main(measured[:1])
    assert "no case with two measured tunings" in capsys.readouterr().err
    assert not (tmp_path / "nvidia_h999").exists()
    main(measured)
    data = json.loads((tmp_path / "nvidia_h999" / "mla_decode.json").read_text())
    sound("mla_decode", data)
    (entry,) = data["records"]
    assert entry["features"]["max_query_len"] == two.queries
    assert (entry["us"], sorted(entry["others"].values())) == (8.0, [8.5, 9.0])
    assert entry["tuning"]["defer"] and not entry["tuning"]["prefetch"]
    assert "workers" not in entry["tuning"]


def test_workers_are_the_devices_whatever_was_measured_where(monkeypatch):
    fields = {"defer": False, "prefetch": False, "early_launch": True}
    found = tuning.Record(features={}, tuning=fields, us=1.0, others={"x": 2.0})
    monkeypatch.setattr(tuning, "lookup", lambda problem, device: (found, "measured"))
    small = DeviceInfo(platform="gpu", kind="NVIDIA H20", sm=90, sms=78)
    assert mosaic.tune(Problem.of("mla_decode"), small).value.workers == 78


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DECODE(defer=False, prefetch=True), "mla_decode: prefetch: given True with"),
        (lambda: DECODE(chunk=0), "mla_decode: chunk: given 0; allowed: a whole number, 1 or more"),
        (lambda: DECODE(workers=0), "mla_decode: workers: given 0"),
        (lambda: DECODE(workers=1.5), "mla_decode: workers: given 1.5"),
        (lambda: PREFILL(block=96), "mla_prefill: block: given 96; allowed: multiples of 64 keys"),
        (lambda: PREFILL(block=0), "mla_prefill: block: given 0"),
        (lambda: PREFILL(stages=3), "mla_prefill: stages: given 3; allowed: 1, 2 or 4"),
        (lambda: PREFILL(heads_last=0), "mla_prefill: heads_last: given 0"),
        (lambda: PREFILL(held=-1), "mla_prefill: held: given -1; allowed: 0 or more"),
        (lambda: cache_io.WriteTuning(tile=12), "write_latent: tile: given 12; allowed: multiples"),
    ],
)
def test_tunings_refuse_in_words(make, text):
    """Not by assertions, which ``python -O`` leaves out."""
    with pytest.raises(ArgumentError) as refusal:
        make()
    assert text in str(refusal.value)
