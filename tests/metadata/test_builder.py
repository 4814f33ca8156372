"""The builder's life: decide on the host, build on the device, warm up, draft, change tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import MetadataError, UnsupportedError
from mla_jax.metadata.buckets import CommonBucket, Ladder, MLABucket, MLALadder
from mla_jax.metadata.builder import (
    AttentionMetadataBuilder,
    GraphSupport,
    MLACommonMetadataBuilder,
    warmup_common,
)
from mla_jax.metadata.check import check
from tests.metadata.batches import RX, make

LADDER = MLALadder(
    decodes=Ladder("decode requests", (2, 4)),
    prefills=Ladder("prefill requests", (2, 4)),
    prefill_tokens=Ladder("prefill tokens", (16,)),
    pages=Ladder("pages of one request", (4,)),
    context_rows=8,
)
BUILDER = MLACommonMetadataBuilder(ladder=LADDER, page=4)
build = jax.jit(BUILDER.build)


def test_the_example_step():
    decision = BUILDER.decide(RX.host)
    assert decision.bucket == MLABucket(
        decodes=2, prefills=2, prefill_tokens=16, pages=4, context_rows=8
    )
    meta = build(RX.common(decision.common_bucket), decision)
    assert meta.decode is not None
    assert meta.context is not None
    assert meta.slots[:8].tolist() == [12, 8, 34, 35, 16, 4, 5, -1]
    assert meta.decode.seq_lens.tolist() == [5, 9]
    assert meta.context.context_starts.tolist() == [0, 2, 6]
    check(meta, page=4, num_pages=10)


def test_parts_that_a_step_lacks():  # edges 2 and 3
    decodes = make([1, 1, 1], [5, 9, 5], page=4)
    decision = BUILDER.decide(decodes.host)
    assert (decision.bucket.prefills, decision.bucket.context_rows) == (0, 0)
    prompts = make([3, 2], [3, 2], page=4)
    decision = BUILDER.decide(prompts.host)
    assert (decision.bucket.decodes, decision.bucket.context_rows) == (0, 0)
    assert int(decision.num_prefills) == 2


def test_equal_buckets_are_one_object():
    assert BUILDER.decide(RX.host).bucket is BUILDER.decide(RX.host).bucket


def test_warm_up_has_the_structure_of_a_step():
    decision = BUILDER.decide(RX.host)
    common = warmup_common(decision.common_bucket, page=4)
    warm = jax.eval_shape(BUILDER.build_for_warmup, common, decision)
    real = jax.eval_shape(BUILDER.build, RX.common(decision.common_bucket), decision)
    assert jax.tree.structure(warm) == jax.tree.structure(real)
    assert jax.tree.leaves(warm) == jax.tree.leaves(real)
    meta = build(common, BUILDER.warmup_decision(decision))
    assert (np.asarray(meta.slots) == -1).all()
    assert not np.asarray(meta.real).any()
    check(meta, page=4)


def test_drafts_and_other_tables():
    decision = BUILDER.decide(RX.host)
    common = RX.common(decision.common_bucket)
    meta = build(common, decision)
    draft = BUILDER.build_for_drafting(common, decision, draft=1)
    for a, b in zip(jax.tree.leaves(meta), jax.tree.leaves(draft), strict=True):
        assert np.array_equal(a, b)
    other = common.with_block_table(common.block_table_tensor + 1, common.slot_mapping)
    updated = BUILDER.update_block_table(meta, other.block_table_tensor, meta.slots + 4)
    rebuilt = build(other, decision)
    assert np.array_equal(updated.decode.page_table, rebuilt.decode.page_table)
    assert np.array_equal(updated.context.page_table, rebuilt.context.page_table)
    assert not BUILDER.use_cascade_attention(100)


def test_support_is_ordered_data():
    assert GraphSupport.NEVER < GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert min(GraphSupport.ALWAYS, GraphSupport.UNIFORM_BATCH) == GraphSupport.UNIFORM_BATCH
    assert BUILDER.support is GraphSupport.ALWAYS
    assert BUILDER.reorder_batch_threshold == 1


class Plain(AttentionMetadataBuilder[int, int]):
    """The least a builder can be."""

    def decide(self, host):
        return host.num_reqs

    def build(self, common, decision, *, common_prefix_len=0, fast_build=False):
        return decision + fast_build

    def warmup_decision(self, decision):
        return 0


def test_defaults_of_a_builder():
    plain, common = Plain(), RX.common()
    assert plain.build_for_warmup(common, 7) == 0
    assert plain.build_for_drafting(common, 7, draft=0) == 8
    with pytest.raises(UnsupportedError, match=r"Plain.update_block_table.*Would accept: build"):
        plain.update_block_table(7, common.block_table_tensor, common.slot_mapping)


def test_a_step_above_the_ladder_is_refused():
    with pytest.raises(MetadataError, match="number of decode requests: given 5"):
        BUILDER.decide(make([1] * 5, [2] * 5, page=4).host)


@pytest.mark.parametrize(("name", "size"), [("tokens", 19), ("requests", 5)])
def test_common_metadata_of_another_bucket_is_refused(name, size):
    decision = BUILDER.decide(RX.host)
    other = dataclasses.replace(decision.common_bucket, **{name: size})
    with pytest.raises(
        MetadataError, match=f"{name} of the common metadata's bucket: given {size}"
    ):
        build(RX.common(other), decision)


def test_programs_are_rungs():
    """A thousand random steps compile one program per bucket, and never more."""
    traced = []
    ladder = MLALadder(
        decodes=Ladder("decodes", (2,)),
        prefills=Ladder("prefills", (1,)),
        prefill_tokens=Ladder("prefill tokens", (8,)),
        pages=Ladder("pages", (4,)),
        context_rows=8,
    )
    builder = MLACommonMetadataBuilder(ladder=ladder, page=4)

    @jax.jit
    def step(common, decision):
        traced.append(decision.bucket)
        return builder.build(common, decision)

    rng = np.random.default_rng(0)
    commons: dict[CommonBucket, object] = {}
    used = set()
    for _ in range(1000):
        decodes, prompts = rng.choice([(1, 0), (2, 0), (0, 1), (1, 1)])
        q = np.concatenate([np.ones(decodes), rng.integers(2, 9, prompts)]).astype(int)
        batch = make(q, q + 4 * rng.integers(0, 2, len(q)), page=4, table=np.ones((len(q), 4)))
        decision = builder.decide(batch.host)
        bucket = decision.common_bucket
        if bucket not in commons:
            commons[bucket] = warmup_common(bucket, page=4)
        step(commons[bucket], decision)
        used.add(decision.bucket)
    assert len(traced) == len(set(traced)) == len(used)
    assert set(traced) == used


def test_a_step_waits_for_nothing():
    decision = BUILDER.decide(RX.host)
    jaxpr = jax.make_jaxpr(BUILDER.build)(RX.common(decision.common_bucket), decision)
    assert "callback" not in str(jaxpr)
    assert all(v.aval.dtype in (jnp.int32, jnp.bool_) for v in jaxpr.jaxpr.outvars)
