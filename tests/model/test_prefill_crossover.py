"""Where prefill over pages beats expanding the keys, from rates."""

import json
from importlib import resources

import jax.numpy as jnp
import pytest

from mla_jax import ops
from mla_jax.cache import FORMATS
from mla_jax.model import prefill_crossover as pc
from mla_jax.model.prefill_crossover import PathRate, PrefillCrossover
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Registry
from tests.cases import V2_LITE, V3

H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)
EQUAL = PathRate(tflops=600.0, fixed_us=0.0)


def crossover(dims=V3, **changes) -> PrefillCrossover:
    facts = {"run": 4, "expanded": EQUAL, "absorbed": EQUAL, "projection_tflops": 600.0}
    return PrefillCrossover(dims=dims, multiprocessors=132, measured="made up", **(facts | changes))


@pytest.mark.parametrize(
    ("seq", "first"), [(256, 119), (512, 143), (1024, 157), (2048, 164), (4096, 168), (8192, 169)]
)
def test_where_counting_puts_the_crossover(seq, first):
    """The least number of queries, of so many keys in all, that is less work expanded."""

    def work(flops, n):
        return sum(flops(V3, [n], [seq - n]))

    queries = next(
        n for n in range(1, seq) if work(pc.expanded_flops, n) <= work(pc.absorbed_flops, n)
    )
    assert queries == first


@pytest.mark.parametrize(
    ("seq", "first"), [(256, 166), (512, 182), (1024, 189), (2048, 193), (4096, 195), (8192, 195)]
)
def test_where_tiles_put_the_crossover(seq, first):
    """At equal rates it is later than by counting: few queries leave multiprocessors idle."""
    found = crossover()
    queries = next(n for n in range(1, seq) if not found.absorb([n], [seq - n]))
    assert queries == first


@pytest.mark.parametrize("dims", [V2_LITE, V3])
def test_many_tiles_cost_what_their_pairs_do(dims):
    """Up to the triangle of a tile on the diagonal."""
    for lens in ([8192], [0]), ([4096, 2048], [9000, 100]), ([1024] * 8, [16384] * 8):
        _, pairs = pc.expanded_flops(dims, *lens)
        tiles = pc.tiled_flops(dims, *lens, multiprocessors=132)
        assert pairs < tiles < 1.1 * pairs


def test_few_tiles_cost_as_many_as_multiprocessors():
    tile = 2 * (V2_LITE.qk + V2_LITE.v) * 128 * 32832
    for queries in (1, 64, 128):
        lens = [queries], [32832 - queries]
        assert pc.tiled_flops(V2_LITE, *lens, multiprocessors=132) == 132 * tile
    assert pc.tiled_flops(V2_LITE, [64, 5], [32768, 0], multiprocessors=132) == 132 * tile
    whole = pc.tiled_flops(V2_LITE, [128 * 9], [32832 - 128 * 9], multiprocessors=132)
    assert 132 * tile < whole < 144 * tile  # 16 heads of 9 tiles


def test_flops_of_examples():
    assert sum(pc.expanded_flops(V3, [1], [4095])) == pytest.approx(137.8e9, rel=1e-3)
    assert sum(pc.absorbed_flops(V3, [1], [4095])) == pytest.approx(1.174e9, rel=1e-2)
    assert sum(pc.expanded_flops(V3, [512], [7680])) == pytest.approx(607.8e9, rel=1e-3)
    assert sum(pc.absorbed_flops(V3, [512], [7680])) == pytest.approx(1149e9, rel=1e-3)


def test_most_queries_is_the_last_that_is_absorbed():
    found = crossover(absorbed=PathRate(tflops=500.0, fixed_us=20.0))
    for context in (0, 100, 5000, 60000):
        n = found.most_queries(context)
        assert not found.absorb([n + 1], [context])
        assert n == 0 or found.absorb([n], [context]) == 4
    assert found.most_queries(0) == 0


def test_requests_are_judged_together():
    found = crossover()
    assert found.absorb([16, 16], [9000, 0]) == 4
    assert found.absorb([16, 4000], [9000, 0]) == 0
    assert found.absorb([16, 16], [0, 0]) == 0


def test_explain_names_times_choice_and_source():
    text = crossover().explain([64], [8192])
    assert "64 tokens on 8192 cached" in text
    assert "runs absorbed, runs of 4" in text
    assert "up to 194 queries" in text
    assert "made up" in text
    assert "runs expanded" in crossover().explain([4096], [8192])


def test_an_unknown_device_or_width_has_no_rates():
    assert PrefillCrossover.of(V3, DeviceInfo(platform="cpu", kind="cpu")) is None
    glm = type(V3)(heads=20, rank=512, nope=192, rope=64, v=256, q_rank=None)
    assert PrefillCrossover.of(glm, H200) is None
    given = {"dtype": jnp.bfloat16, "format": FORMATS["bf16"], "page": 64}
    assert PrefillCrossover.for_cache(V3, **given) is None


def test_the_reference_is_never_chosen(monkeypatch):
    """Runs are taken by a kernel or not at all."""
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
    monkeypatch.setattr(PrefillCrossover, "of", classmethod(lambda cls, *_: crossover()))
    backends = {
        first: Registry(tuple(sorted(ops.REGISTRY.backends, key=lambda b: b.name != first)))
        for first in ("xla", "mosaic")
    }
    given = {"dtype": jnp.bfloat16, "format": FORMATS["bf16"], "page": 64}
    monkeypatch.setattr(ops, "REGISTRY", backends["xla"])
    assert PrefillCrossover.for_cache(V3, **given) is None
    assert PrefillCrossover.for_cache(V3, **given, backend="mosaic") is not None
    monkeypatch.setattr(ops, "REGISTRY", backends["mosaic"])
    assert PrefillCrossover.for_cache(V3, **given) is not None
    assert PrefillCrossover.for_cache(V3, **given, backend="xla") is None
    odd = given | {"page": 48}
    assert PrefillCrossover.for_cache(V3, **odd) is None
    assert PrefillCrossover.for_cache(V3, **odd, backend="mosaic") is None


FILES = [
    folder / "prefill_crossover.json"
    for root in [resources.files("mla_jax.pallas") / "tuned"]
    if root.is_dir()
    for folder in root.iterdir()
    if (folder / "prefill_crossover.json").is_file()
]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_packaged_rates_explain_their_own_measurements(path):
    """The choice is right wherever the measured times differ by more than a third."""
    record = json.loads(path.read_text())
    device = DeviceInfo(platform="gpu", kind=record["device"], sm=90)
    for row in record["rows"]:
        dims = {16: V2_LITE, 128: V3}[row["heads"]]
        found = PrefillCrossover.of(dims, device)
        absorbed, expanded = row["absorbed_us"], row.get("expanded_us", row["absorbed_us"])
        if max(absorbed, expanded) > 1.33 * min(absorbed, expanded):
            chosen = found.absorb([row["queries"]], [row["context"]])
            assert bool(chosen) == (absorbed < expanded), row
