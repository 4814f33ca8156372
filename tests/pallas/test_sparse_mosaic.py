"""Backend ``mosaic`` of sparse attention: interpreted, compiled for an H200, and on a GPU.

The shared suite in ``test_sparse_attention.py`` runs it on a GPU too, on the cases it accepts; the
assembly that gathers rows is in ``test_sparse_rows.py``.
"""

import dataclasses
import functools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import RECORD_FORMATS, LatentCache, RecordCache, SparseScope
from mla_jax.ops import explain, mla_sparse_decode
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.merge.ref import apply_sinks
from mla_jax.pallas.mosaic_lib import SHARED_MEMORY, shared_bytes
from mla_jax.pallas.sparse_attention import line_plan, mosaic, mosaic_sm90
from tests import aot
from tests.cases import V3
from tests.compare import judge, same_bits
from tests.pallas.interpreted import all_pass
from tests.pallas.test_sparse_attention import SCALE, V4, drawn, judged, value_of

OP = "mla_sparse_decode"
THREADS = int(os.environ.get("NPROC") or os.cpu_count() or 1)
ENOUGH = 8

interpreted = pytest.mark.skipif(
    THREADS < ENOUGH,
    reason=f"{THREADS} threads of XLA, and warpgroups that wait hold one each: "
    "test_the_interpreter_in_a_process runs it",
)
"""Of a test whose kernel may hang if XLA has as few threads as a small machine has cores."""


@pytest.mark.slow
@pytest.mark.skipif(THREADS >= ENOUGH, reason="what is interpreted runs in this process")
def test_the_interpreter_in_a_process():
    """All tests below that are interpreted, with more threads of XLA."""
    all_pass(__file__, "--slow", "all", "-k", "interpreted", NPROC=f"{ENOUGH}")


Tuning = functools.partial(mosaic.Tuning, early_launch=True)


def attend(d, workers, *, extra=None, interpret=None, layer=None, **more):
    scopes = [(d.cache, jnp.asarray(d.slots), layer)]
    scopes += [] if extra is None else [(extra.cache, jnp.asarray(extra.slots), None)]
    return mosaic.sparse_decode(
        jnp.asarray(d.q), tuple(scopes), scale=SCALE, value=512, out_dtype=d.q.dtype,
        tuning=Tuning(workers=workers), interpret=interpret, **more,
    )  # fmt: skip


def params():
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)


INTERPRETED = {  # workers, and what is drawn
    "pieces_across_tokens": (2, {"keys": 150}),
    "more_workers_than_blocks": (99, {"keys": 70, "heads": 70, "tokens": 1}),
    "one_block_of_many_tokens": (2, {"keys": 9, "tokens": 7}),
    "nothing": (2, {"keys": 9, "missing": 1.0}),
    "fp16": (1, {"keys": 70, "tokens": 1, "form": "fp16", "dtype": "float16"}),
    "records": (2, {"keys": 150, "form": "ds_mla"}),
    "v4": (2, {"keys": 150, "form": "v4", "dims": V4, "page": 2, "pages": 60}),
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_with_race_detection(name, rng, capsys):
    """Control flow, barriers and races on a CPU; not asynchrony, registers or assembly."""
    workers, case = INTERPRETED[name]
    d = drawn(rng, **({"dims": V3, "heads": 5, "tokens": 3, "pages": 20} | case))
    d.slots[0, -2:] = 2**31 - 1, -(2**31)
    judged(attend(d, workers, interpret=params()), d, d.parts(value=512))
    assert not get_races().races_found  # of the last kernel
    assert "RACE DETECTED" not in capsys.readouterr().out


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("form", "dims", "workers"), [("v4", V4, 3), ("bf16", V4, 1)])
def test_two_scopes_interpreted(form, dims, workers, rng):
    """Pages of other sizes, lists that end inside of a block."""
    facts = {"dims": dims, "heads": 5, "tokens": 2, "form": form}
    d = drawn(rng, **facts, keys=70, page=8)
    extra = drawn(rng, **facts, keys=100, page=3, pages=25)
    state = attend(d, workers, extra=extra, interpret=params())
    judged(state, d, d.parts(extra=extra, value=512))
    assert not get_races().races_found


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "tokens", "keys"), [(2, 2, 70), (9, 2, 70), (2, 3, 420)])
def test_sinks_interpreted(workers, tokens, keys, rng):
    """Of tokens in one piece, of tokens in several, and of both in one call."""
    d = drawn(rng, dims=V4, heads=9, tokens=tokens, keys=keys, pages=20)
    d.slots[-1] = -1
    sinks = (
        jnp.asarray(rng.normal(size=9), jnp.float32).at[:2].set(jnp.asarray([-jnp.inf, jnp.inf]))
    )
    got = attend(d, workers, interpret=params(), sinks=sinks)
    want = apply_sinks(attend(d, workers, interpret=params()), sinks)
    np.testing.assert_array_equal(got.lse, want.lse)
    got, want = (np.asarray(x.out, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
    np.testing.assert_array_equal(got[:, 0], want[:, 0])
    assert not got[-1].any()
    assert not got[:, 1].any()


@interpreted
@pytest.mark.slow
def test_a_stack_takes_its_layer_interpreted(rng):
    d = drawn(rng, dims=V3, heads=5, tokens=2, keys=70, form="ds_mla", page=8)
    poison = jnp.full_like(d.cache.pages, 0xFF)
    stack = dataclasses.replace(d.cache, pages=jnp.stack([poison, d.cache.pages, poison]))
    want = attend(d, 2, interpret=params())
    of_stack = dataclasses.replace(d, cache=stack)
    same_bits(attend(of_stack, 2, interpret=params(), layer=jnp.int32(1)), want)


@interpreted
@pytest.mark.slow
def test_a_negative_scale_interpreted(rng):
    d = drawn(rng, dims=V3, heads=5, tokens=1, keys=20)
    given = jnp.asarray(d.q), ((d.cache, jnp.asarray(d.slots), None),)
    facts = {"value": 512, "out_dtype": d.q.dtype, "tuning": Tuning(workers=2)}
    got = mosaic.sparse_decode(*given, scale=-SCALE, **facts, interpret=params())
    judged(got, d, [(-q, *rest) for q, *rest in d.parts()])


@given(
    tokens=st.integers(1, 40),
    blocks=st.integers(1, 33),
    workers=st.integers(1, 70),
    share=st.integers(1, 80),
)
def test_lines(tokens, blocks, workers, share):
    """Every block has one worker; slots of split tokens are numbered along the line."""
    lines = [
        line_plan.divide(tokens, blocks, workers=workers, heads=128),
        line_plan.Line(tokens=tokens, blocks=blocks, share=share),
    ]
    assert lines[0].workers <= workers
    for line in lines:
        found = [[] for _ in range(tokens)]
        for w, slot in enumerate(line.first_slots()[:-1]):
            start, stop = w * line.share, min((w + 1) * line.share, line.total)
            assert start < stop
            for token in range(start // blocks, (stop - 1) // blocks + 1):
                whole = start <= token * blocks and (token + 1) * blocks <= stop
                found[token].append(-1 if whole else slot)
                slot += not whole
        np.testing.assert_array_equal([len(f) for f in found], line.parts)
        split = [f for f in found if f != [-1]]
        assert [s for f in split for s in f] == list(range(line.slots))
        assert line.split == bool(split)
        merges = line.merges()
        assert merges[0, 0] == len(split)
        for first, parts, query, token in merges[1 : 1 + len(split), :4]:
            assert found[token] == list(range(first, first + parts))
            assert query == 0


@pytest.mark.parametrize(
    ("tokens", "blocks", "workers", "share"),
    [(128, 32, 66, 64), (128, 32, 132, 32), (1, 32, 66, 1), (32, 32, 66, 16), (128, 10, 132, 10)],
)
def test_what_is_divided_how(tokens, blocks, workers, share):
    """Whole tokens where that costs nothing; one token fills the machine."""
    assert line_plan.divide(tokens, blocks, workers=workers, heads=128).share == share


@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", ["bf16", "ds_mla"])
def test_shared_memory_fits(width, dtype, form):
    assert shared_bytes(mosaic_sm90.scratch(dtype, width, form)) <= SHARED_MEMORY


def _cache(form, page, pages, layers=8):
    facts = {"num_pages": pages, "page": page, "format": form, "layers": layers}
    if form in RECORD_FORMATS:
        return jax.eval_shape(lambda: RecordCache.alloc(**facts))
    return jax.eval_shape(lambda: LatentCache.alloc(**facts, rank=512, rope=64))


COMPILED = [  # format, tokens, heads, keys, entries of a second list over pages of two
    ("ds_mla", 128, 128, 2048, 0),
    ("ds_mla", 1, 16, 2048, 0),
    ("bf16", 32, 128, 2048, 0),
    ("v4", 128, 64, 128, 512),
    ("v4", 2, 128, 100, 500),
]

SPILLS = {"ds_mla": 64, "v4": 96, "bf16": 0}
"""Bytes of a thread: scalars, with the assembler of CUDA 13."""


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize(("form", "tokens", "heads", "keys", "more"), COMPILED)
def test_compiles_for_sm90(form, tokens, heads, keys, more, monkeypatch):
    """Products stay asynchronous, the register division holds, and nothing of a cache is copied."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec = jax.ShapeDtypeStruct
    caches = [_cache(form, 64, 512)] + ([_cache(form, 2, 8192)] if more else [])
    lists = [spec((tokens, n), jnp.int32) for n in (keys, more) if n]
    rank = 448 if form == "v4" else 512

    def call(q, caches, lists, layer, sinks):
        extra = None
        if more:
            extra = SparseScope(cache=caches[1], slots=lists[1], lengths=None, layer=layer)
        return mla_sparse_decode(
            *q, caches[0], lists[0], scale=0.1, value=512, layer=layer, extra=extra, sinks=sinks,
            backend="mosaic",
        )  # fmt: skip

    q = [spec((tokens, heads, n), jnp.bfloat16) for n in (rank, 64)]
    sinks = spec((heads,), jnp.float32)
    compiled, reports = aot.compile_sm90(call, q, caches, lists, spec((), jnp.int32), sinks)
    kernels = {r.name.rsplit("_", 1)[0]: r for r in reports}
    main = kernels["mla_sparse"]
    assert not main.serialized, main.log
    assert not main.register_limits_ignored, main.log
    assert main.registers == 128
    assert main.shared <= SHARED_MEMORY
    assert main.spilled <= SPILLS[form], main.log
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23 + 6 * tokens * heads * 576 * 2
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    if form != "v4" and tokens == 128:  # neither queries nor numbers pass through another kernel
        assert " fusion(" not in entry, entry
        assert entry.count(" custom-call(") == 1, entry


def test_the_automatic_choice():
    """On Hopper, of what it takes; everything else goes to the others."""
    spec = jax.ShapeDtypeStruct
    for form, rank in (("ds_mla", 512), ("v4", 448)):
        q = [spec((2, 64, n), jnp.bfloat16) for n in (rank, 64)]
        cache = _cache(form, 64, 8, layers=None)
        facts = {"scale": 1.0, "value": 512}
        given = OP, *q, cache, spec((2, 64), jnp.int32)
        assert "runs mosaic" in explain(*given, device=aot.H200, **facts)
        old = dataclasses.replace(aot.H200, sm=89)
        assert "runs mosaic" not in explain(*given, device=old, **facts)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["ds_mla", "bf16"])
def test_twice_the_same_bits_and_permuted_tokens(form, rng):
    """Bits depend on neither the run nor the order of whole tokens."""
    d = drawn(rng, dims=V3, heads=64, tokens=132, keys=200, pages=80, form=form)
    run = jax.jit(functools.partial(mla_sparse_decode, scale=SCALE, backend="mosaic"))
    first = run(*d.args)
    judged(first, d, d.parts())
    for _ in range(20):
        same_bits(run(*d.args), first)
    order = rng.permutation(132)
    other = run(*(x[order] for x in d.args[:2]), d.cache, d.args[3][order])
    same_bits(other, jax.tree.map(lambda x: x[order], first))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [SCALE, 20 * SCALE])
@pytest.mark.parametrize(
    ("tokens", "keys", "heads"), [(1500, 64, 8), (1100, 9, 70), (700, 128, 16), (300, 330, 64)]
)
def test_many_tokens_of_a_thread_block(tokens, keys, heads, scale, rng):
    """Lists of one to six blocks, so that the two that score meet in every way; maxima rise."""
    d = drawn(rng, dims=V3, heads=heads, tokens=tokens, keys=keys, pages=200)
    run = jax.jit(functools.partial(mla_sparse_decode, scale=scale, backend="mosaic"))
    first = run(*d.args)
    facts = SimpleNamespace(scale=scale, dtype=d.dtype)
    judge(first, facts, d.parts(), lse_rounding=2.0**-20)
    for _ in range(5):
        same_bits(run(*d.args), first)


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("form", ["ds_mla", "v4", "bf16"])
def test_rows_beyond_four_gigabytes(form, rng):
    """The last rows of the last layer of a stack that 32-bit offsets do not reach."""
    dims = V4 if form == "v4" else V3
    d = drawn(rng, dims=dims, heads=16, tokens=3, keys=150, page=64, pages=4, form=form)
    value = value_of(dims)
    want = mla_sparse_decode(*d.args, scale=SCALE, backend="mosaic", **value)
    size = d.cache.pages[0].nbytes
    layers, pages = 3, 2 * 10**9 // size
    far = jnp.zeros((layers, pages, *d.cache.pages.shape[1:]), d.cache.pages.dtype)
    far = jax.jit(lambda far, x: far.at[-1, -4:].set(x), donate_argnums=0)(far, d.cache.pages)
    more = {} if form in RECORD_FORMATS else {"scale": jnp.ones(layers, jnp.float32)}
    cache = dataclasses.replace(d.cache, pages=far, **more)
    slots = jnp.where(d.args[3] >= 0, d.args[3] + (pages - 4) * 64, -1)
    call = (*d.args[:2], cache, slots)
    got = mla_sparse_decode(*call, scale=SCALE, layer=2, backend="mosaic", **value)
    same_bits(got, want)
