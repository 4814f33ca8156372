"""Common attention metadata: examples, padding rules, context parallelism, tracing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.errors import MetadataError
from mla_jax.metadata import common
from mla_jax.metadata.buckets import CommonBucket, Ladder, powers_of_two
from mla_jax.metadata.check import check
from mla_jax.metadata.common import (
    CommonAttentionHost,
    build_common,
    exclusive_sum,
    slot_mapping,
    token_to_request,
)
from mla_jax.metadata.context_parallel import ContextShard, dcp_local_seq_lens
from tests.metadata.batches import LARGE, RX, SMALL, batches, build, make

sharded_slots = jax.jit(slot_mapping, static_argnames=("page", "shard"))


def test_padded_example():
    c = RX.common(CommonBucket(requests=6, tokens=8, pages=4))
    assert c.query_start_loc.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert c.seq_lens.tolist() == [5, 9, 5, 6, 0, 0]
    assert c.slot_mapping.tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    assert c.positions.tolist() == [4, 8, 2, 3, 4, 4, 5, 0]
    assert c.is_valid_token().tolist() == [True] * 7 + [False]
    assert c.token_to_req().tolist() == [0, 1, 2, 2, 2, 3, 3, 0]
    assert c.block_table_tensor[4:].tolist() == [[0] * 4] * 2
    assert c.num_computed_tokens().tolist() == [4, 8, 2, 4, 0, 0]
    counts = (c.num_reqs, c.num_actual_tokens, c.max_query_len, c.max_seq_len)
    assert [int(n) for n in counts] == [4, 7, 3, 9]
    assert c.batch_size == 6


def test_the_host_half_pads_alike():
    bucket = CommonBucket(requests=6, tokens=8, pages=4)
    flags = np.array([False, False, True, True])
    host = dataclasses.replace(RX.host, is_prefilling=flags).pad_to(bucket)
    assert host.query_start_loc_cpu.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert host.seq_lens_cpu_upper_bound.tolist() == [5, 9, 5, 6, 0, 0]
    assert host.num_computed_tokens_cpu.tolist() == [4, 8, 2, 4, 0, 0]
    assert host.is_prefilling is not None
    assert host.is_prefilling.tolist() == [False, False, True, True, False, False]
    assert (host.num_reqs, host.num_actual_tokens, host.max_seq_len) == (4, 7, 9)
    with pytest.raises(MetadataError, match="requests of a batch: given 4; allowed: at most 3"):
        RX.host.pad_to(CommonBucket(requests=3, tokens=8, pages=4))


@given(batches())
def test_a_larger_bucket_changes_nothing_real(batch):
    """Built in a larger bucket = padded to it, bit for bit, and cut back to the real rows."""
    small, large = (jax.device_get(batch.common(b)) for b in (SMALL, LARGE))
    padded = small.pad_to(LARGE)
    assert jax.tree.structure(large) == jax.tree.structure(padded)
    for a, b in zip(jax.tree.leaves(large), jax.tree.leaves(padded), strict=True):
        assert a.dtype == b.dtype == np.int32
        assert np.array_equal(a, b)
    one, other = small.unpadded(batch.host), large.unpadded(batch.host)
    assert one.slot_mapping.shape == (batch.host.num_actual_tokens,)
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "positions"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    check(large, page=batch.page, num_pages=1000)


@given(batches())
def test_slots_are_those_of_the_definition(batch):
    slots = batch.common(SMALL).slot_mapping.tolist()
    expected = []
    for row, q, n in zip(batch.table, batch.query_lens, batch.seq_lens, strict=True):
        for p in range(n - q, n):
            expected.append(int(row[p // batch.page]) * batch.page + p % batch.page)
    assert slots == expected + [-1] * (SMALL.tokens - len(expected))


@pytest.mark.parametrize(
    ("position", "slot"), [(63, 383), (64, 576), (65, 577), (191, 63), (192, -1)]
)
def test_page_edges(position, slot):  # edges 8 and 9
    got = slot_mapping(
        jnp.array([[5, 9, 0]]),
        jnp.array([0]),
        jnp.array([position]),
        jnp.array([True]),
        page=64,
    )
    assert got.tolist() == [slot]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [([0, 2, 2, 5], [0, 0, 2, 2, 2, 0, 0, 0]), ([0, 2, 4, 4, 4], [0, 0, 1, 1, 0, 0, 0, 0])],
)
def test_empty_requests_own_no_token(starts, expected):  # edge 38
    assert token_to_request(jnp.array(starts), 8)[0].tolist() == expected


@pytest.mark.parametrize(
    ("interleave", "rank", "expected"),
    [
        (1, 0, [28, -1, 29, -1, 30, -1, 31, -1, 12, -1]),
        (1, 1, [-1, 28, -1, 29, -1, 30, -1, 31, -1, 12]),
        (2, 0, [28, 29, -1, -1, 30, 31, -1, -1, 12, 13]),
    ],
)
def test_context_parallel_slots(interleave, rank, expected):  # edge 40
    shard = ContextShard(ranks=2, rank=rank, interleave=interleave)
    got = slot_mapping(
        jnp.array([[7, 3]]),
        jnp.zeros(10, jnp.int32),
        jnp.arange(10),
        jnp.ones(10, bool),
        page=4,
        shard=shard,
    )
    assert got.tolist() == expected


@pytest.mark.parametrize(
    ("length", "ranks", "interleave", "expected"),
    [
        (10, 2, 1, [5, 5]),
        (10, 2, 4, [6, 4]),
        (10, 4, 2, [4, 2, 2, 2]),
        (11, 2, 4, [7, 4]),
        (7, 2, 1, [4, 3]),
        (3, 4, 2, [2, 1, 0, 0]),
        (8, 4, 2, [2, 2, 2, 2]),
    ],
)
def test_context_parallel_lengths(length, ranks, interleave, expected):
    lens = np.array([length], np.int32)
    shards = [ContextShard(ranks=ranks, rank=k, interleave=interleave) for k in range(ranks)]
    assert [int(dcp_local_seq_lens(lens, s)[0]) for s in shards] == expected


@given(st.integers(0, 40), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_ranks_share_a_sequence(length, ranks, interleave):
    """Every token has a slot on exactly one rank, and each rank holds as many as it is told."""
    table = np.random.default_rng(length).permutation(12)[None].astype(np.int32) + 1
    request, positions = np.zeros(40, np.int32), np.arange(40, dtype=np.int32)
    owned = []
    for rank in range(ranks):
        shard = ContextShard(ranks=ranks, rank=rank, interleave=interleave)
        arrays = map(jnp.asarray, (table, request, positions, positions < length))
        slots = np.asarray(sharded_slots(*arrays, page=4, shard=shard))
        mine = np.flatnonzero(slots >= 0)
        assert len(mine) == dcp_local_seq_lens(np.array([length]), shard)[0]
        assert len(set(slots[mine].tolist())) == len(mine)
        owned += mine.tolist()
    assert sorted(owned) == list(range(length))


def test_a_rank_can_be_traced():
    lens = jnp.array([11, 3])

    @jax.jit
    def local(rank):
        return dcp_local_seq_lens(lens, ContextShard(ranks=2, rank=rank, interleave=4))

    assert [local(jnp.int32(k)).tolist() for k in range(2)] == [[7, 3], [4, 0]]


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"ranks": 2, "rank": 2, "interleave": 1}, "rank: given 2; allowed: 0 to 1"),
        ({"ranks": 0, "rank": 0, "interleave": 1}, "positive sizes"),
    ],
)
def test_shards_are_checked(shard, message):
    with pytest.raises(MetadataError, match=message):
        ContextShard(**shard)


def test_a_page_must_hold_whole_runs():
    with pytest.raises(MetadataError, match="a multiple of 3"):
        ContextShard(ranks=2, rank=0, interleave=3).check_page(4)


def test_another_cache_group():
    c = RX.common()
    table = jnp.full((4, 5), 3, jnp.int32)
    other = c.with_block_table(table, c.slot_mapping + 1)
    assert other.bucket.pages == 5
    assert np.array_equal(other.slot_mapping, c.slot_mapping + 1)
    assert other.seq_lens is c.seq_lens


def test_no_requests():  # edge 1
    empty = make([], [], page=4)
    c = empty.common()
    assert c.slot_mapping.shape == (0,)
    padded = c.pad_to(CommonBucket(requests=2, tokens=2, pages=2))
    assert padded.slot_mapping.tolist() == [-1, -1]
    check(padded, page=4)


def test_nothing_waits_for_the_host():
    """The whole builder is one jaxpr: no array value is read while it is built."""
    b = RX.bucket

    def build_it(starts, lens, table, n):
        return build_common(starts, lens, table, n, bucket=b, page=4)

    shapes = [(b.requests + 1,), (b.requests,), (b.requests, b.pages), ()]
    jaxpr = jax.make_jaxpr(build_it)(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes))
    assert "callback" not in str(jaxpr)
    assert len(jaxpr.jaxpr.outvars) == 9


def test_programs_are_rungs():
    """A thousand random batches compile one program for every bucket they fall into."""
    requests, tokens = Ladder("requests", powers_of_two(8)), Ladder("tokens", (16, 64))
    rng = np.random.default_rng(0)
    build.clear_cache()
    used = set()
    for _ in range(1000):
        q = rng.integers(1, 9, rng.integers(1, 9))
        batch = make(q, q + rng.integers(0, 9, len(q)), page=4, table=np.ones((len(q), 4)))
        bucket = CommonBucket(
            requests=requests.rung(len(q)), tokens=tokens.rung(int(q.sum())), pages=4
        )
        batch.common(bucket)
        used.add(bucket)
    assert build._cache_size() == len(used) > 4


def test_lengths_as_lists_leave_padding_out():
    host = CommonAttentionHost.of(np.array([1, 3, 2], np.int32), np.array([5, 7, 2], np.int32))
    padded = host.pad_to(CommonBucket(requests=5, tokens=8, pages=2))
    for each in (host, padded, host):
        assert each.lens_from(1) == ([3, 2], [7, 2])
        assert each.lens_from(3) == ([], [])
    np.testing.assert_array_equal(host.query_lens_cpu, padded.query_lens_cpu[:3])


def test_padded_arrays_are_those_of_the_padded_host():
    host = CommonAttentionHost.of(np.array([1, 3], np.int32), np.array([5, 7], np.int32))
    bucket = CommonBucket(requests=4, tokens=8, pages=2)
    starts, lens, requests = host.padded_arrays(bucket)
    padded = host.pad_to(bucket)
    assert starts.tolist() == padded.query_start_loc_cpu.tolist() == [0, 1, 4, 4, 4]
    assert lens.tolist() == padded.seq_lens_cpu_upper_bound.tolist() == [5, 7, 0, 0]
    assert requests == 2 and requests.dtype == np.int32
    with pytest.raises(MetadataError, match="requests of a batch"):
        host.padded_arrays(CommonBucket(requests=1, tokens=8, pages=2))
    bounds = CommonAttentionHost.of(np.array([1], np.int32), np.array([9], np.int32), exact=False)
    with pytest.raises(MetadataError, match="seq_lens_cpu: given None; allowed: exact lengths"):
        bounds.padded_arrays(bucket)


@pytest.mark.parametrize("few", [0, 2**24])
def test_both_searches_find_the_same_requests(few, monkeypatch):
    monkeypatch.setattr(common, "FEW_PAIRS", few)
    starts = jnp.array([0, 2, 2, 3, 7, 7, 7])
    request, real = token_to_request(starts, 9)
    assert request.tolist() == [0, 0, 2, 3, 3, 3, 3, 0, 0]
    assert real.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("few", [0, common.FEW_SUMMANDS])
@pytest.mark.parametrize("n", [0, 1, 2, 37])
def test_exclusive_sum(n, few, monkeypatch):
    """Both ways: the masked sum of a few and the cumulative sum of many."""
    monkeypatch.setattr(common, "FEW_SUMMANDS", few)
    x = np.arange(n, dtype=np.int32) ** 2 - 5
    want = [int(x[:i].sum()) for i in range(n + 1)]
    found = exclusive_sum(jnp.asarray(x))
    assert found.dtype == jnp.int32
    assert found.tolist() == want
