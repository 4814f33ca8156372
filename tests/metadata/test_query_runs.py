"""Requests cut into short runs of queries keep their causal masks and their pages."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.mla import build_mla, query_runs
from mla_jax.types import cdiv
from tests.cases import starts


def runs_of(queries, contexts, longest, spare=0):
    runs = sum(cdiv(n, longest) for n in queries) + spare
    table = jnp.arange(len(queries), dtype=jnp.int32)[:, None]
    lens = np.add(queries, contexts) * (np.array(queries) > 0)
    meta, request = query_runs(
        jnp.asarray(starts(queries)),
        jnp.asarray(lens, jnp.int32),
        table,
        longest=longest,
        runs=max(runs, 1),
    )
    return meta, np.asarray(request)


def seen(query_starts, seq_lens, tokens):
    """Keys that each token sees, bottom-right."""
    out = np.zeros(tokens, int)
    for a, b, s in zip(query_starts, query_starts[1:], seq_lens, strict=False):
        out[a:b] = s - (b - a) + 1 + np.arange(b - a)
    return out.tolist()


lens = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@pytest.mark.slow
@given(lens, lens, st.integers(1, 5), st.integers(0, 3))
def test_every_token_sees_the_keys_it_saw(queries, contexts, longest, spare):
    meta, request = runs_of(queries, contexts, longest, spare)
    qs = np.asarray(meta.query_starts)
    n = np.diff(qs)
    assert meta.max_query_len == longest >= n.max()
    assert (n >= 0).all() and qs[0] == 0 and qs[-1] == sum(queries)
    assert not np.asarray(meta.seq_lens)[n == 0].any()
    want = seen(starts(queries), np.add(queries, contexts), sum(queries))
    assert seen(qs, np.asarray(meta.seq_lens), sum(queries)) == want
    owner = np.repeat(np.arange(4), queries)
    assert np.repeat(request, n).tolist() == owner.tolist()
    np.testing.assert_array_equal(np.asarray(meta.page_table)[:, 0], request)


def test_a_bucket_has_rows_for_any_cut():
    bucket = MLABucket(decodes=2, prefills=3, prefill_tokens=12, pages=2, context_rows=0, absorb=4)
    assert bucket.runs == 2 + 6
    for queries in ((12, 0, 0), (5, 5, 2), (1, 1, 10), (9, 1, 1), (4, 4, 4)):
        assert sum(cdiv(n, 4) for n in queries) <= bucket.runs - 2


@pytest.mark.parametrize("decodes", [0, 1, 2])
def test_an_absorbed_step_is_all_decode(decodes):
    bucket = MLABucket(decodes=2, prefills=2, prefill_tokens=8, pages=2, context_rows=0, absorb=4)
    queries = [1] * decodes + [5, 2] + [0] * (2 - decodes)
    args = starts(queries), np.add(queries, 3) * (np.array(queries) > 0), np.arange(8).reshape(4, 2)
    given = [jnp.asarray(a, jnp.int32) for a in args]
    meta = build_mla(*given, jnp.int32(decodes), bucket=bucket, page=4)
    assert meta.prefill is None and meta.context is None
    assert np.diff(meta.decode.query_starts).tolist() == [1] * decodes + [4, 1, 2] + [0] * (
        3 - decodes
    )
    np.testing.assert_array_equal(meta.decode.page_table, given[2][meta.decode_requests])
