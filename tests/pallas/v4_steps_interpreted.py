"""The Triton programs of V4's small steps, by the interpreter on the CPU."""

import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from mla_jax.cache import RecordCache
from mla_jax.ops import gather_rows
from mla_jax.pallas import triton_lib
from mla_jax.pallas.append_window import triton as append_window
from mla_jax.pallas.axes import Groups
from mla_jax.pallas.cache_io import row_triton as io
from mla_jax.pallas.cache_io.records import write_records
from mla_jax.pallas.cache_io.row_layout import layout
from mla_jax.pallas.pooling import triton as pooling
from mla_jax.pallas.streams import triton as mixing
from mla_jax.pallas.triton_lib import jit, tl
from tests.cases import draw
from tests.pallas import streams, v4_steps
from tests.pallas.interpreted import call
from tests.pallas.streams import NORM_EPS, ROUNDS, arrays, inputs, judge
from tests.pallas.v4_steps import EPS, PAGE, PAGES, Memory, cuts, sequences


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


@jit
def _records(
    x, slots, pages,
    DIM: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(x + token * DIM + tl.arange(0, DIM)[None, :])
    slot = tl.load(slots + token)
    io.store_row(row, pages, slot * 0, slot, ROW)


@pytest.mark.parametrize("rule", [0, 1])
@pytest.mark.parametrize("format", ["v4", "index_key"])
def test_records_to_the_bit(format, rule, rng):
    """Codes, scales and elements as the format makes them: ties, subnormals, zeros, infinities."""
    cache = RecordCache.alloc(num_pages=PAGES, page=PAGE, format=format)
    fmt = cache.format.with_rule(cache.format.rules[rule].name)
    cache = RecordCache(pages=cache.pages, page=PAGE, format=fmt)
    dim = v4_steps.WIDTHS[format][0]
    x = rng.normal(size=(20, dim)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 12, (20, dim // 64, 1))).repeat(64, 2).reshape(20, dim)
    x[1], x[2] = 0, np.where(np.arange(dim) % 2, -0.0, 1e-30)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.where(np.isfinite(every), every, 0)[:128]
    between = (codes + np.roll(codes, 1)) / 2  # ties
    x[3, :128], x[4, :128] = codes, between
    x[3, 0::64], x[4, 0::64] = 448, -448
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)  # the interpreter's cast cuts off
    x[5, 3], x[6, 5], x[7, 70] = np.nan, np.inf, -np.inf
    slots = rng.permutation(PAGES * PAGE)[:20].astype(np.int32)
    pages = np.array(cache.pages)
    given = (torch.from_numpy(a) for a in (x, slots, pages))
    _records[(20,)](*given, DIM=dim, ROW=layout(cache))
    cut = [f.count for f in fmt.values][:1]
    parts = tuple(jnp.split(jnp.asarray(x), cut, axis=1)) if len(fmt.values) > 1 else (x,)
    want = write_records(cache, tuple(map(jnp.asarray, parts)), jnp.asarray(slots))
    got, want = (
        np.asarray(gather_rows(c, jnp.asarray(slots), dtype=jnp.float32))
        for c in (RecordCache(pages=jnp.asarray(pages), page=PAGE, format=fmt), want)
    )
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(got).all(1)
    raw, expected = pages, np.asarray(write_records(
        cache, tuple(map(jnp.asarray, parts)), jnp.asarray(slots)).pages)  # fmt: skip
    for slot in slots[finite]:
        for p, width in zip(fmt.begins(PAGE), fmt.widths, strict=True):
            at = p + slot % PAGE * width
            np.testing.assert_array_equal(
                raw[slot // PAGE, at : at + width], expected[slot // PAGE, at : at + width]
            )


@pytest.mark.parametrize(
    ("format", "dtype"), [("fp16", "float16"), ("fp32", "float32"), ("v4", "float32")]
)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (9, 3), (4, 20)])
def test_new_rows(tokens, heads, format, dtype, rng):
    """In one layer of a stack; a layer or a slot that is not there stores nothing."""
    cache, *rest, slots = v4_steps.window_inputs(
        rng, tokens, heads, format=format, dtype=dtype, layers=3
    )
    slots[tokens // 2] = -1
    q, kv, gain, turn = rest
    kv[tokens // 2] = np.nan
    given = (*map(jnp.asarray, (q, kv, gain)), *v4_steps.angles(turn), jnp.asarray(slots))
    queries, rows = v4_steps.window_truth(q, kv, gain, turn)
    written = slots >= 0
    for layer in (0, 2, 3, -1):
        got, after = append_window.append_window(cache, *given, eps=EPS, layer=jnp.int32(layer))
        near = v4_steps.near("fp32", dtype)
        np.testing.assert_allclose(np.asarray(got, np.float64), queries, **near)
        bytes_of = [np.asarray(x.pages).view(np.uint8).reshape(3, -1) for x in (cache, after)]
        changed = (bytes_of[0] != bytes_of[1]).any(1)
        stores = tokens > 1 and 0 <= layer < 3
        assert changed.tolist() == [stores and i == layer for i in range(3)]
        if stores:
            at = jnp.asarray(slots[written])
            stored = gather_rows(after, at, dtype=jnp.float32, layer=layer)
            np.testing.assert_allclose(stored, rows[written], **v4_steps.near(format, dtype))


KINDS = {
    "overlap": dict(formats=("fp32", "fp32")),
    "disjoint": dict(ratio=16, overlap=False),
    "records": dict(formats=("v4", "index_key")),
}


def groups_of(step):
    m = step.meta
    return Groups(m.ends, m.tokens, m.kept, m.keep, step.common.positions, *step.angles)


@pytest.mark.parametrize("most", [1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_states(kind, most, rng):
    """Against the truth; and whole sequences at once give the same bits."""
    s = sequences(rng, (21, 3, 0, 8), **KINDS[kind])
    memory = Memory(rng, s, layers=2)
    ring, caches = memory.ring, memory.caches
    facts = {"eps": EPS, "layer": jnp.int32(1)}
    for done, take in cuts(rng, np.array(s.lens), most):
        step = memory.step(done, take, tokens=4 * most)
        ring, pools, *_ = step.args(ring, caches)
        ring, caches = pooling.pool_states(ring, pools, groups_of(step), **facts)
    whole = memory.step([0] * 4, s.lens, tokens=36)
    first, pools, *_ = whole.args(memory.ring, memory.caches)
    _, at_once = pooling.pool_states(first, pools, groups_of(whole), **facts)
    for i, (cache, other) in enumerate(zip(caches, at_once, strict=True)):
        a, b = (np.asarray(x.pages).view(np.uint8) for x in (cache, other))
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[0], np.asarray(memory.caches[i].pages).view(np.uint8)[0])
        for r in range(4):
            got = gather_rows(cache, jnp.asarray(memory.rows(r)), dtype=jnp.float32, layer=1)
            near = v4_steps.near(s.formats[i], s.dtype)
            np.testing.assert_allclose(got, s.truth(i, r), **near)


def test_a_token_that_completes_nothing_reads_no_ring(rng):
    """Its programs end at once: rings that do not exist change nothing."""
    s = sequences(rng, (16, 16), ratio=16, overlap=False)
    memory = Memory(rng, s)
    step = memory.step([9, 9], [1, 1], tokens=2)
    assert (np.asarray(step.meta.ends) < 0).all()
    assert (np.asarray(step.meta.kept) < 0).all()
    ring, pools, *_ = step.args(memory.ring, memory.caches)
    ring, (cache,) = pooling.pool_states(ring, pools, groups_of(step), eps=EPS)
    assert np.isnan(np.asarray(cache.pages)).all()
    assert (~np.isnan(np.asarray(ring.pages)).all(-1)).sum() == 2


@pytest.mark.parametrize(("tokens", "n", "hidden"), [(1, 4, 512), (5, 2, 24), (3, 4, 200)])
def test_streams(tokens, n, hidden, rng):
    given = inputs(rng, tokens, n, hidden, dtype="float32")
    facts = {"rounds": ROUNDS, "eps": streams.EPS, "norm_eps": NORM_EPS}
    judge(mixing.mix_streams(*arrays(given), None, **facts), given, atol=1e-5)
    given += (draw(rng, hidden, dtype="float32"),)
    judge(mixing.mix_streams(*arrays(given), **facts), given, atol=1e-5)
