"""Routed experts in Triton: tunings, tiles, and the programs without a GPU and on one."""

import functools
import subprocess
import sys
import warnings
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.ops import routed_experts
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul import TRITON
from mla_jax.pallas.registry import Problem, Requirement
from tests import aot, imports
from tests.pallas.experts import case, compile_triton, judge, missing, module_of
from tests.pallas.interpreted import INTERPRETER, in_a_process

triton = module_of("grouped_matmul.triton")
pytestmark = pytest.mark.skipif(triton is None, reason=missing("triton") or "installed")

DEVICES = {
    80: DeviceInfo(platform="gpu", kind="a100", sm=80, sms=108, shared_memory=166912),
    89: DeviceInfo(platform="gpu", kind="l40s", sm=89, sms=142, shared_memory=101376),
    90: aot.H200,
}
V2_LITE = {"dtype": "bfloat16", "experts": 64, "topk": 6, "hidden": 2048, "width": 1408}
V3 = {"dtype": "bfloat16", "experts": 256, "topk": 8, "hidden": 7168, "width": 2048}
SHARED = V2_LITE | {"experts": 1, "topk": 1, "width": 2816}  # V2-Lite's shared experts as one
TINY = {"dtype": "float16", "experts": 6, "topk": 3, "hidden": 192, "width": 64}
TOKENS = (1, 8, 32, 128, 512, 8192)


def problem(model, tokens):
    return Problem.of("routed_experts", **model, tokens=tokens)


def everywhere():
    """Every tuning that the heuristic gives."""
    for device in (*DEVICES.values(), DeviceInfo(platform="gpu", kind="?", sm=86)):
        for model in (V2_LITE, V3, TINY):
            for tokens in TOKENS:
                yield device, model, tokens, triton.heuristic(problem(model, tokens), device)


def test_the_heuristic_fits_problem_and_device():
    for device, model, tokens, t in everywhere():
        where = f"{device.kind} {model} {tokens}: {t}"
        assert not model["width"] % t.gate_columns and not model["hidden"] % t.gate_depth, where
        assert not model["hidden"] % t.down_columns and not model["width"] % t.down_depth, where
        most = device.shared_memory or 101376
        gate = (t.rows, t.gate_columns, t.gate_depth, t.gate_stages)
        down = (t.rows, t.down_columns, t.down_depth, t.down_stages)
        assert triton.shared_bytes(*gate, 2) <= most, where
        assert triton.shared_bytes(*down, 1) <= most, where
        assert t.planned or tokens * model["topk"] <= triton.MOST_UNPLANNED, where


def test_few_rows_need_no_plan_and_many_the_largest_tile():
    found = [triton.heuristic(problem(V2_LITE, n), DEVICES[90]) for n in TOKENS]
    assert [t.planned for t in found] == [False, False, True, True, True, True]
    assert [t.rows for t in found] == sorted(t.rows for t in found)
    assert (found[0].rows, found[-1].rows) == (16, 128)


def test_programs_are_not_fewer_than_half_of_the_multiprocessors():
    """Of one token's choices: narrower blocks of V2-Lite's shared experts, not of its others."""
    shared, routed = (triton.heuristic(problem(m, 8), DEVICES[90]) for m in (SHARED, V2_LITE))
    assert (shared.gate_columns, shared.gate_depth, shared.gate_stages) == (32, 128, 5)
    assert (shared.down_columns, shared.down_depth, shared.down_stages) == (32, 128, 5)
    assert (routed.gate_columns, routed.down_columns) == (64, 64)


@pytest.mark.parametrize(
    "change",
    [{"rows": 24}, {"rows": 8, "tail": 8}, {"tail": 256}, {"rows": 128, "tail": 32},
     {"gate_columns": 48},
     {"down_depth": 0}, {"gate_warps": 3}, {"group": 0}, {"down_stages": 0},
     {"rows": 32, "planned": False}],
    ids=str,
)  # fmt: skip
def test_a_tuning_refuses_what_no_kernel_can_be(change):
    t = triton.heuristic(problem(V2_LITE, 32), DEVICES[90])
    with pytest.raises(ArgumentError, match=r"routed_experts: tuning\.\w+: given .*; allowed: "):
        replace(t, **change)


def test_a_tuning_must_divide_the_problem(monkeypatch):
    monkeypatch.setattr(DeviceInfo, "current", lambda: DEVICES[90])
    monkeypatch.setattr(Requirement, "missing", lambda *_: ())
    c = case(np.random.default_rng(0), 400)
    t = triton.heuristic(problem(V2_LITE, 1), DEVICES[90])
    for change, text in (
        ({"gate_columns": 128}, r"tuning\.gate_columns: given 128; allowed: a divisor of width=64"),
        ({"down_depth": 64}, r"tuning\.planned: given False; allowed: True above 1024 choices"),
    ):
        with pytest.raises(ArgumentError, match=text):
            routed_experts(*c.args, backend="triton", tuning=replace(t, **change))


@pytest.mark.parametrize(
    ("model", "sm", "reason"),
    [
        (V2_LITE | {"dtype": "float32"}, 90, "dtype=float32 not in {bfloat16, float16}"),
        (V2_LITE | {"hidden": 2080}, 90, r"hidden=2080 not in \[64, …\] multiples of 64"),
        (V2_LITE | {"experts": 2048}, 90, r"experts=2048 not in \[1, 1024\]"),
        (V2_LITE, 75, "device sm75, needs sm80 or newer"),
    ],
)
def test_requirements(model, sm, reason):
    device = replace(DEVICES[90], sm=sm)
    with pytest.raises(UnsupportedError, match=reason):
        ops.REGISTRY.choose(problem(model, 8), device, "triton")


def test_the_requirement_asks_for_packages_and_a_choice_imports_none():
    script = (
        "import sys\n"
        "from mla_jax import ops\n"
        "from mla_jax.pallas.registry import Problem\n"
        "from tests.aot import H200\n"
        f"problem = Problem.of('routed_experts', **{V2_LITE | {'tokens': 8}})\n"
        "names = None, 'triton', 'xla'\n"
        "print([ops.REGISTRY.choose(problem, H200, name).name for name in names])\n"
        "print(sorted({'triton', 'torch', 'jax.experimental.mosaic.gpu'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=imports.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "['triton', 'triton', 'xla']\n[]\n", done.stderr
    assert TRITON.packages == ("triton",)


@pytest.mark.parametrize(("pairs", "experts", "rows"), [(1, 64, 16), (100, 7, 16), (64, 64, 32)])
def test_tiles_are_enough_for_any_choice(pairs, experts, rows):
    """The worst: as many experts as can be with one row more than whole tiles."""
    most = triton.most_tiles(pairs, experts, rows)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ends = rng.integers(1, experts + 1)
        sizes = np.bincount(rng.integers(0, ends, pairs), minlength=experts)
        assert np.sum(-(-sizes // rows)) <= most
    lone = min(experts - 1, pairs - 1)
    assert -(-(pairs - lone) // rows) + lone <= most


@pytest.mark.slow
@pytest.mark.skipif(bool(INTERPRETER), reason=INTERPRETER or "installed")
@pytest.mark.parametrize("programs", ["experts", "step", "v4_steps"])
def test_the_programs_in_tritons_interpreter(programs):
    in_a_process(f"{programs}_interpreted.py")


COMPILER = missing("triton")


def parts(model, tokens, t):
    """``(kernel's name, constants, warps, stages)`` of one call."""
    sizes = (model["experts"], model["topk"], model["hidden"], model["width"])
    pairs = tokens * model["topk"]
    choices = jnp.zeros((tokens, model["topk"]), jnp.int32)
    searched = triton.searching(choices, rows=t.rows, planned=t.planned)
    yield (
        "gate_up",
        dict(
            SIZES=sizes,
            LIMIT=10.0,
            **searched,
            TILE=(t.rows, t.tail, t.gate_columns, t.gate_depth),
        ),
        t.gate_warps,
        t.gate_stages,
    )
    yield (
        "down",
        dict(SIZES=sizes, TILE=(t.rows, t.tail, t.down_columns, t.down_depth)) | searched,
        t.down_warps,
        t.down_stages,
    )
    columns = triton.power_of_two(model["hidden"])
    for placed in (False, True):
        facts = dict(SIZES=sizes[:3], PLACED=placed, COLUMNS=columns, EPS=1e-6)
        yield "add_norm", facts, triton.SUM_WARPS, 1
    if t.planned:
        yield "plan", triton.plan_sizes(pairs, model["experts"], rows=t.rows, group=t.group), 4, 1


@pytest.mark.skipif(bool(COMPILER), reason=COMPILER or "installed")
@pytest.mark.parametrize("tokens", [1, 8, 128, 512, 8192])
@pytest.mark.parametrize("sm", DEVICES)
def test_compiles_without_spilling(sm, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton's own
        from mla_jax.pallas.grouped_matmul import kernels_triton

        t = triton.heuristic(problem(V2_LITE, tokens), DEVICES[sm])
        wide = [p for p in parts(V3, tokens, t) if p[0] == "add_norm"]
        found = [*parts(V2_LITE, tokens, t), *wide]
        if tokens == 8:
            found += parts(SHARED, tokens, triton.heuristic(problem(SHARED, tokens), DEVICES[sm]))
        for name, constants, warps, stages in found:
            report = compile_triton(
                getattr(kernels_triton, name), constants,
                dtype="bf16", sm=sm, warps=warps, stages=stages,
            )  # fmt: skip
            assert report.stack == 0, (name, t, report)
            assert report.shared <= DEVICES[sm].shared_memory, (name, t, report)


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
def test_compiles_the_sum_with_what_follows(monkeypatch):
    """One kernel more than the products, and no fusion: XLA made two of it."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: DEVICES[90])
    spec = jax.ShapeDtypeStruct
    then = spec((8, 2048), jnp.bfloat16), spec((2048,), jnp.bfloat16)

    def call(residual, gain, *args):
        return routed_experts(*args, then=ops.AddNorm(residual, gain, 1e-6), backend="triton")

    text = aot.compile_sm90(call, *then, *specs(V2_LITE, 8))[0].as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count("custom-call(") == 3 and " fusion(" not in entry, entry


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize(("tokens", "calls"), [(8, 2), (128, 3)])
def test_compiles_for_sm90_with_few_launches(tokens, calls, monkeypatch):
    """The kernels, one fusion for the sum, and no copy of any weight."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: DEVICES[90])
    compiled, _ = aot.compile_sm90(
        lambda *a: routed_experts(*a, backend="triton"), *specs(V2_LITE, tokens)
    )
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :].splitlines()
    lines = [line.split(" = ")[1] for line in entry if " = " in line]
    assert sum("custom-call(" in x for x in lines) == calls, entry
    assert sum(" fusion(" in x for x in lines) == 1, entry
    assert not any(" copy(" in x or " transpose(" in x for x in lines), entry


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
def test_a_scan_over_layers_copies_no_weight(monkeypatch):
    """Temporaries of a step are its rows: what is sliced out of a stack goes by address."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: DEVICES[90])
    x, *weights, share, experts = specs(V2_LITE, 128)
    stacks = [jax.ShapeDtypeStruct((5, *w.shape), w.dtype) for w in weights]

    def step(x, stacks, share, experts):
        def layer(x, w):
            return x + routed_experts(x, *w, share, experts, backend="triton"), None

        return jax.lax.scan(layer, x, tuple(stacks))[0]

    options = {"xla_gpu_enable_dynamic_slice_fusion": True}
    compiled, _ = aot.compile_sm90(step, x, stacks, share, experts, options=options)
    assert compiled.memory_analysis().temp_size_in_bytes < 16 << 20


def specs(model, tokens):
    """Arguments of the operation as shapes."""
    m, s, low = model, jax.ShapeDtypeStruct, jnp.bfloat16
    into, back = (m["experts"], m["hidden"], m["width"]), (m["experts"], m["width"], m["hidden"])
    choice = (tokens, m["topk"])
    return (
        s((tokens, m["hidden"]), low), s(into, low), s(into, low), s(back, low),
        s(choice, jnp.float32), s(choice, jnp.int32),
    )  # fmt: skip


MODEL_CASE = dict(experts=16, hidden=256, width=128, topk=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 33, 64, 100, 129, 300])
def test_on_the_device(tokens, dtype, rng):
    """Against the truth, padding and unused experts poisoned, with and without the clamp."""
    c = case(rng, tokens, **MODEL_CASE, dtype=dtype)
    choices = np.where(c.experts == 7, -1, c.experts)
    choices[tokens // 2, 1:] = 16
    c = c.with_choices(choices).poisoned()
    for limit in (None, 0.7):
        judge(jitted(c, limit=limit), c, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 100, 300])
def test_backends_side_by_side(tokens, rng):
    c = case(rng, tokens, **MODEL_CASE)
    a, b = (np.asarray(jitted(c, backend=k), np.float32) for k in ("triton", "xla"))
    np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_every_schedule_on_the_device(tokens, rows, rng):
    """Also all rows to one expert, and each tile's tail."""
    many = case(rng, tokens, **MODEL_CASE)
    one = many.with_choices(np.full_like(many.experts, 5)).poisoned()
    for c in (many, one):
        for t in schedules(rows, tokens * MODEL_CASE["topk"]):
            judge(jitted(c, tuning=t), c)


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_a_row_alone_is_the_row_among_neighbours_on_the_device(rows, rng):
    tokens = 100
    c = case(rng, tokens, **MODEL_CASE)
    for t in schedules(rows, tokens * MODEL_CASE["topk"]):
        whole = np.asarray(jitted(c, tuning=t))
        assert whole.tobytes() == np.asarray(jitted(c, tuning=t)).tobytes(), "twice"
        order = rng.permutation(tokens)
        assert np.asarray(jitted(c.take(order), tuning=t)).tobytes() == whole[order].tobytes()
        for row in (0, 57):
            alone = np.full_like(c.experts, -1)
            alone[row] = c.experts[row]
            got = np.asarray(jitted(c.with_choices(alone).poisoned(), tuning=t))
            assert got[row].tobytes() == whole[row].tobytes()
            single = np.asarray(jitted(c.take([row]), tuning=t))
            assert single[0].tobytes() == whole[row].tobytes(), "in a batch of its own"


@pytest.mark.gpu
def test_in_a_scan_over_layers_on_the_device(rng):
    """Weights as slices of stacks."""
    layers = [case(rng, 20, **MODEL_CASE) for _ in range(3)]
    stacks = [jnp.stack([layer.args[i] for layer in layers]) for i in (1, 2, 3)]
    x, *_, weights, experts = layers[0].args

    @jax.jit
    def through(x):
        def layer(x, w):
            return routed_experts(x, *w, weights, experts, backend="triton"), None

        return jax.lax.scan(layer, x, tuple(stacks))[0]

    want = x
    for layer in layers:
        want = jax.jit(routed_experts)(want, *layer.args[1:4], weights, experts)
    np.testing.assert_array_equal(through(x), want)


def schedules(rows, pairs):
    small = triton.Tuning(
        rows=rows, tail=rows, planned=True, group=2,
        gate_columns=64, gate_depth=64, gate_warps=4, gate_stages=3,
        down_columns=128, down_depth=64, down_warps=4, down_stages=3,
    )  # fmt: skip
    yield small
    yield replace(small, group=8, down_warps=8, gate_warps=8)
    if rows in (32, 128):
        yield replace(small, tail=rows // 2)
    if pairs <= 512:
        yield replace(small, planned=False)


def jitted(c, backend="triton", limit=None, tuning=None):
    return _compiled(backend, limit, tuning)(*c.args)


@functools.cache
def _compiled(backend, limit, tuning):
    return jax.jit(lambda *a: routed_experts(*a, limit=limit, backend=backend, tuning=tuning))


def test_a_tuning_prints_as_its_fields():
    t = triton.heuristic(problem(V3, 8192), DEVICES[90])
    assert triton.Tuning(**asdict(t)) == t
