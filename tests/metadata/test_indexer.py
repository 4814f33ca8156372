"""Indexer metadata: decode rows, compressed slots, splits, padding and compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.errors import ConfigError, MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import GroupSpec, build_common, slot_mapping
from mla_jax.metadata.compat.indexer import (
    get_max_prefill_buffer_size,
    use_flattening,
)
from mla_jax.metadata.indexer import build_decode_rows
from tests.metadata.sparse_batches import (
    LARGE,
    RX,
    SMALL,
    chunk,
    common,
    host,
    indexer,
    run,
    steps,
)


def decode_of(queries, lens, *, flatten, next_n, rows=12, ratio=1, decodes=None):
    starts = np.full(7, sum(queries), np.int32)
    starts[: len(queries) + 1] = np.concatenate([[0], np.cumsum(queries)])
    padded = np.zeros(6, np.int32)
    padded[: len(lens)] = lens
    group, table = GroupSpec("index_keys", 64), jnp.arange(1, 13, dtype=jnp.int32).reshape(6, 2)
    step = build_common(
        jnp.asarray(starts),
        jnp.asarray(padded),
        {group.name: table},
        jnp.int32(len(queries)),
        bucket=CommonBucket(requests=6, tokens=max(sum(queries), 1), pages=(2,)),
        groups=(group,),
    )
    return build_decode_rows(
        step,
        table,
        jnp.int32(len(queries) if decodes is None else decodes),
        rows=rows,
        decode_len=next_n,
        flatten=flatten,
        ratio=ratio,
    )


@pytest.mark.parametrize(
    ("queries", "lens", "next_n", "seq_lens", "padding"),
    [
        ([1, 1, 1], [5, 64, 65], 1, [[5], [64], [65]], False),
        ([1, 1, 0], [5, 64, 0], 1, [[5], [64], [0]], True),
        ([2, 2], [10, 7], 2, [[9, 10], [6, 7]], False),
        ([2, 2, 0], [10, 7, 0], 2, [[9, 10], [6, 7], [0, 0]], True),
        ([0, 0], [0, 0], 1, [[0], [0]], False),
    ],
)
def test_native_rows(queries, lens, next_n, seq_lens, padding):
    decode = decode_of(queries, lens, flatten=False, next_n=next_n, rows=4)
    n = len(queries)
    np.testing.assert_array_equal(decode.seq_lens[:n], seq_lens)
    assert decode.decode_lens.tolist() == queries + [0] * (4 - n)
    assert bool(decode.requires_padding) is padding
    assert not decode.seq_lens[n:].any()
    assert not decode.page_table[n:].any()
    flat = [t for row in decode.token_index.tolist() for t in row if t >= 0]
    assert flat == list(range(sum(queries)))


@pytest.mark.parametrize(
    ("queries", "lens", "want"),
    [
        ([4, 4], [10, 7], [7, 8, 9, 10, 4, 5, 6, 7]),
        ([3, 1, 4, 0], [10, 7, 12, 0], [8, 9, 10, 7, 9, 10, 11, 12]),
        ([1, 1], [5, 64], [5, 64]),
    ],
)
def test_flattened_rows(queries, lens, want):
    decode = decode_of(queries, lens, flatten=True, next_n=1)
    assert decode.seq_lens[:, 0].tolist() == want + [0] * (12 - len(want))
    assert decode.decode_lens.tolist() == [1] * 12
    assert not bool(decode.requires_padding)
    owner = np.repeat(np.arange(len(queries)), queries)
    np.testing.assert_array_equal(decode.page_table[: len(want), 0], 1 + 2 * owner)
    assert not decode.page_table[len(want) :].any()


@pytest.mark.parametrize(
    ("queries", "lens", "flatten", "next_n", "want"),
    [
        ([1, 1, 1], [8, 9, 3], False, 1, [[2], [2], [0]]),
        ([2, 2], [10, 8], False, 2, [[2, 2], [1, 2]]),
        ([3, 1, 4], [10, 7, 12], True, 1, [[2], [2], [2], [1], [2], [2], [2], [3]]),
    ],
)
def test_compressed_lengths_have_their_own_floor(queries, lens, flatten, next_n, want):
    decode = decode_of(queries, lens, flatten=flatten, next_n=next_n, ratio=4)
    np.testing.assert_array_equal(decode.seq_lens[: len(want)], want)


def counts(meta):
    names = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    return tuple(int(getattr(meta, n)) for n in names)


def built(queries, lens, *, bucket=SMALL, table=None, **settings):
    builder = indexer(**settings)
    decision = builder.decide(host(queries, lens))
    step = common(queries, lens, table, bucket=bucket, group=builder.group)
    return run(builder, step, decision)


def test_golden_padded_example():
    meta = built(RX["query_lens"], RX["seq_lens"], table=RX["table"])
    assert counts(meta) == (2, 2, 2, 5)
    assert meta.seq_lens.tolist() == [5, 9, 5, 6, 0, 0]
    assert meta.slot_mapping[:8].tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    assert meta.decode.seq_lens[:4].tolist() == [[5], [9], [0], [0]]
    assert meta.decode.decode_lens[:4].tolist() == [1, 1, 0, 0]
    assert meta.decode.page_table[:3, :2].tolist() == [[7, 3], [5, 9], [0, 0]]
    rows = meta.decode.seq_lens.shape[0]
    want = [(0, 0), (1, 0), (rows, 0), (rows, 0), (rows, 0)]
    np.testing.assert_array_equal(meta.schedule_metadata, want)
    c = chunk(meta.prefill, 0)
    assert c.cu_seqlen_ks[:8].tolist() == [0, 0, 0, 5, 5, 0, 0, 0]
    assert c.cu_seqlen_ke[:8].tolist() == [3, 4, 5, 10, 11, 0, 0, 0]
    assert c.cu_seq_lens[:5].tolist() == [0, 5, 11, 11, 11]
    assert c.token_to_seq[:12].tolist() == [0] * 5 + [1] * 6 + [6]
    assert (int(c.token_start), int(c.token_end)) == (2, 7)
    assert (int(c.num_reqs), int(c.total_seq_lens)) == (2, 11)


@pytest.mark.parametrize(
    ("queries", "lens", "next_n", "flatten", "want"),
    [
        ([], [], 1, False, (0, 0, 0, 0)),
        ([1, 1, 1], [3, 3, 3], 1, False, (3, 0, 3, 0)),
        ([3, 2], [5, 6], 1, False, (0, 2, 0, 5)),
        ([1, 1], [9, 1], 1, False, (2, 0, 2, 0)),
        ([2], [2], 1, False, (0, 1, 0, 2)),
        ([2], [2], 2, False, (1, 0, 2, 0)),
        ([2, 2, 1], [10, 7, 4], 2, False, (2, 1, 4, 1)),
        ([2, 2, 1], [10, 7, 4], 3, True, (3, 0, 5, 0)),
        ([1, 5, 1, 3], [9, 5, 4, 3], 1, False, (1, 3, 1, 9)),
    ],
)
def test_split(queries, lens, next_n, flatten, want):
    meta = built(queries, lens, next_n=next_n, use_flattening=flatten)
    assert counts(meta) == want
    assert (meta.decode is None) == (want[0] == 0)
    assert (meta.prefill is None) == (want[1] == 0)


def test_ragged_native_leaves_the_odd_one_to_a_chunk():
    meta = built([2, 2, 1], [10, 7, 4], next_n=2)
    c = chunk(meta.prefill, 0)
    assert (int(c.token_start), int(c.token_end)) == (4, 5)
    assert (int(c.cu_seqlen_ks[0]), int(c.cu_seqlen_ke[0])) == (0, 4)


COMPRESSED = [
    ([0, 1, 2, 8], [8, 9, 10], [[3, 0], [4, 0], [6, 2]], 2, 4, [7, -1, -1, -1, -1, 13, -1, -1]),
    ([0, 6], [518], [[5, 7, 9]], 64, 4, [-1, -1, -1, 576, -1, -1]),
    ([0, 4], [4], [[3, 8]], 1, 4, [-1, -1, -1, 3]),
    ([0, 3], [256], [[3, 8]], 2, 128, [-1, -1, 7]),
    ([0, 1, 2], [4, 0], [[3], [0]], 2, 4, [6, -1]),  # the second is a dummy row
    ([0, 6], [2], [[3]], 2, 4, [-1] * 6),  # positions -4 to 1
    ([0, 3], [5], [[3]], 1, 1, [-1, -1, -1]),  # beyond the table
    ([0, 3], [5], [[4, 9]], 1, 4, [-1, 4, -1]),  # p = 2, 3, 4
]


@pytest.mark.parametrize(("starts", "lens", "table", "page", "ratio", "want"), COMPRESSED)
def test_compressed_slots(starts, lens, table, page, ratio, want):
    starts, lens = np.array(starts, np.int32), np.array(lens, np.int32)
    queries = np.diff(starts)
    request = np.repeat(np.arange(len(lens)), queries)
    positions = np.arange(starts[-1]) - starts[request] + (lens - queries)[request]
    pad = [(0, 2)]
    got = slot_mapping(
        jnp.array(table, jnp.int32),
        jnp.asarray(np.pad(request, pad).astype(np.int32)),
        jnp.asarray(np.pad(positions, pad).astype(np.int32)),
        jnp.asarray(np.pad(np.ones(len(request), bool), pad)),
        page=page,
        ratio=ratio,
    )
    assert got.tolist() == [*want, -1, -1]


def test_compressed_build_pads_what_has_no_slot():
    builder = indexer(compress_ratio=4, page=1)
    meta = built([8], [8], table=[[3, 8]], compress_ratio=4, page=1)
    assert builder.group.tokens == 4
    assert meta.slot_mapping.tolist() == [-1, -1, -1, 3, -1, -1, -1, 8] + [-1] * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 0}, "page of index_keys: given 0; allowed: 1 or more"),
        ({"num_sms": 0}, "num_sms: given 0"),
        ({"next_n": 0}, "next_n: given 0"),
        ({"compress_ratio": -4}, "ratio of index_keys: given -4"),
        ({"remainder": "x"}, "remainder: given 'x'"),
        ({"max_prefill_buffer_size": 0}, "max_prefill_buffer_size: given 0"),
        ({"max_logits_bytes": 3}, "float32 logits of a chunk: given 0"),
    ],
)
def test_settings_that_no_step_can_have(changes, message):
    """Defect 17: each of these was accepted and gave wrong plans."""
    with pytest.raises((ConfigError, MetadataError), match=message):
        indexer(**changes)


def test_flattening_table():
    assert [use_flattening(next_n=n, sm100=False) for n in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert not any(use_flattening(next_n=n, sm100=True) for n in range(1, 6))
    assert use_flattening(next_n=3, sm100=True, fp4_cache=True)
    with pytest.raises(ConfigError, match="sm100"):
        use_flattening(next_n=1, sm100=False, fp4_cache=True)


def test_prefill_buffer():
    assert get_max_prefill_buffer_size(163840) == 6553600
    assert get_max_prefill_buffer_size(1 << 20, factor=2, ratio=4) == 8 * 2 * (1 << 20) // 4
    with pytest.raises(ConfigError, match="at least 2"):
        get_max_prefill_buffer_size(10, factor=1)


def test_too_many_keys_name_the_rung():
    with pytest.raises(MetadataError, match="keys of a chunk: given 90; allowed: 0 to 64"):
        indexer().decide(host([3], [90]))


def valid_lanes(meta, queries, lens):
    """Every entry of the step that means something, as numpy."""
    tokens, n = sum(queries), len(queries)
    out = {"counts": counts(meta), "slots": meta.slot_mapping[:tokens], "lens": meta.seq_lens[:n]}
    if meta.decode is not None:
        d = meta.decode
        rows = int(meta.num_decodes)
        if d.token_index.shape[1] == 1 and rows != int(meta.num_decode_tokens):
            rows = int(meta.num_decode_tokens)
        owner = np.searchsorted(np.cumsum(queries), d.token_index[:rows, 0], side="right")
        used = -(-np.asarray(lens)[owner] // 4)
        pages = np.arange(d.page_table.shape[1]) < used[:, None]
        schedule = np.asarray(meta.schedule_metadata)
        past = (schedule == (d.seq_lens.shape[0], 0)).all(axis=1, keepdims=True)
        schedule = np.where(past, -1, schedule)
        out |= {
            "decode": d.seq_lens[:rows],
            "lens_of_rows": d.decode_lens[:rows],
            "tokens": d.token_index[:rows],
            "pages": np.where(pages, d.page_table[:rows], 0),
            "schedule": schedule,
        }
    for i in range(int(meta.prefill.num_chunks) if meta.prefill is not None else 0):
        c = chunk(meta.prefill, i)
        rows, keys = int(c.token_end - c.token_start), int(c.total_seq_lens)
        fields = (c.cu_seqlen_ks[:rows], c.cu_seqlen_ke[:rows], c.token_to_seq[:keys])
        out |= {f"chunk{i}.{j}": x for j, x in enumerate(fields)}
        out[f"chunk{i}"] = (c.cu_seq_lens[: int(c.num_reqs) + 1], int(c.token_start), keys)
    return out


def assert_same(a, b):
    assert a.keys() == b.keys()
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data(), st.sampled_from([(1, False), (2, True)]))
def test_a_larger_bucket_and_junk_change_nothing(data, form):
    next_n, flatten = form
    queries, lens = data.draw(steps(next_n=next_n))
    found = []
    for scale, bucket in ((1, SMALL), (2, LARGE)):
        builder = indexer(scale, next_n=next_n, use_flattening=flatten, max_logits_bytes=240)
        step = common(queries, lens, bucket=bucket, group=builder.group, junk=scale > 1)
        meta = run(builder, step, builder.decide(host(queries, lens)))
        found.append(valid_lanes(meta, queries, lens))
        assert (meta.slot_mapping[sum(queries) :] == -1).all()
        if meta.decode is not None:
            assert not meta.decode.seq_lens[int(meta.num_decode_tokens) :].any()
            assert not meta.decode.page_table[int(meta.num_decode_tokens) :].any()
            assert (meta.decode.token_index[int(meta.num_decode_tokens) :] == -1).all()
    assert_same(*found)


def test_one_program_per_bucket_and_no_host_sync():
    traces = []
    builder = indexer(next_n=2)

    @jax.jit
    def build(step, decision):
        traces.append(decision.bucket)
        return builder.build(step, decision)

    rng = np.random.default_rng(0)
    rungs = set()
    for _ in range(1000):
        decodes, prefills = rng.integers(0, 4), rng.integers(0, 3)
        queries = [*[int(rng.integers(1, 3))] * decodes, *rng.integers(3, 5, prefills).tolist()]
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
