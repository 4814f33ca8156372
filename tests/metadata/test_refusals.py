"""Sizes that no plan can have are refused where they are given (defects 17 and 18)."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import powers_of_two
from mla_jax.metadata.common import slot_mapping
from mla_jax.metadata.compat.chunked_context import pack_chunks, plan_equal_chunks
from mla_jax.metadata.compat.indexer import plan_indexer_chunks
from mla_jax.metadata.compat.local_attention import make_local_attention_virtual_batches
from mla_jax.metadata.compat.paged_logits_schedule import paged_mqa_logits_schedule
from mla_jax.metadata.compat.plan import balanced_plan, dense_sm_parts, invariant_plan
from mla_jax.metadata.compat.workspace import chunked_prefill_workspace_size
from mla_jax.metadata.sparse import c128a_width
from mla_jax.metadata.window import plan_window_chunks, sliding_window_indices

ONE, LENS = jnp.zeros(1, jnp.int32), jnp.array([5], jnp.int32)
TABLE, REAL = jnp.ones((1, 2), jnp.int32), jnp.ones(1, bool)
HUGE = np.array([2**31 - 1], np.int32)
SWA = {"ratio": 4, "window": 4, "chunk_requests": 1, "max_model_len": 8, "max_batched_tokens": 8}


def window_chunks(**changes):
    one = np.ones(1, np.int32)
    return plan_window_chunks(one, one, **SWA | changes)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: slot_mapping(TABLE, ONE, ONE, REAL, page=-4), "page: given -4"),
        (lambda: slot_mapping(TABLE, ONE, ONE, REAL, page=0), "page: given 0"),
        (lambda: slot_mapping(TABLE, ONE, ONE, REAL, page=4, ratio=0), "ratio: given 0"),
        (lambda: balanced_plan(LENS, parts=0), "parts: given 0"),
        (lambda: balanced_plan(LENS, parts=1, overhead=-1), "overhead: given -1"),
        (lambda: dense_sm_parts(0, queries=1, heads=1), "num_sms: given 0"),
        (lambda: invariant_plan(LENS, blocks_per_piece=0, max_len=9), "blocks_per_piece: given 0"),
        (lambda: paged_mqa_logits_schedule(LENS[:, None], num_sms=0), "num_sms: given 0"),
        (
            lambda: chunked_prefill_workspace_size(max_model_len=9, max_num_seqs=1, page=0),
            "page: given 0",
        ),
        (lambda: c128a_width(5, 9, ratio=0), "ratio: given 0"),
        (lambda: window_chunks(window=-4), "window: given -4"),
        (lambda: window_chunks(chunk_requests=0), "chunk_requests: given 0"),
        (
            lambda: sliding_window_indices(TABLE, ONE, ONE, REAL, window=0, page=4),
            "window: given 0",
        ),
        (lambda: pack_chunks(np.array([5]), np.array([0, 1]), 8, 0), "page: given 0"),
        (lambda: plan_equal_chunks(np.array([5]), 1, 8, 0), "page: given 0"),
        (
            lambda: make_local_attention_virtual_batches(
                4, np.array([0, 1]), np.array([5]), np.ones((1, 2), int), 0
            ),
            "page: given 0",
        ),
        (lambda: powers_of_two(8, smallest=0), "sizes of a ladder"),
    ],
)
def test_sizes_below_one(call, name):
    with pytest.raises(MetadataError, match=name):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: pack_chunks(HUGE, np.array([0, 1], np.int32), 64, 64),
        lambda: plan_equal_chunks(HUGE, 1, 64, 64),
        lambda: plan_indexer_chunks(HUGE, HUGE, workspace=64, max_logits=64),
    ],
)
def test_plans_that_would_not_end(call):
    """A context of 2**31 - 1 in a tiny workspace: refused at once."""
    with pytest.raises(MetadataError, match="chunks of a step in a workspace of 64: given"):
        call()
