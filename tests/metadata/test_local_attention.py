"""Chunked-local attention: worked examples, the device form, and what every item must satisfy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mla_jax.errors import MetadataError
from mla_jax.metadata.compat.check import check
from mla_jax.metadata.compat.local_attention import (
    build_local_attention,
    make_local_attention_virtual_batches,
    max_virtual_batches,
)
from tests.metadata.batches import LARGE, RX, SMALL, Batch, batches, make

build_local = jax.jit(build_local_attention, static_argnames=("chunk", "page"))

CHUNK, PAGE = 4, 2
EXAMPLE = make([4, 10, 5], [6, 17, 9], page=PAGE, table=np.arange(30).reshape(3, 10))


def on_host(batch: Batch, chunk: int):
    starts = batch.host.query_starts
    return make_local_attention_virtual_batches(
        chunk, starts, batch.seq_lens, batch.table, batch.page
    )


def test_worked_example():
    b = on_host(EXAMPLE, CHUNK)
    assert b.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert b.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert b.query_starts.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    first = [0, 2, 12, 14, 16, 18, 22, 24]
    assert b.page_table.tolist() == [[p, p + 1] for p in first]
    check(b, common=EXAMPLE.common(), chunk=CHUNK)


def test_one_page_per_chunk():
    b = on_host(RX, 4)
    assert b.query_starts.tolist() == [0, 1, 2, 4, 5, 7]
    assert b.seq_lens.tolist() == [1, 1, 4, 1, 2]
    assert b.page_table.tolist() == [[3], [2], [8], [4], [1]]


def test_a_query_on_a_chunk_edge():  # edge 31
    b = on_host(make([4], [8], page=2, table=[[1, 2, 3, 4, 5]]), 4)
    assert (b.query_lens.tolist(), b.seq_lens.tolist()) == ([4], [4])
    assert b.page_table.tolist() == [[3, 4]]


def test_a_clipped_table_repeats_its_last_page():  # edge 32
    b = on_host(make([1, 3], [8, 9], page=2, table=[[1, 2, 3, 4, 5], [21, 22, 23, 24, 25]]), 4)
    assert b.page_table[-1].tolist() == [25, 25]
    assert b.seq_lens[-1] == 1


def test_requests_without_queries_have_no_item():
    b = on_host(make([2, 0, 1], [6, 0, 3], page=2, table=np.ones((3, 3))), 4)
    assert b.request.tolist() == [0, 2]


def test_chunks_hold_whole_pages():
    with pytest.raises(MetadataError, match="a positive multiple of page=4"):
        on_host(RX, 6)


@given(batches())
def test_device_form(batch):
    """Same items as on the host, then padding, in every bucket."""
    pages = 2
    chunk = pages * batch.page
    host = on_host(batch, chunk)
    n = len(host.query_lens)
    for bucket in (SMALL, LARGE):
        common = batch.common(bucket)
        built = build_local(common, chunk=chunk, page=batch.page)
        device = jax.device_get(built)
        assert int(device.num_virtual) == n
        assert len(device.query_lens) == max_virtual_batches(
            requests=bucket.requests, tokens=bucket.tokens, chunk=chunk
        )
        for name in ("query_lens", "seq_lens", "page_table", "request", "chunk"):
            got = getattr(device, name)
            want = getattr(host, name)
            assert not got[n:].any(), name
            real = got[:n]
            if name == "page_table":  # clipped at the bucket's width instead: page 0, unread
                beyond = (host.chunk[:, None] * pages + np.arange(pages)) >= batch.table.shape[1]
                real, want = np.where(beyond, 0, real), np.where(beyond, 0, want)
            assert np.array_equal(real, want), name
        assert np.array_equal(device.query_starts[: n + 1], host.query_starts)
        assert (device.query_starts[n:] == batch.query_lens.sum()).all()
        check(built, common=common, chunk=chunk)
    local = built.common(common)
    check(local, page=batch.page)
    assert local.slots is common.slots


@given(batches())
def test_every_query_sees_its_chunk(batch):
    """Keys of a query: its own chunk up to itself, through the virtual pages."""
    chunk = 2 * batch.page
    b = on_host(batch, chunk)
    seen = []
    for q, k, pages in zip(b.query_lens, b.seq_lens, b.page_table, strict=True):
        rows = [int(pages[j // batch.page]) * batch.page + j % batch.page for j in range(k)]
        seen += [rows[: k - q + i + 1] for i in range(q)]
    expected = []
    for row, q, n in zip(batch.table, batch.query_lens, batch.seq_lens, strict=True):
        for p in range(n - q, n):
            first = p // chunk * chunk
            expected.append(
                [
                    int(row[j // batch.page]) * batch.page + j % batch.page
                    for j in range(first, p + 1)
                ]
            )
    assert seen == expected


def test_another_table_is_remapped_alike():
    b = on_host(EXAMPLE, CHUNK)
    assert np.array_equal(b.remap(EXAMPLE.table + 100), b.page_table + 100)


def test_it_is_traced_without_the_host():
    common = EXAMPLE.common()
    run = partial(build_local_attention, chunk=CHUNK, page=PAGE)
    assert "callback" not in str(jax.make_jaxpr(run)(common))
    jitted = jax.jit(run)(common)
    host = on_host(EXAMPLE, CHUNK)
    assert np.array_equal(jitted.page_table[: len(host.page_table)], host.page_table)
    assert jitted.page_table.dtype == jnp.int32
