import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.errors import MetadataError
from mla_jax.metadata.packed import counts_and_rows, pack

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5)


@given(SHAPES)
def test_packed_arrays_come_back(shapes):
    rng = np.random.default_rng(0)
    dtypes = itertools.cycle([np.int32, np.float32, np.uint32])
    tree = {i: rng.integers(-9, 9, s).astype(next(dtypes)) for i, s in enumerate(shapes)}
    packed = pack(tree)
    assert packed.words.size == sum(x.size for x in tree.values())
    for found in (packed.unpack(), jax.jit(lambda p: p.unpack())(packed)):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, found, tree)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), found, tree)


def test_one_layout_is_one_program():
    unpack = jax.jit(lambda packed: packed.unpack())
    for i in range(3):
        found = unpack(pack((np.full(3, i, np.int32), np.int32(7 * i))))
        assert found[0].tolist() == [i] * 3 and int(found[1]) == 7 * i
    assert unpack._cache_size() == 1
    unpack(pack((np.zeros(4, np.int32), np.int32(0))))
    assert unpack._cache_size() == 2
    unpack(pack((np.zeros(4, np.int32), np.zeros((), np.int32))))  # a scalar is an array of no axes
    assert unpack._cache_size() == 2


def test_leaves_may_be_views():
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    found = pack((rows.T, rows[:, ::2], np.int32(7))).unpack()
    np.testing.assert_array_equal(found[0], rows.T)
    np.testing.assert_array_equal(found[1], rows[:, ::2])
    assert found[2] == 7


@pytest.mark.parametrize(
    "leaf, given",
    [
        (np.zeros(2, np.int64), "ndarray of int64"),
        (np.zeros(2, bool), "ndarray of bool"),
        (1, "int of no dtype"),
        (jnp.zeros(2, jnp.int32), "Array.* of int32"),
    ],
)
def test_only_host_arrays_of_words(leaf, given):
    for _ in range(2):
        with pytest.raises(MetadataError, match=f"{given}.*numpy array of int32"):
            pack((np.zeros(1, np.int32), leaf))


def test_counts_and_rows():
    counts, rows = counts_and_rows((7, 8, 9), [[1, 2, 3, 4], [5, 6]], 3, (0, 9))
    assert counts.tolist() == [7, 8, 9]
    assert rows.tolist() == [[[1, 2], [3, 4], [0, 9]], [[5, 6], [0, 9], [0, 9]]]
    assert counts.dtype == rows.dtype == np.int32
    assert counts_and_rows((), [[]], 0, (0, 9))[1].shape == (1, 0, 2)
    counts, rows = counts_and_rows((7,), [[], [5, 6]], 1, (0, 9))  # those before are as they were
    assert counts.tolist() == [7] and rows.tolist() == [[[0, 9]], [[5, 6]]]


def test_a_plan_longer_than_its_bucket():
    with pytest.raises(MetadataError, match="rows of a plan: given 2; allowed: at most 1"):
        counts_and_rows((0,), [[1, 2, 3, 4], []], 1, (0, 0))
