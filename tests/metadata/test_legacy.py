"""First-generation metadata: views, graph padding, and the way to decodes first and back."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.errors import MetadataError
from mla_jax.metadata.compat.batch_order import decodes_first, permute_batch, prefills_first
from mla_jax.metadata.compat.check import check
from mla_jax.metadata.compat.legacy import MLACommonMetadata, capture_metadata, to_decodes_first
from mla_jax.metadata.compat.legacy_builder import (
    CapturedShape,
    LegacyBuilder,
    SequenceGroup,
    SequenceStep,
    sequence_slots,
)
from mla_jax.metadata.split import split_decodes_and_prefills

BUILDER = LegacyBuilder(
    block_size=4, workspace_rows=64, chunked_prefill=True, prefix_caching=False, sliding_window=None
)


def group(seq: int, *, prompt: bool, query: int, context: int, pages: list[int]) -> SequenceGroup:
    step = SequenceStep(
        seq_id=seq,
        num_tokens=query,
        orig_seq_len=context + query,
        seq_len=context + query,
        query_len=query,
        context_len=context,
        curr_sliding_window_block=0,
    )
    return SequenceGroup(
        is_prompt=prompt, prefix_cache_hit=False, block_tables={seq: pages}, seqs=[step]
    )


def mixed() -> MLACommonMetadata:
    groups = [
        group(0, prompt=True, query=3, context=4, pages=[8, 4]),
        group(1, prompt=False, query=1, context=4, pages=[7, 3]),
        group(2, prompt=False, query=1, context=7, pages=[5, 9]),
    ]
    return BUILDER.build(groups, [7, 5, 8], [3, 1, 1], captured=None)


def test_views():  # attention edges 23 and 24
    meta = mixed()
    check(meta, num_slots=100)
    decode, prefill = meta.decode_metadata, meta.prefill_metadata
    assert decode is not None
    assert prefill is not None
    assert decode is meta.decode_metadata
    assert meta.query_start_loc.tolist() == [0, 3, 4, 5]
    assert decode.query_start_loc.tolist() == [0, 1, 2]
    assert decode.seq_start_loc.tolist() == [7, 12, 20]
    assert decode.slot_mapping.tolist() == [12, 39]
    assert prefill.slot_mapping.tolist() == [16, 17, 18]
    assert decode.prefill_metadata is None
    assert prefill.decode_metadata is None
    assert prefill.context_chunks is meta.context_chunks is not None


def test_graph_padding():  # attention edge 25
    groups = [group(i, prompt=False, query=1, context=i, pages=[i + 1]) for i in range(3)]
    shape = CapturedShape(tokens=4, pad=1, pages=2)
    meta = BUILDER.build(groups, [1, 2, 3, 1], [1, 1, 1], captured=shape)
    assert meta.slot_mapping.tolist() == [4, 9, 14, -1]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 3]
    assert meta.seq_start_loc.tolist() == [0, 1, 3, 6, 7]
    assert meta.block_tables.tolist() == [[1, 0], [2, 0], [3, 0], [0, 0]]
    host, table, _ = to_decodes_first(meta)
    assert host.num_requests == len(table) == 3
    captured = capture_metadata(4, meta.block_tables, max_seq_len=64)
    assert captured.slot_mapping.tolist() == [-1] * 4
    assert vars(captured).keys() == vars(meta).keys()


def test_head_dim_and_empty_steps_are_refused():  # attention edge 27
    with pytest.raises(MetadataError, match="head_dim: given 128"):
        dataclasses.replace(mixed(), head_dim=128)
    with pytest.raises(MetadataError, match="query_lens"):
        BUILDER.build([], [], [], captured=None)


def test_a_short_table_is_refused():
    with pytest.raises(MetadataError, match="given 1; allowed: at least 2"):
        sequence_slots(
            is_prompt=True,
            seq_len=5,
            query_len=5,
            context_len=0,
            sliding_window=None,
            block_size=4,
            block_table=[1],
        )


def test_to_decodes_first_and_back():
    meta = mixed()
    host, table, order = to_decodes_first(meta)
    assert order.requests.tolist() == [1, 2, 0]
    assert order.tokens.tolist() == [3, 4, 0, 1, 2]
    assert table.tolist() == [[7, 3], [5, 9], [8, 4]]
    assert split_decodes_and_prefills(host, debug=True) == (2, 1, 2, 3)
    slots = order.per_token(meta.slot_mapping)
    assert slots.tolist() == [12, 39, 16, 17, 18]
    assert np.array_equal(order.inverse().per_token(slots), meta.slot_mapping)


@given(st.lists(st.integers(0, 4), max_size=7), st.integers(0, 7), st.randoms())
def test_orders_are_permutations(query_lens, prefills, rng):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    n = len(query_lens)
    prefills = min(prefills, n)
    there = decodes_first(starts, prefills)
    back = prefills_first(there.query_start_loc, n - prefills)
    tokens, requests = np.arange(starts[-1]), np.arange(n)
    assert np.array_equal(back.per_token(there.per_token(tokens)), tokens)
    assert np.array_equal(back.per_request(there.per_request(requests)), requests)
    assert np.array_equal(back.query_start_loc, starts)
    shuffled = rng.sample(range(n), n)
    order = permute_batch(starts, np.array(shuffled, np.int64))
    owner = np.repeat(requests, query_lens)
    expected = [(r, i) for r in shuffled for i in range(query_lens[r])]
    got = order.per_token(owner), order.per_token(tokens - starts[owner])
    assert list(zip(*(x.tolist() for x in got), strict=True)) == expected
    assert np.array_equal(order.inverse().per_token(order.per_token(tokens)), tokens)


def test_only_permutations_are_orders():
    with pytest.raises(MetadataError, match="a permutation"):
        permute_batch(np.array([0, 1, 2], np.int32), np.array([0, 0]))


def test_advance_after_a_mixed_step():
    meta = mixed()
    step = meta.advance(num_seqs=3, num_queries=3, turn_prefills_into_decodes=True)
    assert step.seq_lens == (8, 6, 9)
    assert (step.num_prefills, step.num_decode_tokens, step.max_decode_seq_len) == (0, 3, 9)
    assert step.context_lens_tensor is not None
    assert step.context_lens_tensor.tolist() == [7, 5, 8]
    assert step.query_start_loc.tolist() == [0, 1, 2, 3]
    assert step.decode_metadata is not None
    assert step.decode_metadata.seq_lens_tensor.tolist() == [8, 6, 9]
    again = step.advance(num_seqs=3, num_queries=3)
    assert again.seq_lens == (9, 7, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "num_prefills: given 1; allowed: 0 before a decode step"),
        ({"num_prefills": 0}, "num_prefill_tokens"),
    ],
)
def test_prefills_cannot_advance(change, message):
    with pytest.raises(MetadataError, match=message):
        dataclasses.replace(mixed(), **change).advance(num_seqs=3, num_queries=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seq_lens_tensor": np.array([7, 5], np.int32)},
            "seq_lens_tensor: given 2; .* 3",
        ),
        (
            {"query_start_loc": np.arange(5, dtype=np.int32)},
            "query_start_loc: given 5; .* 4",
        ),
        ({"seq_start_loc": np.arange(3, dtype=np.int32)}, "seq_start_loc: given 3; .* 4"),
        ({"context_lens_tensor": np.arange(2, dtype=np.int32)}, "number of context_lens: given 2"),
    ],
)
def test_arrays_of_another_step_cannot_advance(change, message):
    step = mixed().advance(num_seqs=3, num_queries=3, turn_prefills_into_decodes=True)
    with pytest.raises(MetadataError, match=message):
        dataclasses.replace(step, **change).advance(num_seqs=3, num_queries=3)


def test_more_queries_than_sequences_are_refused():
    with pytest.raises(MetadataError, match="num_seqs: given 2; allowed: at least num_queries = 3"):
        mixed().advance(num_seqs=2, num_queries=3)
