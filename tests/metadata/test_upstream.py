"""Upstream's names and calls on top of ours: views, padding, drafts, other tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.compat.builder import UpstreamMLABuilder
from mla_jax.metadata.compat.common import CommonAttentionMetadata
from mla_jax.metadata.context_parallel import ContextShard
from tests.metadata.batches import LARGE, RX, SMALL, batches
from tests.metadata.test_builder import BUILDER, absorbing

UPSTREAM = UpstreamMLABuilder(native=BUILDER)


def upstream(batch, bucket=None) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.of(batch.common(bucket), "latent")


def test_the_same_facts_under_other_names():
    c = upstream(RX, CommonBucket(requests=6, tokens=8, pages=(4,)))
    assert c.query_start_loc.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert c.slot_mapping.tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    assert c.is_valid_token().tolist() == [True] * 7 + [False]
    assert c.token_to_req.tolist() == [0, 1, 2, 2, 2, 3, 3, 0]
    assert c.num_computed_tokens().tolist() == [4, 8, 2, 4, 0, 0]
    counts = (c.num_reqs, c.num_actual_tokens, c.max_query_len, c.max_seq_len)
    assert [int(n) for n in counts] == [4, 7, 3, 9]
    assert c.batch_size == 6


def test_lengths_of_one_rank():
    shard = ContextShard(ranks=2, rank=0, interleave=4)
    c = CommonAttentionMetadata.of(RX.common(), "latent", shard=shard)
    assert c.dcp_local_seq_lens is not None
    assert c.dcp_local_seq_lens.tolist() == [4, 5, 4, 4]


@given(batches())
def test_built_larger_is_padded(batch):
    """Built in a larger bucket = padded to it, bit for bit, and cut back to the real rows."""
    small, large = (jax.device_get(upstream(batch, b)) for b in (SMALL, LARGE))
    padded = small.pad_to(LARGE)
    assert jax.tree.structure(large) == jax.tree.structure(padded)
    for a, b in zip(jax.tree.leaves(large), jax.tree.leaves(padded), strict=True):
        assert a.dtype == b.dtype == np.int32
        assert np.array_equal(a, b)
    one, other = small.unpadded(batch.host), large.unpadded(batch.host)
    assert one.slot_mapping.shape == (batch.host.num_tokens,)
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "positions"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_another_cache_group():
    c = upstream(RX)
    table = jnp.full((4, 5), 3, jnp.int32)
    other = c.with_block_table(table, c.slot_mapping + 1)
    assert other.bucket.pages == (5,)
    assert np.array_equal(other.slot_mapping, c.slot_mapping + 1)
    assert other.seq_lens is c.seq_lens


@pytest.mark.parametrize("native", [BUILDER, absorbing()])
def test_other_tables_are_those_of_another_build(native):
    builder = UpstreamMLABuilder(native=native)
    decision = builder.decide(RX.host)
    common = RX.common(decision.common_bucket)
    meta = builder.build(0, common, decision)
    draft = builder.build_for_drafting(common, decision, draft=1)
    for a, b in zip(jax.tree.leaves(meta), jax.tree.leaves(draft), strict=True):
        assert np.array_equal(a, b)
    table, slots = common.page_tables["latent"] + 1, meta.slots + 4
    updated = builder.update_block_table(meta, table, slots)
    other = jax.tree.map(lambda x: x, common)
    other.page_tables["latent"], other.slots["latent"] = table, slots
    rebuilt = builder.build(0, other, decision)
    for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(rebuilt), strict=True):
        assert np.array_equal(a, b)


def test_capture_is_a_step_of_nothing():
    meta = UPSTREAM.build_for_cudagraph_capture(UPSTREAM.decide(RX.host))
    assert (np.asarray(meta.slots) == -1).all()
    assert UPSTREAM.reorder_batch_threshold == 1
    assert not UPSTREAM.use_cascade_attention(100)
