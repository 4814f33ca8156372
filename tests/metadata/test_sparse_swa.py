"""Sliding-window metadata: windows, tails, workspace chunks, combined rows, plans, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mla_jax.errors import ConfigError, MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.sparse import combine_topk_swa_indices
from mla_jax.metadata.window import (
    compute_prefill_gather_lens,
    layer_type,
    plan_window_chunks,
    sliding_window_indices,
)
from tests.metadata.sparse_batches import LARGE, RX, SMALL, common, host, run, steps, swa
from tests.metadata.test_indexer import counts


def built(queries, lens, *, bucket=SMALL, table=None, junk=False, scale=1, **settings):
    builder = swa(scale, **settings)
    decision = builder.decide(host(queries, lens))
    step = common(queries, lens, table, bucket=bucket, junk=junk, group=builder.group)
    return run(builder, step, decision)


def test_golden_padded_example():
    meta = built(RX["query_lens"], RX["seq_lens"], table=RX["table"])
    assert counts(meta) == (2, 2, 2, 5)
    assert meta.is_valid_token[:8].tolist() == [True] * 7 + [False]
    assert meta.token_to_req_indices[:8].tolist() == [0, 1, 2, 2, 2, 3, 3, 0]
    want = [[29, 30, 31, 12], [37, 38, 39, 8], [-1] * 4, [-1] * 4]
    assert meta.decode_swa_indices[:4, 0].tolist() == want
    assert meta.decode_swa_lens[:4].tolist() == [4, 4, 0, 0]
    assert meta.prefill_seq_lens[:4].tolist() == [5, 6, 0, 0]
    assert meta.prefill_gather_lens[:4].tolist() == [5, 5, 0, 0]
    rows = [
        [32, 33, 34, -1],
        [32, 33, 34, 35],
        [33, 34, 35, 16],
        [25, 26, 27, 4],
        [26, 27, 4, 5],
    ]
    assert meta.prefill_swa_indices[:5].tolist() == rows
    assert meta.prefill_swa_lens[:6].tolist() == [3, 4, 4, 4, 4, 0]


def test_a_token_without_a_slot_sees_nothing():
    """Its position is behind its page table, so it was never written."""
    one = CommonBucket(requests=6, tokens=16, pages=(1,))
    meta = built([1, 1], [6, 4], bucket=one, table=[[7], [5]])
    assert meta.is_valid_token[:2].tolist() == [False, True]
    assert meta.decode_swa_lens[:2].tolist() == [0, 4]
    assert meta.decode_swa_indices[:2, 0].tolist() == [[-1] * 4, [20, 21, 22, 23]]


def window_of(row, length, *, page, window):
    return sliding_window_indices(
        jnp.array([row], jnp.int32),
        jnp.zeros((1,), jnp.int32),
        jnp.array([length - 1], jnp.int32),
        jnp.ones((1,), bool),
        window=window,
        page=page,
    )


@pytest.mark.parametrize(
    ("length", "want"),
    [(4, [20, 21, 22, 23]), (5, [21, 22, 23, 8]), (1, [20, -1, -1, -1]), (0, [-1] * 4)],
)
def test_window_boundary(length, want):
    indices, lens = window_of([5, 2], length, page=4, window=4)
    assert indices[0].tolist() == want
    assert int(lens[0]) == min(length, 4)


def test_window_across_pages():
    indices, _ = window_of([5, 9, 2], 129, page=64, window=128)
    assert indices[0].tolist() == [*range(321, 384), *range(576, 640), 128]
    indices, lens = window_of([5, 9], 64, page=64, window=128)
    assert indices[0].tolist() == [*range(320, 384), *[-1] * 64]
    assert int(lens[0]) == 64


@pytest.mark.parametrize(
    ("queries", "lens", "window", "want"),
    [
        ([3, 5, 4], [3, 7, 200], 128, [3, 7, 131]),
        ([3, 5, 4], [3, 7, 200], 4, [3, 7, 7]),
        ([4], [4], 4, [4]),
        ([4], [5], 1, [4]),
        ([4, 4, 4], [10, 4, 9], 4, [7, 4, 7]),
        ([3, 2], [5, 6], 4, [5, 5]),
        ([6], [2], 4, [6]),  # a dummy row: nothing cached
    ],
)
def test_gather_lens(queries, lens, window, want):
    queries, lens = np.array(queries, np.int32), np.array(lens, np.int32)
    assert compute_prefill_gather_lens(queries, lens, window=window).tolist() == want


@pytest.mark.parametrize(
    ("queries", "lens", "ratio", "requests", "want"),
    [
        ([8, 8, 4], [16, 8, 4], 4, 2, [(0, 2, 4, 15), (2, 3, 1, 5)]),
        ([8, 8, 4], [16, 8, 4], 1, 2, [(0, 2, 0, 11), (2, 3, 0, 4)]),
        ([], [], 4, 2, []),
    ],
)
def test_workspace_chunks(queries, lens, ratio, requests, want):
    found = plan_window_chunks(
        np.array(queries, np.int32),
        np.array(lens, np.int32),
        ratio=ratio,
        window=4,
        chunk_requests=requests,
        max_model_len=32,
        max_batched_tokens=8,
    )
    assert found == want


@example([(1, 24)] * 4 + [(4, 24)], 1, 2)  # four fit exactly
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 2, 24])), max_size=12),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)
def test_workspace_chunks_are_greedy(requests, ratio, most):
    """As long as the largest states and the largest tail of a chunk fit for all its requests."""
    queries = np.array([q for q, _ in requests], np.int32)
    lens = queries + np.array([c for _, c in requests], np.int32)
    limits = dict(window=4, chunk_requests=most, max_model_len=16, max_batched_tokens=4)
    states = lens // ratio * (ratio > 1)
    tails = compute_prefill_gather_lens(queries, lens, window=4)
    workspace = most * ((16 // ratio if ratio > 1 else 0) + 4 + 4)
    want, start = [], 0
    for stop in range(1, len(requests) + 1):
        more = slice(start, stop + 1)
        larger = (stop + 1 - start) * (max(states[more]) + max(tails[more])) > workspace
        if stop == len(requests) or larger:
            of = max(states[start:stop])
            want.append((start, stop, of, of + max(tails[start:stop])))
            start = stop
    assert plan_window_chunks(queries, lens, ratio=ratio, **limits) == want


def test_workspace_chunk_of_the_worked_example():
    found = plan_window_chunks(
        np.full(5, 4, np.int32),
        np.array([80, 96, 112, 128, 144], np.int32),
        ratio=4,
        window=64,
        chunk_requests=4,
        max_model_len=4096,
        max_batched_tokens=64,
    )
    assert found == [(0, 5, 36, 103)]


@pytest.mark.parametrize(
    ("topk", "shape", "rows"),
    [
        (
            2,
            (6, 1),
            [[1, 2, 3], [0, 1, 2, 3, 4], [0, 2, 3, 4, 5], [6, 7, 8, 9, 10], [6, 8, 9, 10, 11]],
        ),
        (0, (5, 0), [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8], [6, 7, 8, 9]]),
    ],
)
def test_combined_rows(topk, shape, rows):
    indices, lens = combine_topk_swa_indices(
        jnp.zeros((7, max(topk, 1)), jnp.int32),
        jnp.array([2, 5, 7, 7], jnp.int32),
        jnp.array([5, 6, 0], jnp.int32),
        jnp.array([5, 5, 0], jnp.int32),
        jnp.int32(shape[0]),
        jnp.int32(shape[1]),
        topk=topk,
        ratio=4,
        window=4,
    )
    assert indices.shape == (7, 128)
    for got, want in zip(indices.tolist(), [*rows, [], []], strict=True):
        assert got == want + [-1] * (128 - len(want))
    assert lens.tolist() == [*map(len, rows), 0, 0]


def test_split_is_not_the_indexers():
    assert counts(built([2, 2, 1], [10, 7, 4], next_n=2)) == (3, 0, 5, 0)


def test_empty_step():
    meta = built([], [])
    assert counts(meta) == (0, 0, 0, 0)
    assert meta.decode_swa_indices.shape[0] == 0
    assert meta.prefill_seq_lens is meta.prefill_gather_lens is meta.tile_sched_c4a is None


def test_requests_without_tokens_are_no_prefills():
    decision = swa().decide(host([0, 0], [5, 9]))
    assert decision.counts.tolist() == [2, 0, 0, 0, 0, 0, 0]
    assert decision.bucket.prefills == decision.bucket.chunks == 0


def test_all_prefill_has_no_plans():
    meta = built([3, 2], [5, 6])
    assert meta.tile_sched_swaonly is meta.tile_sched_c4a is meta.tile_sched_c128a is None
    assert meta.decode_swa_indices.shape == (0, 1, 4)
    chunks, count = meta.chunks_of("c4a")
    assert int(count) == 1
    assert chunks[0].tolist() == [0, 2, 1, 6]
    assert not chunks[1:].any()


def test_one_plan_per_layer_type():
    meta = built([1, 1], [5, 9], compress_ratios=(0, 4, 4))
    assert meta.tile_sched_c128a is None
    assert meta.tile_sched_swaonly.num_splits[:3].tolist() == [0, 1, 2]
    assert meta.tile_sched_c4a is not None
    lean = built([1, 1], [5, 9], compress_ratios=(), num_sms=2, plan_padding=False)
    assert lean.tile_sched_c4a is None
    rows = lean.tile_sched_swaonly.tile_scheduler_metadata[:, :7].tolist()
    assert rows == [[0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]


def test_layer_types():
    assert [layer_type(r) for r in (0, 1, 4, 128)] == ["swaonly", "swaonly", "c4a", "c128a"]
    with pytest.raises(ConfigError, match="0, 1, 4 or 128"):
        swa(compress_ratios=(4, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -4}, "window: given -4; allowed: 1 or more"),
        ({"page": 0}, "page of window: given 0"),
        ({"num_sms": 0}, "num_sms: given 0"),
        ({"heads": 0}, "heads: given 0"),
        ({"next_n": 0}, "next_n: given 0"),
        ({"chunk_requests": 0}, "chunk_requests: given 0"),
        ({"compress_ratios": (-4,)}, "compress_ratio of a layer: given -4"),
    ],
)
def test_settings_that_no_step_can_have(changes, message):
    """Defect 17: each of these was accepted and gave wrong plans."""
    with pytest.raises((ConfigError, MetadataError), match=message):
        swa(**changes)


def valid_lanes(meta, queries):
    tokens, decodes = sum(queries), int(meta.num_decode_tokens)
    prefills, rest = int(meta.num_prefills), int(meta.num_prefill_tokens)
    out = {
        "counts": counts(meta),
        "valid": meta.is_valid_token[:tokens],
        "request": meta.token_to_req_indices[:tokens],
        "decode": (meta.decode_swa_indices[:decodes], meta.decode_swa_lens[:decodes]),
        "prefill": (meta.prefill_swa_indices[:rest], meta.prefill_swa_lens[:rest]),
    }
    if prefills:
        out["lens"] = (meta.prefill_seq_lens[:prefills], meta.prefill_gather_lens[:prefills])
        for name in meta.layer_types:
            chunks, n = meta.chunks_of(name)
            out[name] = chunks[: int(n)]
    if decodes:
        for name in ("swaonly", "c4a", "c128a"):
            plan = getattr(meta, f"tile_sched_{name}")
            batch = plan.num_splits.size - 1
            table = np.asarray(plan.tile_scheduler_metadata)
            idle = table[:, :1] >= batch
            out[f"plan_{name}"] = (np.where(idle, -1, table), plan.num_splits[: decodes + 1])
    return out


@pytest.mark.slow
@settings(max_examples=15)
@given(steps(next_n=2))
def test_a_larger_bucket_and_junk_change_nothing(step):
    queries, lens = step
    found = []
    for scale, bucket in ((1, SMALL), (2, LARGE)):
        meta = built(
            queries,
            lens,
            bucket=bucket,
            junk=scale > 1,
            scale=scale,
            next_n=2,
            plan_padding=False,
        )
        found.append(valid_lanes(meta, queries))
        decodes, rest = int(meta.num_decode_tokens), int(meta.num_prefill_tokens)
        assert not meta.is_valid_token[sum(queries) :].any()
        assert not meta.token_to_req_indices[sum(queries) :].any()
        assert (meta.decode_swa_indices[decodes:] == -1).all()
        assert not meta.decode_swa_lens[decodes:].any()
        assert (meta.prefill_swa_indices[rest:] == -1).all()
        assert not meta.prefill_swa_lens[rest:].any()
        if meta.prefill_seq_lens is not None:
            assert not meta.prefill_seq_lens[int(meta.num_prefills) :].any()
            assert not meta.prefill_gather_lens[int(meta.num_prefills) :].any()
    assert found[0].keys() == found[1].keys()
    jax.tree.map(np.testing.assert_array_equal, *found)


@settings(max_examples=10)
@given(steps(next_n=2))
def test_windows_of_a_prefill_are_its_gathered_tail(step):
    queries, lens = step
    meta = built(queries, lens, next_n=2, plan_padding=False)
    first = 0
    for i in range(int(meta.num_prefills)):
        row = int(meta.num_decodes) + i
        stop = first + queries[row]
        seen = set(np.asarray(meta.prefill_swa_indices[first:stop]).ravel().tolist()) - {-1}
        tail = range(lens[row] - int(meta.prefill_gather_lens[i]), lens[row])
        table = np.asarray(meta.block_table[row])
        assert seen == {int(table[p // 4]) * 4 + p % 4 for p in tail}
        first = stop


def test_one_program_per_bucket_and_no_host_sync():
    traces = []
    builder = swa(next_n=2)

    @jax.jit
    def build(step, decision):
        traces.append(decision.bucket)
        return builder.build(step, decision)

    rng = np.random.default_rng(0)
    rungs = set()
    for _ in range(1000):
        queries = [
            *rng.integers(1, 3, rng.integers(0, 4)).tolist(),
            *rng.integers(3, 5, rng.integers(0, 3)).tolist(),
        ]
        lens = [int(q + rng.integers(0, 20)) for q in queries]
        decision = builder.decide(host(queries, lens))
        rungs.add(decision.bucket)
        build(common(queries, lens, bucket=SMALL, group=builder.group), decision)
    assert len(traces) == len(set(traces)) == len(rungs)
    jaxpr = jax.make_jaxpr(builder.build)(
        step := common([2], [9], bucket=SMALL, group=builder.group), decision
    )
    assert "callback" not in str(jaxpr)
    warm = build(step, builder.warmup_decision(decision))
    assert len(traces) == len(rungs)
    assert counts(warm) == (0, 0, 0, 0)
