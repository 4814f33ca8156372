"""Prefill chunks of the indexer: the packing and one chunk's arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.common import GroupSpec, HostBatch
from mla_jax.metadata.compat.indexer import plan_indexer_chunks, split_indexer_prefill_chunks
from mla_jax.metadata.indexer import Indexer
from mla_jax.metadata.indexer_chunks import indexer_chunks, most_chunks, with_keys
from tests.metadata.sparse_batches import LARGE, RX, SMALL, chunk, common, host, indexer, run

INF = 1 << 60


def pieces(keys, queries, workspace, max_logits, offset=0):
    found = split_indexer_prefill_chunks(
        np.array(keys, np.int32),
        np.array(queries, np.int32),
        workspace=workspace,
        max_logits=max_logits,
        offset=offset,
    )
    return [(*requests, *rows) for requests, rows in found]


@pytest.mark.parametrize(
    ("keys", "queries", "workspace", "max_logits", "want"),
    [
        ([10, 15, 20, 5], [10, 15, 20, 5], 30, INF, [(0, 2, 0, 25), (2, 4, 0, 25)]),
        ([8, 8], [4, 4], 100, 64, [(0, 1, 0, 4), (1, 2, 0, 4)]),
        ([8, 8], [4, 4], 100, 128, [(0, 2, 0, 8)]),
        ([10], [8], 100, 35, [(0, 1, 0, 3), (0, 1, 3, 6), (0, 1, 6, 8)]),
        ([1000], [3], 10000, 100, [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 3)]),
        (
            [100, 100],
            [50, 50],
            1000,
            3000,
            [(0, 1, 0, 30), (0, 1, 30, 50), (1, 2, 0, 30), (1, 2, 30, 50)],
        ),
        ([300, 50], [2, 2], 200, INF, [(0, 1, 0, 2), (1, 2, 0, 2)]),
        ([0, 5], [3, 2], 100, 1000, [(0, 2, 0, 5)]),
        ([0, 0], [2, 1], 100, 1000, [(0, 2, 0, 3)]),
        ([0], [0], 100, 1000, []),
        ([], [], 100, 1000, []),
        ([65536], [2048], INF, 2**27, [(0, 1, 0, 2048)]),
        ([65536], [2049], INF, 2**27, [(0, 1, 0, 2048), (0, 1, 2048, 2049)]),
    ],
)
def test_pieces(keys, queries, workspace, max_logits, want):
    assert pieces(keys, queries, workspace, max_logits) == want


def test_offset_and_long_request():
    assert pieces([10, 15, 20, 5], [10, 15, 20, 5], 30, INF, 2) == [(2, 4, 0, 25), (4, 6, 0, 25)]
    long = pieces([163840], [8192], INF, 2**27)
    assert len(long) == 11
    assert {b - a for *_, a, b in long[:-1]} == {819}
    assert long[-1][2:] == (8190, 8192)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8),
    st.integers(1, 60),
    st.integers(1, 300),
)
def test_every_query_once_within_limits(requests, workspace, max_logits):
    keys, queries = [k for k, _ in requests], [q for _, q in requests]
    found = pieces(keys, queries, workspace, max_logits)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(int)
    rows = [t for a, _, u, v in found for t in range(starts[a] + u, starts[a] + v)]
    assert rows == list(range(sum(queries)))
    for a, e, u, v in found:
        n = sum(keys[a:e])
        assert n <= workspace or e == a + 1
        assert n * (v - u) <= max_logits or v == u + 1


def test_plan_drops_chunks_without_keys():
    lens, queries = np.array([0, 0, 9], np.int32), np.array([2, 1, 2], np.int32)
    (only,) = plan_indexer_chunks(lens[:2], queries[:2], workspace=9, max_logits=99) or [None]
    assert only is None
    whole = plan_indexer_chunks(lens, queries, workspace=8, max_logits=99)
    assert [c[:2] for c in whole] == [(2, 3)]


def test_a_step_plans_no_chunk_without_keys():
    """Of compressed keys: two short prompts gather none, and one of nine tokens has two."""
    step = HostBatch.of(np.array([1, 2, 3, 2]), np.array([50, 2, 3, 9]))
    keys = Indexer(group=GroupSpec("index_keys", 4, ratio=4))
    assert keys.chunks(step, 1, workspace=2) == [1, 4, 0, 7, 2, 0]
    assert keys.chunks(step, 1, workspace=1) == [3, 4, 0, 2, 2, 0]
    assert keys.chunks(step, 4, workspace=1) == []


def prefill_of(queries, lens, table=None, bounds=None, **settings):
    builder = indexer(**settings)
    decision = builder.decide(host(queries, bounds or lens))
    return run(
        builder, common(queries, lens, table, bucket=SMALL, group=builder.group), decision
    ).prefill


def arrays(prefill, i=0):
    c = chunk(prefill, i)
    requests, rows = int(c.num_reqs), int(c.token_end - c.token_start)
    return {
        "ks": c.cu_seqlen_ks[:rows].tolist(),
        "ke": c.cu_seqlen_ke[:rows].tolist(),
        "cu": c.cu_seq_lens[: requests + 1].tolist(),
        "seq": c.token_to_seq[: int(c.total_seq_lens)].tolist(),
        "tokens": (int(c.token_start), int(c.token_end)),
        "skip": bool(c.skip_kv_gather),
    }


@pytest.mark.parametrize(
    ("queries", "lens", "ratio", "want"),
    [
        (
            [1, 3, 2],
            [9, 5, 6],
            1,
            {
                "ks": [0, 0, 0, 5, 5],
                "ke": [3, 4, 5, 10, 11],
                "cu": [0, 5, 11],
                "seq": [0] * 5 + [1] * 6,
                "tokens": (1, 6),
                "skip": False,
            },
        ),
        (
            RX["query_lens"],
            RX["seq_lens"],
            4,
            {
                "ks": [0, 0, 0, 1, 1],
                "ke": [0, 1, 1, 2, 2],
                "cu": [0, 1, 2],
                "seq": [0, 1],
                "tokens": (2, 7),
                "skip": False,
            },
        ),
        (
            [6, 3],
            [10, 3],
            4,
            {
                "ks": [0] * 6 + [2] * 3,
                "ke": [1, 1, 1, 2, 2, 2, 2, 2, 2],
                "cu": [0, 2, 2],
                "seq": [0, 0],
                "tokens": (0, 9),
                "skip": False,
            },
        ),
    ],
)
def test_chunk_arrays(queries, lens, ratio, want):
    assert arrays(prefill_of(queries, lens, compress_ratio=ratio)) == want


def test_query_slices_skip_the_gather():
    prefill = prefill_of([2, 5], [20, 6], max_logits_bytes=4 * 12)
    assert int(prefill.num_chunks) >= 2
    first, last = arrays(prefill, 0), arrays(prefill, int(prefill.num_chunks) - 1)
    assert not first["skip"]
    assert last["skip"]
    assert last["ke"][-1] - last["ks"][-1] == 6


def test_all_below_the_ratio_gives_no_chunk():
    prefill = prefill_of([3, 2], [3, 3], compress_ratio=4)
    assert int(prefill.num_chunks) == 0
    nothing = chunk(prefill, 0)
    assert int(nothing.num_reqs) == int(nothing.total_seq_lens) == 0
    assert bool(nothing.skip_kv_gather)
    assert (int(nothing.token_start), int(nothing.token_end)) == (0, 0)
    assert not nothing.cu_seqlen_ke.any()


def test_bounds_above_the_truth():
    exact = prefill_of([3, 2], [5, 6])
    loose = prefill_of([3, 2], [5, 6], bounds=[5, 8])
    a, b = arrays(exact), arrays(loose)
    sentinel = loose.bucket.chunk_requests
    assert b.pop("seq") == [*a.pop("seq"), sentinel, sentinel]
    assert a == b
    assert int(chunk(loose, 0).total_seq_lens) == 13


@pytest.mark.parametrize("ratio", [1, 4])
def test_visible_keys_add_up(ratio):
    queries, lens = [1, 5, 4, 3], [7, 21, 4, 11]
    prefill = prefill_of(queries, lens, compress_ratio=ratio, max_logits_bytes=4 * 60)
    seen = 0
    for i in range(int(prefill.num_chunks)):
        found = arrays(prefill, i)
        seen += sum(found["ke"]) - sum(found["ks"])
    want = [
        (p + 1) // ratio
        for q, n in zip(queries[1:], lens[1:], strict=True)
        for p in range(n - q, n)
    ]
    assert seen == sum(want)


def test_padding_lanes():
    builder = indexer(scale=2)
    step = common(
        RX["query_lens"], RX["seq_lens"], RX["table"], bucket=LARGE, group=builder.group, junk=True
    )
    meta = run(builder, step, builder.decide(host(RX["query_lens"], RX["seq_lens"])))
    c = chunk(meta.prefill, 0)
    assert not c.page_table[2:].any()
    assert not c.cu_seqlen_ks[5:].any()
    assert not c.cu_seqlen_ke[5:].any()
    assert c.cu_seq_lens.tolist() == [0, 5] + [11] * (c.cu_seq_lens.size - 2)
    assert set(c.token_to_seq[11:].tolist()) == {c.page_table.shape[0]}


@given(st.data())
def test_no_plan_has_more_chunks_than_its_bucket(data):
    """``most_chunks`` of a step's sizes bounds every plan of such a step."""
    requests, queries = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    longest, max_logits = (
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from([1, 50, 200, 9999])),
    )
    workspace = data.draw(st.integers(longest, 3 * longest))
    sizes = {"requests": requests, "queries": queries, "keys": workspace}
    most = most_chunks(**sizes, max_logits=max_logits)
    cuts = sorted(data.draw(st.sets(st.integers(1, queries), max_size=requests - 1)) | {queries})
    rows = [b - a for a, b in zip((0, *cuts), cuts, strict=False) if b > a]
    keys = [data.draw(st.integers(0, longest)) for _ in rows]
    found = indexer_chunks(keys, rows, workspace=workspace, max_logits=max_logits, offset=0)
    assert len(with_keys(found)) <= 6 * most


@pytest.mark.parametrize(
    ("keys", "rows", "max_logits", "count"),
    [([40] * 4, [2] * 4, 9999, 4), ([40], [9], 80, 5), ([40] * 2, [9, 1], 80, 6)],
)
def test_the_bound_is_reached_or_nearly(keys, rows, max_logits, count):
    """A chunk for each request that fills the workspace, more for those with many logits."""
    found = indexer_chunks(keys, rows, workspace=40, max_logits=max_logits, offset=0)
    sizes = {"requests": len(keys), "queries": sum(rows), "keys": 40}
    assert len(found) == 6 * count
    assert count <= most_chunks(**sizes, max_logits=max_logits) <= count + 2
