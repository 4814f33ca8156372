"""Chunk plans cover every cached row once; worked examples; workspace sizes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.config import MLADims
from mla_jax.errors import MetadataError
from mla_jax.metadata.compat.check import check, check_spans, context_spans
from mla_jax.metadata.compat.chunked_context import ContextSpan, pack_chunks, plan_equal_chunks
from mla_jax.metadata.compat.workspace import (
    chunked_prefill_workspace_size,
    estimate_prefill_memory,
    first_generation_workspace_size,
)
from mla_jax.metadata.context_parallel import WHOLE, ContextShard
from mla_jax.metadata.mla import ContextMetadata


def lens(*values) -> np.ndarray:
    return np.array(values, np.int32)


def pack(context, rows, page, shard=WHOLE):
    starts = np.arange(len(context) + 1, dtype=np.int32)
    return pack_chunks(lens(*context), starts, rows, page, shard)


def device(context, rows) -> ContextMetadata:
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(context)]).astype(np.int32))
    table = jnp.zeros((len(context), 1), jnp.int32)
    return ContextMetadata(rows=rows, page_table=table, context_starts=starts, query_starts=starts)


def test_equal_chunks():
    plan = plan_equal_chunks(lens(10, 0, 7), 3, 16, 4)
    assert plan is not None
    assert plan.starts.tolist() == [[0, 0, 0], [8, 8, 8]]
    assert plan.cu_seq_lens.tolist() == [[0, 8, 8, 15], [0, 2, 2, 2]]
    assert (plan.seq_tot, plan.max_seq_lens) == ((15, 2), (8, 2))


def test_a_long_decode_adds_empty_chunks():
    plan = plan_equal_chunks(lens(10, 0, 7, 25), 3, 16, 4)
    assert plan is not None
    assert plan.seq_tot == (15, 2, 0, 0)
    check(plan, context_lens=lens(10, 0, 7), rows=16)


def test_an_exact_multiple_has_no_empty_chunk():
    plan = plan_equal_chunks(lens(16), 1, 8, 4)
    assert plan is not None
    assert plan.seq_tot == (8, 8)


@pytest.mark.parametrize(("context", "prefills"), [((0, 0), 2), ((9,), 0), ((0, 9), 1)])
def test_no_context_no_plan(context, prefills):
    assert plan_equal_chunks(lens(*context), prefills, 16, 4) is None


def test_a_workspace_below_a_page_each_is_refused():
    with pytest.raises(MetadataError, match="given 11; allowed: at least 12: a page of 4 for each"):
        plan_equal_chunks(lens(1, 1, 1), 3, 11, 4)
    with pytest.raises(MetadataError, match="given 8; allowed: at least 16"):
        pack((10,), 8, 16)


@pytest.mark.parametrize(
    ("context", "rows", "page", "chunks"),
    [
        ((10, 0, 7), 16, 4, [[(0, 0, 10)], [(2, 0, 7)]]),
        ((5, 6, 7), 16, 4, [[(0, 0, 5), (1, 0, 6), (2, 0, 4)], [(2, 4, 3)]]),
        ((40,), 16, 4, [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)]]),
        (
            (1536, 512, 0, 64, 80, 0),
            1024,
            16,
            [[(0, 0, 1024)], [(0, 1024, 512), (1, 0, 512)], [(3, 0, 64), (4, 0, 80)]],
        ),
    ],
)
def test_packed_chunks(context, rows, page, chunks):
    plan = pack(context, rows, page)
    assert plan is not None
    assert [[tuple(s) for s in c.spans] for c in plan.chunks] == chunks
    empty = [i for i, n in enumerate(context) if n == 0]
    assert [a for a, _ in plan.empty_token_slices] == empty


contexts = st.lists(st.integers(0, 70), min_size=1, max_size=6)


@given(contexts, st.integers(1, 8), st.integers(0, 40))
def test_all_plans_cover_every_row_once(context, page, slack):
    """Both host planners and the device form, in any workspace that holds a page of each."""
    rows = page * len(context) + slack
    equal = plan_equal_chunks(lens(*context), len(context), rows, page)
    packed = pack(context, rows, page)
    assert (equal is None) == (packed is None) == (not any(context))
    if equal is not None and packed is not None:
        check(equal, context_lens=lens(*context), rows=rows)
        check(packed, context_lens=lens(*context), rows=rows)
        for chunk in packed.chunks:
            assert all(s.start == 0 for s in chunk.spans[1:])
            assert all(s.start % page == 0 for s in chunk.spans)
            assert chunk.all_rows_active


@pytest.mark.parametrize(
    ("context", "rows"), [((10, 0, 7), 16), ((0, 0), 8), ((33, 1, 0, 14), 8), ((8, 8), 8)]
)
def test_the_device_form_covers_every_row_once(context, rows):
    meta = device(context, rows)
    check(meta)
    assert len(context_spans(meta)) == -(-sum(context) // rows)
    packed = pack(context, rows, 1)
    if packed is not None and 0 not in context:
        spans = [list(s) for s in packed.spans()]
        assert [list(s) for s in context_spans(meta)] == spans


@given(contexts, st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_context_parallel_plans(context, ranks, interleave, units):
    page = 4
    rows = units * ranks * max(page, interleave)
    shard = ContextShard(ranks=ranks, rank=0, interleave=interleave)
    plan = pack(context, rows, page, shard)
    if plan is None:
        assert not any(context)
        return
    check(plan, context_lens=lens(*context), rows=rows, ranks=ranks)
    for chunk in plan.chunks:
        first, last = chunk.request_slice
        assert chunk.local_context_lens.sum(axis=1).tolist() == context[first:last]
        assert (chunk.padded_local_seq_lens * ranks >= chunk.seq_lens).all()


@pytest.mark.parametrize(
    "chunks",
    [
        [[ContextSpan(0, 0, 4)]],  # rows missing
        [[ContextSpan(0, 0, 5)], [ContextSpan(0, 4, 1)]],  # a row twice
        [[ContextSpan(0, 0, 5)], [ContextSpan(0, 5, 0)]],  # an empty span
    ],
)
def test_bad_covers_are_noticed(chunks):
    with pytest.raises(MetadataError):
        check_spans(chunks, lens(5), 8)
    with pytest.raises(MetadataError, match="rows of chunk 0: given 5; allowed: at most 4"):
        check_spans([[ContextSpan(0, 0, 5)]], lens(5), 4)


@pytest.mark.parametrize(
    ("length", "seqs", "page", "first", "later"),
    [
        (4096, 256, 64, 65536, 65536),
        (163840, 256, 64, 131072, 65536),
        (2048, 16, 16, 16384, 16384),
        (8192, 1024, 64, 131072, 65536),
    ],
)
def test_workspace_rows(length, seqs, page, first, later):
    sizes = {"max_model_len": length, "max_num_seqs": seqs, "page": page}
    assert first_generation_workspace_size(**sizes) == first
    assert chunked_prefill_workspace_size(**sizes) == later


def test_workspace_limits():
    sizes = {"max_model_len": 8, "max_num_seqs": 4096, "page": 64}
    with pytest.raises(MetadataError, match="given 131072; allowed: at least"):
        first_generation_workspace_size(**sizes)
    shard = ContextShard(ranks=3, rank=0, interleave=1)
    assert chunked_prefill_workspace_size(**sizes, shard=shard) % 192 == 0
    small = {"max_model_len": 163840, "max_num_seqs": 4, "page": 64}
    assert chunked_prefill_workspace_size(**small, topk=2048) == 4 * 2048


def test_memory_of_the_worst_chunk():
    """64 Ki rows of DeepSeek-V3 in bfloat16: 72 MiB gathered, 4 GiB projected, 3 GiB of keys."""
    v3 = MLADims(heads=128, rank=512, nope=128, rope=64, v=128, q_rank=1536)
    need = estimate_prefill_memory(64 * 1024, v3)
    assert (need.workspace, need.projected, need.keys) == (72 << 20, 4 << 30, 3 << 30)
    assert need.total == (72 << 20) + (7 << 30)
    half = estimate_prefill_memory(64, v3, shard=ContextShard(ranks=2, rank=0, interleave=1))
    assert half.workspace == 96 * 576 * 2
