"""Routed experts of many rows: the plan, products interpreted, compiled for an H200, on a GPU."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax import ops
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul import ref, tiles
from mla_jax.pallas.registry import Problem
from tests import aot
from tests.pallas.experts import case, judge, missing, module_of

V2_LITE = {"dtype": "bfloat16", "experts": 64, "topk": 6, "hidden": 2048, "width": 1408}
V3 = {"dtype": "bfloat16", "experts": 256, "topk": 8, "hidden": 7168, "width": 2048}
mosaic = module_of("grouped_matmul.mosaic")  # its rows are moved in Triton
pytestmark = pytest.mark.skipif(mosaic is None, reason=missing("triton") or "installed")
SMALL = mosaic and mosaic.Tuning(most=64, step=16, stages=2, group=2, workers=2, cluster=1)
PAIRS = mosaic and mosaic.Tuning(most=64, step=16, stages=2, group=2, workers=4, cluster=2)


def problem(model, tokens):
    each = tokens * model["topk"] // model["experts"]
    return Problem.of("routed_experts", **model, tokens=tokens, rows_each=each)


def test_the_choice_is_by_rows_of_an_expert():
    for model, tokens, name in (
        (V2_LITE, 8192, "mosaic"), (V3, 8192, "mosaic"), (V2_LITE, 2047, "triton"),
        (V3, 1024, "triton"),
    ):  # fmt: skip
        assert ops.REGISTRY.choose(problem(model, tokens), aot.H200).name == name, (model, tokens)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype=float32 not in {bfloat16, float16}"),
        ({"hidden": 2176}, r"hidden=2176 not in \[256, …\] multiples of 256"),
        ({"width": 1472}, r"width=1472 not in \[128, …\] multiples of 128"),
        ({"experts": 2048}, r"experts=2048 not in \[1, 1024\]"),
    ],
)
def test_requirements(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        ops.REGISTRY.choose(problem(V2_LITE | change, 65536), aot.H200, "mosaic")
    with pytest.raises(UnsupportedError, match="device sm100, needs sm90"):
        ops.REGISTRY.choose(problem(V2_LITE, 8192), replace(aot.H200, sm=100), "mosaic")


@pytest.mark.parametrize(
    "change",
    [
        {"most": 224},
        {"most": 40},
        {"step": 8},
        {"stages": 0},
        {"group": 0},
        {"cluster": 0},
        {"cluster": 2, "group": 3},
        {"cluster": 2, "workers": 131},
    ],
    ids=str,
)
def test_a_tuning_refuses_what_no_kernel_can_be(change):
    with pytest.raises(ArgumentError, match=r"routed_experts: .*: given .*; allowed: "):
        replace(SMALL, **change)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=6),
    step=st.sampled_from([16, 32, 48]),
    units=st.integers(1, 4),
    group=st.integers(1, 3),
    cluster=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_the_plan_places_every_pair_once(sizes, step, units, group, cluster, seed):
    count, most = len(sizes), step * units
    chosen = np.repeat(np.arange(count), sizes)
    # As many choices in every example: shapes are compiled.
    chosen = np.concatenate([chosen, [count, 1000], np.full(900 - len(chosen), -1)])
    np.random.default_rng(seed).shuffle(chosen)
    group *= cluster
    facts = {"step": step, "most": most, "cluster": cluster}
    found = tiles.lay_out(jnp.asarray(chosen[:, None], jnp.int32), count, group=group, **facts)
    places, table = np.asarray(found.places)[:, 0], np.asarray(found.table)
    used = int(found.used[0])
    assert len(table) == tiles.most_tiles(len(chosen), count, **facts) >= used
    assert used % cluster == 0 and (table[:used, tiles.FIRST] % cluster == 0).all()
    assert (table[:used, tiles.TOGETHER] % cluster == 0).all()
    assert (table[used:, tiles.EXPERT] == -1).all()
    owner = np.full(tiles.most_rows(len(chosen), count, step), -1)
    for e, first, together, row, choice, *_ in table[:used]:
        rows = slice(row * 8, row * 8 + (choice + 1) * step)
        assert (choice + 1) * step <= most and (owner[rows] == -1).all()
        owner[rows] = e
        mates = table[first : first + together]
        assert together <= group and (mates[:, tiles.EXPERT] == e).all()
        assert (mates[:, tiles.FIRST] == first).all()
    real = (chosen >= 0) & (chosen < count)
    assert (places[~real] == -1).all() and len(set(places[real])) == real.sum()
    np.testing.assert_array_equal(owner[places[real]], chosen[real])
    for e in range(count):  # in order, and no row too many
        own = places[chosen == e]
        assert (np.diff(own) == 1).all() and 0 <= (owner == e).sum() - len(own) < step


def interpreted(c, tuning, limit=None):
    """The products between a plan by its definition and rows moved by numpy."""
    from mla_jax.pallas.grouped_matmul import mosaic_sm90

    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    count = len(c.gate)
    facts = {"step": tuning.step, "most": tuning.most, "cluster": tuning.cluster}
    plan = tiles.lay_out(jnp.asarray(c.experts), count, group=tuning.group, **facts)
    places = np.asarray(plan.places)
    rows = tiles.most_rows(c.experts.size, count, tuning.step)
    x = np.full((rows, c.x.shape[1]), np.nan, c.x.dtype)  # nobody's rows
    for k in range(places.shape[1]):
        own = places[:, k] >= 0
        x[places[own, k]] = c.x[own]
    sizes = mosaic_sm90.Sizes(stages=tuning.stages, workers=tuning.workers, limit=limit, **facts)
    multiply = functools.partial(mosaic_sm90.multiply, sizes=sizes, interpret=params)
    _, gate, up, down, *_ = c.args
    h = multiply(jnp.asarray(x), (gate, up), plan.table, plan.used)
    y = np.asarray(multiply(h, (down,), plan.table, plan.used), np.float32)
    assert not get_races().races_found
    out = np.zeros(c.x.shape, np.float32)
    for t, k in zip(*np.nonzero(places >= 0), strict=True):
        out[t] += c.weights[t, k] * y[places[t, k]]
    return out.astype(c.x.dtype)


INTERPRETED = {
    "mixed": {"tokens": 60},
    "clamp": {"tokens": 20, "limit": 0.7},
    "one_expert": {"tokens": 50, "only": 2},
    "nobody": {"tokens": 5, "only": -1},
}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_with_race_detection(name, cluster, rng, monkeypatch):
    """Control flow, barriers and races on a CPU; not asynchrony of products, nor registers."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    tokens, only, limit = (INTERPRETED[name].get(k) for k in ("tokens", "only", "limit"))
    c = case(rng, tokens, experts=4, hidden=256, width=128, topk=2)
    choices = np.where(c.experts == 1, -1, c.experts) if only is None else 0 * c.experts + only
    c = c.with_choices(choices).poisoned()
    judge(interpreted(c, (SMALL, PAIRS)[cluster - 1], limit), c, limit)


AOT = aot.available() or missing("triton")


def specs(model, tokens):
    """Arguments of the operation as shapes."""
    m, s, low = model, jax.ShapeDtypeStruct, jnp.dtype(model["dtype"])
    into, back = (m["experts"], m["hidden"], m["width"]), (m["experts"], m["width"], m["hidden"])
    choice = (tokens, m["topk"])
    return (
        s((tokens, m["hidden"]), low), s(into, low), s(into, low), s(back, low),
        s(choice, jnp.float32), s(choice, jnp.int32),
    )  # fmt: skip


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(
    ("model", "limit"), [(V2_LITE, None), (V3, 10.0), (V2_LITE | {"dtype": "float16"}, None)]
)
def test_compiles_for_sm90(model, limit, monkeypatch):
    """Six launches, no copy of a weight, and products that neither spill nor wait in line."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    compiled, reports = aot.compile_sm90(
        lambda *a: ops.routed_experts(*a, limit=limit, backend="mosaic"), *specs(model, 8192)
    )
    assert len(reports) == 2
    for report in reports:
        assert not report.spilled and not report.serialized, report.log
        assert not report.register_limits_ignored and report.shared <= 232448, report.log
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :].splitlines()
    lines = [line.split(" = ")[1] for line in entry if " = " in line]
    assert sum("custom-call(" in x for x in lines) == 6, entry
    assert not any(" copy(" in x or " fusion(" in x for x in lines), entry


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
def test_compiles_a_scan_over_layers_without_copying_weights(monkeypatch):
    """Temporaries are rows, not weights: what is sliced out of a stack goes by address."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    x, gate, up, down, share, experts = specs(V2_LITE, 2048)
    weights = gate, up, down
    stacks = [jax.ShapeDtypeStruct((5, *w.shape), w.dtype) for w in weights]

    def step(x, stacks, share, experts):
        def layer(x, w):
            gate, up, down = w
            y = ops.routed_experts(x, gate, up, down, share, experts, backend="mosaic")
            return x + y, None

        return jax.lax.scan(layer, x, tuple(stacks))[0]

    options = {"xla_gpu_enable_dynamic_slice_fusion": True}
    compiled, _ = aot.compile_sm90(step, x, stacks, share, experts, options=options)
    assert compiled.memory_analysis().temp_size_in_bytes < 192 << 20


many = functools.partial(case, experts=16, hidden=512, width=256, topk=4)
TUNINGS = {
    "small": {"most": 64, "step": 16, "stages": 3, "group": 2},
    "large": {"most": 192, "step": 32, "stages": 3},
    "equal": {"most": 128, "step": 128, "stages": 4},
    "alone": {"most": 128, "step": 32, "stages": 4, "cluster": 1},
}


def run(c, limit=None, **change):
    return jax.jit(_compiled(limit, tuple(change.items())))(*c.args)


@functools.cache
def _compiled(limit, change):
    tuning = mosaic.Tuning(workers=DeviceInfo.current().sms, **dict(change))
    return functools.partial(mosaic.routed_experts, limit=limit, tuning=tuning)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 33, 300, 1100])
def test_on_the_device(tokens, dtype, rng):
    """Against the truth, padding and unused experts poisoned, with and without the clamp."""
    c = many(rng, tokens, dtype=dtype)
    choices = np.where(c.experts == 7, -1, c.experts)
    choices[tokens // 2, 1:] = 16
    c = c.with_choices(choices).poisoned()
    for limit, tuning in ((None, "large"), (0.7, "small")):
        judge(run(c, limit, **TUNINGS[tuning]), c, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", TUNINGS)
def test_every_schedule_on_the_device(tuning, rng):
    """Also all rows to one expert, and nobody at all."""
    all_of_them = many(rng, 400)
    for only in (None, 5, -1):
        c = all_of_them
        c = c if only is None else c.with_choices(0 * c.experts + only).poisoned()
        judge(run(c, **TUNINGS[tuning]), c)


@pytest.mark.gpu
def test_a_row_alone_is_the_row_among_neighbours_on_the_device(rng):
    """Whatever the size of its tile, and with every tuning."""
    tokens = 700
    c = many(rng, tokens)
    whole = np.asarray(run(c, **TUNINGS["large"]))
    for tuning in TUNINGS.values():
        assert np.asarray(run(c, **tuning)).tobytes() == whole.tobytes(), tuning
    order = rng.permutation(tokens)
    moved = np.asarray(run(c.take(order), **TUNINGS["large"]))
    assert moved.tobytes() == whole[order].tobytes()
    for row in (0, 57):
        alone = np.full_like(c.experts, -1)
        alone[row] = c.experts[row]
        got = np.asarray(run(c.with_choices(alone).poisoned(), **TUNINGS["large"]))
        assert got[row].tobytes() == whole[row].tobytes()


@pytest.mark.gpu
def test_the_plan_on_the_device(rng):
    for tokens, topk, count in ((700, 3, 7), (8192, 6, 64), (5000, 8, 256)):
        experts = rng.integers(-2, count + 2, (tokens, topk))
        experts = jnp.asarray(np.where(experts == 3, 5, experts), jnp.int32)
        facts = {"step": 32, "most": 192, "group": 8, "cluster": 2}
        got = jax.jit(functools.partial(mosaic.plan, count=count, **facts))(experts)
        want = tiles.lay_out(experts, count, **facts)
        np.testing.assert_array_equal(got.places, want.places)
        np.testing.assert_array_equal(got.used, want.used)
        used = int(want.used[0])
        np.testing.assert_array_equal(got.table[:used, :5], want.table[:used, :5])
        assert (np.asarray(got.table)[used:, tiles.EXPERT] == -1).all()


def test_the_definition_is_the_reference(rng):
    """Placing, multiplying tile by tile and adding back is what ``ref.py`` says."""
    c = case(rng, 30, dtype="float32")
    plan = tiles.lay_out(jnp.asarray(c.experts), 6, step=16, most=32, group=8)
    owner = np.full(tiles.most_rows(c.experts.size, 6, 16), -1)
    for e, _, _, row, choice, *_ in np.asarray(plan.table)[: int(plan.used[0])]:
        owner[row * 8 : row * 8 + (choice + 1) * 16] = e
    out = np.zeros(c.x.shape)
    for (t, k), p in np.ndenumerate(np.asarray(plan.places)):
        gate, up, down = (w[owner[p]].astype(np.float64) for w in (c.gate, c.up, c.down))
        g = c.x[t] @ gate
        out[t] += c.weights[t, k] * (g / (1 + np.exp(-g)) * (c.x[t] @ up)) @ down
    np.testing.assert_allclose(out, ref.routed_experts(*c.args), atol=2e-5)
