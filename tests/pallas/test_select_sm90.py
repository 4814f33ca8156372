"""Hopper's selection of ranks: its assembly on a CPU, instruction by instruction, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.topk import rows_sm90
from mla_jax.pallas.topk.select_sm90 import Shape, select, shape_of
from tests import aot
from tests.pallas import ptx_machine

KINDS = (
    "random", "constant", "zeros", "ties", "ascending", "descending", "ten_bits", "negative",
    "negative_bits", "infinities", "few_numbers",
)  # fmt: skip
BEHIND = 0x7FFFFFFF
"""A rank above all others, where a row sees nothing."""


def ranks_of(scores) -> np.ndarray:
    """int32 in the order of float32: 0 and -0 are equal, NaN is the lowest but one."""
    scores = np.where(scores == 0, 0, scores).astype(np.float32)
    bits = scores.view(np.int32)
    return np.where(np.isnan(scores), -(2**31) + 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def drawn(kind: str, rng, rows: int, keys: int) -> np.ndarray:
    at, size = np.broadcast_to(np.arange(keys), (rows, keys)), (rows, keys)
    match kind:
        case "random":
            scores = rng.normal(size=size)
        case "constant":
            scores = np.full(size, 0.5)
        case "zeros":
            scores = np.where(at % 3 == 0, -0.0, 0.0)
        case "ties":
            scores = rng.integers(0, 4, size)
        case "ascending":
            scores = at
        case "descending":
            scores = -at
        case "ten_bits":  # equal in all but the last bits
            scores = 1 + rng.integers(0, 1024, size) * 2.0**-23
        case "negative_bits":  # the same, where the first table's upper half counts them
            scores = -1 - rng.integers(0, 1024, size) * 2.0**-23
        case "negative":
            scores = -1 - rng.random(size)
        case "infinities":
            scores = np.where(rng.random(size) < 0.999, -np.inf, np.inf)
        case _:
            scores = np.where(rng.random(size) < 0.99, np.nan, 1.0)
    return ranks_of(scores)


def oracle(ranks, start, end, k) -> np.ndarray:
    """Places of the best of one row, by numpy's sort on (rank down, place up)."""
    seen = ranks[max(start, 0) : max(end, start, 0)].astype(np.int64)
    best = np.sort(np.lexsort((np.arange(len(seen)), -seen))[:k])
    return np.concatenate([best, np.full(k - len(best), -1)]).astype(np.int32)


def bounds(rng, keys: int, k: int) -> np.ndarray:
    """First columns and ends: all, odd ones, and lengths about 0 and about ``k``."""
    odd = [(int(a), keys - int(b)) for a, b in rng.integers(0, keys // 3, (3, 2))]
    odd.append((-3, keys + 5))
    short = [(7, 7 + n) for n in (-1, 0, 1, k - 1, k, k + 1)]
    return np.array([(0, keys), *odd, *short])


SHAPES = (
    Shape(blocks=1, groups=1, each=24),
    Shape(blocks=1, groups=4, each=4),
    Shape(blocks=1, groups=2, each=16),
    Shape(blocks=2, groups=4, each=8),
    Shape(blocks=3, groups=8, each=20),
    Shape(blocks=1, groups=8, each=32),
    Shape(blocks=8, groups=2, each=8),
    Shape(blocks=1, groups=2, each=8, teams=4),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_program_equals_the_oracle(kind, shape, rng):
    """Clusters of one to eight thread blocks, the last of them not full; garbage outside."""
    k, keys = 300, shape.columns - 100
    limits = bounds(rng, keys, k)
    ranks = drawn(kind, rng, len(limits), keys)
    for row, (start, end) in zip(ranks, limits, strict=True):
        row[: max(start, 0)] = row[max(end, start) :] = BEHIND
    want = [oracle(row, a, b, k) for row, (a, b) in zip(ranks, limits, strict=True)]
    for way in ("", "eager", "ahead") if shape.blocks == 1 else ("", "eager"):
        flags = {way: True} if way else {}
        got = ptx_machine.select(ranks, *limits.T, k=k, shape=shape, **flags)
        np.testing.assert_array_equal(got, want)


def test_rows_may_all_begin_with_the_first_column(rng):
    ranks = drawn("random", rng, 2, 1000)
    shape = Shape(blocks=1, groups=4, each=4)
    got = ptx_machine.select(ranks, None, np.array([1000, 900]), k=300, shape=shape)
    want = [oracle(row, 0, n, 300) for row, n in zip(ranks, (1000, 900), strict=True)]
    np.testing.assert_array_equal(got, want)


def test_bounds_may_be_of_more_rows(rng):
    """Of seven rows' bounds those from the third on: starts, ends and origins alike."""
    k, keys = 300, 1000
    limits = bounds(rng, keys, k)[:7]
    ranks = drawn("random", rng, 4, keys)
    shape = Shape(blocks=1, groups=4, each=4)
    origins = limits[:, 0] - 10
    own = limits[2:6]
    alone = ptx_machine.select(ranks, *own.T, own[:, 0] - 10, k=k, shape=shape)
    got = ptx_machine.select(ranks, *limits.T, origins, first=2, k=k, shape=shape)
    np.testing.assert_array_equal(got, alone)
    got = ptx_machine.select(ranks, *limits.T, origins, first=2, k=k, shape=shape, whole=True)
    np.testing.assert_array_equal(got[2:6], alone)
    assert len(got) == 7 and (got[[0, 1, 6]] == ptx_machine.UNTOUCHED).all()


def test_a_list_may_be_full_of_what_is_no_candidate(rng):
    """As where lists are joined: the lowest rank of all, more often than it is wanted."""
    ranks = np.full((1, 600), -(2**31))
    ranks[0, 300:400] = rng.permutation(100)
    shape = Shape(blocks=1, groups=4, each=4)
    got = ptx_machine.select(ranks, np.array([0]), np.array([600]), k=300, shape=shape)
    np.testing.assert_array_equal(got[0], [*range(200), *range(300, 400)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_and_ranks_of_lists(kind, shape, rng):
    """Lists of two parts with nothing behind them, then the list that both are joined to."""
    k, keys = 300, shape.columns // 2 - 52
    limits = np.array([(0, keys), (3, keys - 1), (7, 8), (9, 9 + k + 1), (keys, keys)])
    ranks = drawn(kind, rng, len(limits), keys)
    for row, (start, end) in zip(ranks, limits, strict=True):
        row[: max(start, 0)] = row[max(end, start) :] = BEHIND
    origins = limits[:, 0] - 1000
    facts = {"k": k, "shape": shape, "ranked": True}
    places, found = ptx_machine.select(ranks, *limits.T, origins, **facts)
    own = [oracle(row, a, b, k) for row, (a, b) in zip(ranks, limits, strict=True)]
    columns = np.stack(own) + limits[:, :1]
    missing = np.stack(own) < 0
    np.testing.assert_array_equal(places, np.where(missing, -1, columns - origins[:, None]))
    taken = np.take_along_axis(ranks, np.where(missing, 0, columns), axis=1)
    np.testing.assert_array_equal(found, np.where(missing, -(2**31), taken))

    both = [np.concatenate([x, y], axis=1) for x, y in ((found, found), (places, places + 5000))]
    both[1] = np.where(both[0] == -(2**31), -1, both[1])
    ends = np.full(len(limits), 2 * k)
    places, found = ptx_machine.select(both[0], None, ends, None, both[1], **facts)
    best = np.stack([oracle(row, 0, 2 * k, k) for row in both[0]])
    wanted = np.take_along_axis(both[1], best, axis=1)
    np.testing.assert_array_equal(places, wanted)
    taken = np.take_along_axis(both[0], best, axis=1)
    np.testing.assert_array_equal(found, np.where(wanted < 0, -(2**31), taken))


def by_sorting(
    ranks, starts, ends, origins=None, places=None, row=None, into=None,
    *, k, shape, ranked=False, whole=False,
):  # fmt: skip
    """``select`` without its kernel."""
    into = jnp.full((len(ends), k), 777, jnp.int32) if into is None else into
    starts, ends, origins = (
        x if x is None or row is None else jax.lax.dynamic_slice_in_dim(x, row, len(ranks))
        for x in (starts, ends, origins)
    )
    at = jnp.arange(ranks.shape[1])
    first = jnp.maximum(0 if starts is None else starts[:, None], 0)
    outside = (at < first) | (at >= ends[:, None])
    order = jnp.lexsort((jnp.broadcast_to(at, ranks.shape), ~ranks, outside), axis=1)[:, :k]
    seen = jnp.minimum(ends, ranks.shape[1])[:, None] - first
    best = jnp.sort(jnp.where(jnp.arange(k) < seen, order, ranks.shape[1]), axis=1)
    real = best < ranks.shape[1]
    if places is None:
        found = best - (first if origins is None else origins[:, None])
    else:
        found = jnp.where(seen > k, jnp.take_along_axis(places, best, axis=1, mode="clip"), best)
    found = jnp.where(real, found, -1)
    if whole:
        return jax.lax.dynamic_update_slice_in_dim(into, found, row, 0)
    taken = jnp.take_along_axis(ranks, best, axis=1, mode="clip")
    return (found, jnp.where(found >= 0, taken, -(2**31))) if ranked else found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [700, 2000])
def test_lists_of_parts_are_joined(kind, keys, rng, monkeypatch):
    """Rows in parts of 96, the longer ones in chunks of five parts; garbage outside."""
    monkeypatch.setattr(rows_sm90.select_sm90, "select", by_sorting)
    monkeypatch.setattr(rows_sm90.select_sm90, "MANY", 1)
    for name, value in {"PART": 96, "MANY": 1, "COLUMNS": 480 if keys > 1000 else 1000}.items():
        monkeypatch.setattr(rows_sm90, name, value)
    k, limits = 50, bounds(rng, keys, 50)
    ranks = drawn(kind, rng, len(limits), keys)
    for row, (start, end) in zip(ranks, limits, strict=True):
        row[: max(start, 0)] = row[max(end, start) :] = BEHIND
    padded = jnp.asarray(np.pad(ranks, ((0, 0), (0, 1000)), constant_values=BEHIND), jnp.int32)

    def some(base, columns):
        assert columns % 16 == 0 and columns <= rows_sm90.COLUMNS + 16 * 8
        start = (0, 0 if base is None else base)
        return jax.lax.dynamic_slice(padded, start, (len(ranks), columns))

    starts, ends = (jnp.asarray(x, jnp.int32) for x in np.clip(limits, 0, keys).T)
    for first in (starts, None):
        got = rows_sm90.select(some, first, ends, keys, k=k)
        own = np.asarray(starts) if first is not None else 0 * limits[:, 0]
        full = ranks if first is not None else np.asarray(padded)[:, :keys]
        want = [oracle(r, a, b, k) for r, a, b in zip(full, own, np.asarray(ends), strict=True)]
        np.testing.assert_array_equal(got, want)
        five = jnp.int32(3), 5
        into = jnp.full((len(ends), k), -5, jnp.int32)
        for given in (None, into):  # without an array of all rows the others may be anything
            facts = {"k": k, "some": five, "into": given}
            got = rows_sm90.select(lambda *at: some(*at)[3:8], first, ends, keys, **facts)
            np.testing.assert_array_equal(got[3:8], want[3:8])
        np.testing.assert_array_equal(got, into.at[3:8].set(got[3:8]))


def test_many_rows_of_many_columns_are_in_parts():
    assert rows_sm90._parts(64, 32_768) == rows_sm90._parts(1, 131_072) == 1
    assert rows_sm90._parts(4096, 32_768) == 1 and rows_sm90._parts(4096, 65_536) == 2
    assert rows_sm90._parts(256, 131_072) == rows_sm90._parts(256, 1 << 20) == 4
    assert rows_sm90._parts(256, 80_000) == 3


@pytest.mark.parametrize("columns", [4, 8192, 8208, 65_536, rows_sm90.COLUMNS])
def test_a_shape_holds_a_row(columns):
    for shape in (shape_of(columns, rows) for rows in (1, 16, 64, 4096)):
        assert columns <= shape.columns and shape.blocks <= 8 and shape.each <= 32


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("keys", "k"), [(700, 16), (8192, 2048), (30_000, 2048), (40_000, 2048), (131_072, 2048)]
)
@pytest.mark.parametrize("rows", [1, 16, 64, 4096])
def test_on_a_gpu(kind, keys, k, rows, rng):
    """The shapes of few rows and of many; some thread blocks have several rows."""
    limits = bounds(rng, keys, k)
    if rows == 4096:
        limits = np.tile(limits, (60 if keys <= 8192 else 30, 1))
    ranks = drawn(kind, rng, len(limits), keys)
    for row, (start, end) in zip(ranks, limits, strict=True):
        row[: max(start, 0)] = row[max(end, start) :] = BEHIND
    shape = shape_of(keys, rows)
    arrays = (jnp.asarray(x, jnp.int32) for x in (ranks, *limits.T))
    got = np.asarray(select(*arrays, k=k, shape=shape))
    want = [oracle(row, a, b, k) for row, (a, b) in zip(ranks, limits, strict=True)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(bool(aot.available()), reason=aot.available())
@pytest.mark.parametrize("form", ["places", "list", "joined"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(4096, 8192), (4096, 16_384), (64, 32_768), (1024, 32_768), (1, 32_768), (1, 131_072)],
)
def test_compiles_for_sm90(rows, columns, form, monkeypatch):
    """Nothing is spilled."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, shape = jax.ShapeDtypeStruct, shape_of(columns, rows)
    row, ranks = spec((rows,), jnp.int32), spec((rows, columns), jnp.int32)
    given, ranked = {
        "places": ((row, row), False),
        "list": ((row, row, row), True),
        "joined": ((None, row, None, ranks), True),
    }[form]
    call = lambda *a: select(*a, k=2048, shape=shape, ranked=ranked)  # noqa: E731
    _, (report,) = aot.compile_sm90(call, ranks, *given)
    assert not report.spilled, report.log
