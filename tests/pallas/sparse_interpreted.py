"""The Triton programs of sparse attention and of selection, by the interpreter on the CPU."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.config import MLADims
from mla_jax.pallas import triton_lib
from mla_jax.pallas.sparse_attention import triton, xla
from mla_jax.pallas.topk import triton as topk
from tests.cases import V3
from tests.pallas import test_topk
from tests.pallas.interpreted import call
from tests.pallas.test_sparse_attention import SCALE, V4, drawn

DIMS = MLADims(heads=16, rank=128, nope=8, rope=64, v=8, q_rank=None)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "missing"),
    [(3, 16, 70, 0.3), (1, 3, 300, 0.1), (2, 70, 64, 0.9), (2, 5, 130, 1.0)],
)
def test_sparse_decode(tokens, heads, keys, missing, rng):
    """Pieces and whole lists, blocks of heads with a rest, holes, nothing at all."""
    d = drawn(
        rng, dims=DIMS, heads=heads, tokens=tokens, keys=keys, form="fp16", dtype="float16",
        missing=missing, pages=20,
    )  # fmt: skip
    d.slots[0, -1] = 2**30
    same_result(d, DIMS.rank)


def same_result(d, value, extra=None):
    scopes = [(x.cache, jnp.asarray(x.slots), None) for x in (d, extra) if x is not None]
    given = jnp.asarray(d.q), tuple(scopes)
    facts = {"scale": SCALE, "value": value, "out_dtype": jnp.float16}
    got, want = triton.sparse_decode(*given, **facts), xla.sparse_decode(*given, **facts)
    for a, b in ((got.out, want.out), (got.lse, want.lse)):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        there = np.isfinite(b)
        np.testing.assert_allclose(a[there], b[there], atol=3e-3)


@pytest.mark.parametrize(("tokens", "heads", "keys", "missing"), [(3, 5, 70, 0.3), (1, 20, 40, 1)])
def test_sparse_decode_of_records(tokens, heads, keys, missing, rng):
    """656-byte records: unwritten ones hold scales and elements that are NaN."""
    d = drawn(
        rng, dims=V3, heads=heads, tokens=tokens, keys=keys, form="ds_mla", dtype="float16",
        missing=missing, pages=20,
    )  # fmt: skip
    d.slots[0, -1] = 2**30
    same_result(d, V3.rank)


@pytest.mark.parametrize(
    ("dims", "form"), [(DIMS, "fp16"), (V4, "fp16"), (V3, "ds_mla"), (V4, "v4")]
)
@pytest.mark.parametrize("programs", [1, 264])
def test_two_caches(dims, form, programs, rng, monkeypatch):
    """Pages and lengths of lists differ; lists whole and in pieces."""
    monkeypatch.setattr(triton, "PROGRAMS", programs)
    facts = {"dims": dims, "heads": 5, "tokens": 2, "form": form, "dtype": "float16"}
    d = drawn(rng, **facts, keys=40, page=4, pages=20)
    more = drawn(rng, **facts, keys=100, page=3, pages=40, missing=0.6)
    d.slots[0, -1] = 2**30
    more.slots[0, 60:] = -1
    same_result(d, dims.row if dims == V4 else dims.rank, more)


@pytest.mark.parametrize("page", [2, 64])
def test_sparse_decode_of_v4_records(page, rng):
    facts = {"dims": V4, "heads": 20, "tokens": 2, "form": "v4", "dtype": "float16"}
    d = drawn(rng, **facts, keys=70, page=page, pages=20, missing=0.4)
    same_result(d, V4.row)


@pytest.mark.parametrize("kind", test_topk.KINDS)
@pytest.mark.parametrize("workspace", [1, 1 << 25])
def test_selection_over_pages(kind, workspace, rng, monkeypatch):
    """Chunks of 1,024 columns, or all at once; several queries, each with its own length."""
    monkeypatch.setattr(topk, "WORKSPACE", workspace)
    monkeypatch.setattr(topk, "CANDIDATES", 64)
    rows = [test_topk._scores(kind, rng) for _ in range(2)]
    cache, table = test_topk.paged(rng, rows, page=64, dtype="fp32")
    pages = jnp.pad(cache.pages, ((0, 0), (0, 0), (0, 14)))  # a product has 16 channels or more
    cache = dataclasses.replace(cache, pages=pages, rank=16)
    q, w = test_topk.probes(2, 3)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, 14)))
    lens = np.array([[700, 300, 17], [600, 16, 0]], np.int32)
    with jax.disable_jit():  # the loop over chunks runs in Python
        got = topk.select_decode(q, w, cache, table, jnp.asarray(lens), k=test_topk.K)
    want = [
        [test_topk.oracle(r, n, test_topk.K) for n in each]
        for r, each in zip(rows, lens, strict=True)
    ]
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("workspace", [1, 1 << 25])
def test_selection_over_gathered_keys(workspace, rng, monkeypatch):
    monkeypatch.setattr(topk, "WORKSPACE", workspace)
    monkeypatch.setattr(topk, "CANDIDATES", 64)
    a, b = test_topk._scores("ties", rng), test_topk._scores("random", rng)[:300]
    keys = np.full((1100, 16), np.nan, np.float32)
    for start, row in ((0, a), (700, b)):
        keys[start : start + len(row)] = 0
        keys[start : start + len(row), 0] = np.maximum(row, 0)
        keys[start : start + len(row), 1] = np.maximum(-row, 0)
    starts = jnp.asarray([0, 0, 700, 700, 700, 0], jnp.int32)
    ends = jnp.asarray([700, 17, 700, 705, 1000, 0], jnp.int32)
    q, w = test_topk.probes(6)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 14)))
    with jax.disable_jit():
        got = topk.select_prefill(q, w, jnp.asarray(keys), starts, ends, k=test_topk.K)
    lens = np.asarray(ends - starts)
    rows = [a, a, b, b, b, b]
    want = [test_topk.oracle(r, n, test_topk.K) for r, n in zip(rows, lens, strict=True)]
    np.testing.assert_array_equal(np.asarray(got), want)
