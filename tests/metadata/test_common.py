"""Common attention metadata: examples, padding rules, context parallelism, tracing."""

from dataclasses import replace

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
    GroupSpec,
    HostBatch,
    build_common,
    exclusive_sum,
    slot_mapping,
    token_to_request,
)
from mla_jax.metadata.context_parallel import ContextShard, dcp_local_seq_lens
from tests.metadata.batches import LARGE, RX, SMALL, batches, build, make

sharded_slots = jax.jit(slot_mapping, static_argnames=("page", "shard"))


def test_padded_example():
    c = RX.common(CommonBucket(requests=6, tokens=8, pages=(4,)))
    assert c.query_starts.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert c.seq_lens.tolist() == [5, 9, 5, 6, 0, 0]
    assert c.slots["latent"].tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    assert c.positions.tolist() == [4, 8, 2, 3, 4, 4, 5, 0]
    assert c.real.tolist() == [True] * 7 + [False]
    assert c.requests.tolist() == [0, 1, 2, 2, 2, 3, 3, 0]
    assert c.page_tables["latent"][4:].tolist() == [[0] * 4] * 2
    assert c.context_lens.tolist() == [4, 8, 2, 4, 0, 0]
    counts = (c.num_requests, c.num_tokens, c.max_query_len, c.max_seq_len)
    assert [int(n) for n in counts] == [4, 7, 3, 9]


def test_the_host_half_pads_alike():
    bucket = CommonBucket(requests=6, tokens=8, pages=(4,))
    starts, lens, requests = RX.host.padded_arrays(bucket)
    assert starts.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert lens.tolist() == [5, 9, 5, 6, 0, 0]
    assert requests == 4 and requests.dtype == np.int32
    assert RX.host.context_lens.tolist() == [4, 8, 2, 4]
    with pytest.raises(MetadataError, match="requests of a batch: given 4; allowed: at most 3"):
        RX.host.padded_arrays(CommonBucket(requests=3, tokens=8, pages=(4,)))
    bounds = HostBatch.of(np.array([1], np.int32), np.array([9], np.int32), exact=False)
    with pytest.raises(MetadataError, match="seq_lens: given upper bounds; allowed: exact"):
        bounds.padded_arrays(bucket)


@pytest.mark.parametrize(
    ("queries", "lens", "message"),
    [
        ([1, -2], [5, 5], r"query_lens\[1\]: given -2; allowed: 0 to 2147483647"),
        ([1], [2**31], r"seq_lens\[0\]: given 2147483648; allowed: 0 to 2147483647"),
        ([1], [2**32 + 1], r"seq_lens\[0\]: given 4294967297"),
        ([1, 1], [5], "seq_lens: given 1 entries; allowed: 2, one each"),
        ([1, 3], [5, 2], r"seq_lens\[1\]: given 2; allowed: at least the query length, 3"),
        ([2**30] * 3, [2**30] * 3, "tokens of a step: given 3221225472"),
    ],
)
def test_lengths_that_no_step_has(queries, lens, message):
    """None of them wraps into something that looks right (defect 17)."""
    with pytest.raises(MetadataError, match=message):
        HostBatch.of(np.array(queries), np.array(lens))


@pytest.mark.parametrize(
    ("queries", "lens", "message"),
    [
        ([1, -2, 9], [5, 5, 9], r"query_lens\[1\]: given -2; allowed: 0 to 2147483647"),
        ([-(2**31)], [-1], r"query_lens\[0\]: given -2147483648"),
        ([1, 0, 2], [5, -3, 9], r"seq_lens\[1\]: given -3; allowed: at least the query length, 0"),
        ([4, 3, 1], [9, 2, 1], r"seq_lens\[1\]: given 2; allowed: at least the query length, 3"),
    ],
)
def test_int32_lengths_that_no_step_has(queries, lens, message):
    """These are not looked at one by one: the longest is, and whether one is wrong."""
    with pytest.raises(MetadataError, match=message):
        HostBatch.of(np.array(queries, np.int32), np.array(lens, np.int32))


def test_a_host_batch_says_its_longest_and_its_sums():
    host = HostBatch.of(np.array([1, 0, 7, 3], np.int32), np.array([9, 0, 8, 2**31 - 1], np.int32))
    assert (host.max_query_len, host.max_seq_len, host.num_tokens) == (7, 2**31 - 1, 11)
    assert host.query_starts.tolist() == [0, 1, 1, 8, 11]
    assert [host.leading_up_to(n) for n in (0, 1, 3, 7)] == [0, 2, 2, 4]
    none = HostBatch.of(np.array([], np.int32), np.array([], np.int32))
    assert (none.max_query_len, none.max_seq_len, none.num_tokens) == (0, 0, 0)
    assert replace(none, max_query_len=5).leading_up_to(1) == 0  # a bound, of no request


@pytest.mark.parametrize("sizes", [{"page": 0}, {"page": -4}, {"page": 4, "ratio": 0}])
def test_groups_of_no_size(sizes):
    with pytest.raises(MetadataError, match=r"of latent: given -?[04]; allowed: 1 or more"):
        GroupSpec("latent", **sizes)


@given(batches())
def test_a_larger_bucket_changes_nothing_real(batch):
    """Every real lane is the same bit for bit, every other one is inert."""
    small, large = (jax.device_get(batch.common(b)) for b in (SMALL, LARGE))
    n, t = batch.host.num_requests, batch.host.num_tokens
    for c in (small, large):
        assert all(a.dtype in (np.int32, np.bool_) for a in jax.tree.leaves(c))
        check(c, num_pages=1000)
    assert np.array_equal(small.query_starts[: n + 1], large.query_starts[: n + 1])
    assert np.array_equal(small.seq_lens[:n], large.seq_lens[:n])
    for name in ("positions", "requests", "real"):
        assert np.array_equal(getattr(small, name)[:t], getattr(large, name)[:t])
    assert np.array_equal(small.slots["latent"][:t], large.slots["latent"][:t])


@given(batches())
def test_slots_are_those_of_the_definition(batch):
    slots = batch.common(SMALL).slots["latent"].tolist()
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


def test_groups_have_tables_and_slots_of_their_own():
    """The second group's rows stand for two tokens: its slot is the row that one completes."""
    groups = (GroupSpec("latent", 4), GroupSpec("states", 2, ratio=2))
    bucket = CommonBucket(requests=4, tokens=8, pages=(3, 3))
    starts, lens, n = RX.host.padded_arrays(bucket)
    tables = {"latent": jnp.asarray(RX.table), "states": jnp.asarray(RX.table + 10)}
    c = build_common(
        jnp.asarray(starts), jnp.asarray(lens), tables, jnp.asarray(n), bucket=bucket, groups=groups
    )
    check(c)
    assert c.slots["latent"].tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    # positions 4, 8, 2, 3, 4, 4, 5: 3 completes state 1 of page 18, 5 state 2 of page 11
    assert c.slots["states"].tolist() == [-1, -1, -1, 37, -1, -1, 22, -1]
    assert c.group("states").tokens == 4
    with pytest.raises(MetadataError, match="cache group: given keys; allowed: latent or states"):
        c.group("keys")


def test_tables_of_other_groups_or_shapes_are_refused():
    bucket = CommonBucket(requests=4, tokens=8, pages=(3,))
    group = GroupSpec("latent", 4)
    starts, lens, n = map(jnp.asarray, RX.host.padded_arrays(bucket))
    table = jnp.asarray(RX.table)
    with pytest.raises(MetadataError, match=r"page tables: given .'window'.; allowed: one of each"):
        build_common(starts, lens, {"window": table}, n, bucket=bucket, groups=(group,))
    with pytest.raises(MetadataError, match=r"shape of page table of latent: given \(4, 2\)"):
        build_common(starts, lens, {"latent": table[:, :2]}, n, bucket=bucket, groups=(group,))


def test_no_requests():  # edge 1
    c = make([], [], page=4).common(CommonBucket(requests=2, tokens=2, pages=(2,)))
    assert c.slots["latent"].tolist() == [-1, -1]
    check(c)


def test_nothing_waits_for_the_host():
    """The whole builder is one jaxpr: no array value is read while it is built."""
    b = RX.bucket

    def build_it(starts, lens, table, n):
        return build_common(starts, lens, {"latent": table}, n, bucket=b, groups=(RX.group,))

    shapes = [(b.requests + 1,), (b.requests,), (b.requests, *b.pages), ()]
    jaxpr = jax.make_jaxpr(build_it)(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes))
    assert "callback" not in str(jaxpr)
    assert len(jaxpr.jaxpr.outvars) == 11


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
            requests=requests.rung(len(q)), tokens=tokens.rung(int(q.sum())), pages=(4,)
        )
        batch.common(bucket)
        used.add(bucket)
    assert build._cache_size() == len(used) > 4


def test_lengths_as_lists_leave_padding_out():
    host = HostBatch.of(np.array([1, 3, 2], np.int32), np.array([5, 7, 2], np.int32))
    assert host.lens_from(1) == ([3, 2], [7, 2])
    assert host.lens_from(3) == ([], [])


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


def test_a_ring_keeps_the_last_tokens_of_each_request():
    """Position p at row p % page of the request's one page; earlier tokens have no slot."""
    group = GroupSpec("ring", 4, ring=True)
    assert (group.pages_of(1), group.pages_of(10**6), group.pages_of(0)) == (1, 1, 0)
    common = build_common(
        jnp.asarray([0, 6, 7, 7], jnp.int32),
        jnp.asarray([9, 3, 0], jnp.int32),
        {"ring": jnp.asarray([[2], [5], [0]], jnp.int32)},
        jnp.int32(2),
        bucket=CommonBucket(requests=3, tokens=8, pages=(1,)),
        groups=(group,),
    )
    # Positions 3 to 8, of which 5 to 8 stay; position 2; padding.
    want = [-1, -1, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 2 * 4 + 0, 5 * 4 + 2, -1]
    assert common.slots["ring"].tolist() == want
