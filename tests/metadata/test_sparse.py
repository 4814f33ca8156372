"""Selected positions to slots: examples of the field and compaction."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.sparse import (
    build_c128a_topk_metadata,
    c128a_width,
    compact_indices,
    compressed_lens,
    compute_global_topk_indices_and_lens,
    convert_req_index_to_global_index,
)


def test_request_local_to_global():
    slots = convert_req_index_to_global_index(
        jnp.array([[7, 3], [5, 9]], jnp.int32),
        jnp.array([0, 1], jnp.int32),
        jnp.array([[4, -1, 0, 9], [7, 3, -1, -1]], jnp.int32),
        page=4,
    )
    assert slots.tolist() == [[12, -1, 28, -1], [39, 23, -1, -1]]
    front, counts = compact_indices(slots)
    assert front.tolist() == [[12, 28, -1, -1], [39, 23, -1, -1]]
    assert counts.tolist() == [2, 2]


@given(st.lists(st.lists(st.integers(-1, 9), min_size=6, max_size=6), min_size=3, max_size=3))
def test_compaction_keeps_order_and_number(rows):
    front, counts = compact_indices(jnp.array(rows, jnp.int32))
    for row, got, n in zip(rows, front.tolist(), counts.tolist(), strict=True):
        kept = [x for x in row if x >= 0]
        assert n == len(kept)
        assert got == kept + [-1] * (6 - n)


def test_c4a_lists():
    slots, lens = compute_global_topk_indices_and_lens(
        jnp.array([[7, 2, 0], [4, 9, 1]], jnp.int32),
        jnp.array([0, 1, 0], jnp.int32),
        jnp.array([[0, 3, -1, -1], [5, 1, 0, 2], [0, -1, -1, -1]], jnp.int32),
        jnp.array([True, True, False]),
        page=2,
    )
    assert slots.tolist() == [[14, 5, -1, -1], [3, 9, 8, 18], [14, -1, -1, -1]]
    assert lens.tolist() == [2, 4, 0]


def test_compressed_lens():
    p, valid = jnp.array([0, 2, 3, 7, 99, 7]), jnp.array([True] * 5 + [False])
    assert compressed_lens(p, valid, ratio=4, width=8).tolist() == [0, 0, 1, 2, 8, 0]


@pytest.mark.parametrize(
    ("p", "row"),
    [(126, []), (127, [12]), (128, [12]), (255, [12, 13]), (256, [12, 13]), (383, [12, 13, 6])],
)
def test_c128a_boundary(p, row):
    meta = build_c128a_topk_metadata(
        jnp.array([[6, 3]], jnp.int32),
        jnp.zeros((3,), jnp.int32),
        jnp.array([p, p, p], jnp.int32),
        jnp.array([1, -1, 2], jnp.int32),
        jnp.int32(2),
        decode_tokens=3,
        prefill_tokens=2,
        width=8,
        page=2,
    )
    assert meta.decode_global_indices[0].tolist() == row + [-1] * (8 - len(row))
    assert meta.decode_lens.tolist() == [len(row), 0, 0]
    local = [*range(len(row))] + [-1] * (8 - len(row))
    assert meta.prefill_local_indices.tolist() == [local, [-1] * 8]
    assert (np.asarray(meta.decode_global_indices[2]) == -1).all()


def test_c128a_width():
    widths = [c128a_width(n, 163840) for n in (0, 1000, 17000, 40000, 163840)]
    assert widths == [128, 128, 256, 512, 1280]
