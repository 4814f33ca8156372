"""The builder's life: decide on the host, build on the device, warm up, draft, change tables."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import Ladder, MLABucket, MLALadder
from mla_jax.metadata.builder import MLAMetadataBuilder
from mla_jax.metadata.check import check
from mla_jax.metadata.common import GroupSpec, warmup_common
from tests.metadata.batches import RX, make

LADDER = MLALadder(
    decodes=Ladder("decode requests", (2, 4)),
    prefills=Ladder("prefill requests", (2, 4)),
    prefill_tokens=Ladder("prefill tokens", (16,)),
    pages=Ladder("pages of one request", (4,)),
    context_rows=8,
)
LATENT = GroupSpec("latent", 4)
BUILDER = MLAMetadataBuilder(ladder=LADDER, group=LATENT)
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


def test_decode_rows_behind_the_decodes_see_nothing():
    """The view of two decodes has one, and behind it a prefill, which is no decode's keys."""
    step = make([1, 3], [9, 5], page=4)
    decision = BUILDER.decide(step.host)
    meta = build(step.common(decision.common_bucket), decision)
    assert meta.decode.seq_lens.tolist() == [9, 0]
    assert meta.decode.query_starts.tolist() == [0, 1, 1]


def test_parts_that_a_step_lacks():  # edges 2 and 3
    decodes = make([1, 1, 1], [5, 9, 5], page=4)
    decision = BUILDER.decide(decodes.host)
    assert (decision.bucket.prefills, decision.bucket.context_rows) == (0, 0)
    prompts = make([3, 2], [3, 2], page=4)
    decision = BUILDER.decide(prompts.host)
    assert (decision.bucket.decodes, decision.bucket.context_rows) == (0, 8)
    assert int(decision.num_prefills) == 2
    meta = build(prompts.common(decision.common_bucket), decision)
    assert int(meta.context.num_chunks()) == 0  # the loop over the workspace runs no turn


def test_a_prompt_of_one_token_is_a_decode():
    decision = BUILDER.decide(make([1, 1, 3], [9, 1, 3], page=4).host)
    assert (int(decision.num_decodes), int(decision.num_prefills)) == (2, 1)
    two = BUILDER.decide(make([1, 2], [9, 2], page=4).host)
    assert (int(two.num_decodes), int(two.num_prefills)) == (1, 1)
    behind = BUILDER.decide(make([1, 3, 1], [9, 3, 1], page=4).host)
    assert (int(behind.num_decodes), int(behind.num_prefills)) == (1, 2)


def test_an_empty_step_takes_the_smallest_rung():
    decision = BUILDER.decide(make([], [], page=4).host)
    assert decision.bucket == BUILDER.rungs()[0].bucket
    assert (decision.bucket.decodes, decision.bucket.prefills) == (2, 0)


def absorbing(run: int = 4, most: int = 3) -> MLAMetadataBuilder:
    """Prefills of at most ``most`` tokens on some context run over their pages."""

    def absorb(queries, contexts):
        return run if max(queries) <= most and any(contexts) else 0

    return dataclasses.replace(BUILDER, absorb=absorb, absorb_run=run)


def test_absorbed_steps_are_the_builders_decision():
    builder = absorbing()
    decision = builder.decide(RX.host)
    assert decision.bucket == MLABucket(
        decodes=4, prefills=2, prefill_tokens=16, pages=4, context_rows=0, absorb=4
    )
    meta = jax.jit(builder.build)(RX.common(decision.common_bucket), decision)
    assert meta.prefill is meta.context is None
    check(meta, page=4, num_pages=10)
    assert builder.decide(make([1, 1], [5, 9], page=4).host).bucket.absorb == 0
    assert builder.decide(make([3], [3], page=4).host).bucket.absorb == 0
    assert {d.bucket.absorb for d in builder.rungs()} == {0, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"absorb": lambda q, c: 0}, "absorb_run: given 0; allowed: what absorb returns"),
        ({"absorb_run": 4}, "absorb_run: given 4; allowed: 0"),
        ({"group": GroupSpec("latent", 4, ratio=2)}, "ratio of the latent group: given 2"),
    ],
)
def test_settings_that_do_not_agree(changes, message):
    with pytest.raises(MetadataError, match=message):
        dataclasses.replace(BUILDER, **changes)


def test_a_run_length_that_no_program_has():
    with pytest.raises(MetadataError, match="absorb's run length: given 9; allowed: 0 or 4"):
        dataclasses.replace(BUILDER, absorb=lambda q, c: 9, absorb_run=4).decide(RX.host)


def test_no_absorbed_rows_by_default():
    """``runs`` of the default bucket is its decodes (defect 10: a division by zero)."""
    assert LADDER.bucket(decodes=2, prefills=0, prefill_tokens=0, pages=1).runs == 2


def test_equal_buckets_are_one_object():
    assert BUILDER.decide(RX.host).bucket is BUILDER.decide(RX.host).bucket


def test_warm_up_has_the_structure_of_a_step():
    decision = BUILDER.decide(RX.host)
    common = warmup_common(decision.common_bucket, BUILDER.groups)
    nothing = BUILDER.warmup_decision(decision)
    warm = jax.eval_shape(BUILDER.build, common, nothing)
    real = jax.eval_shape(BUILDER.build, RX.common(decision.common_bucket), decision)
    assert jax.tree.structure(warm) == jax.tree.structure(real)
    assert jax.tree.leaves(warm) == jax.tree.leaves(real)
    meta = build(common, nothing)
    assert (np.asarray(meta.slots) == -1).all()
    assert not np.asarray(meta.real).any()
    check(meta, page=4)


def test_a_step_above_the_ladder_is_refused():
    with pytest.raises(MetadataError, match="number of decode requests: given 5"):
        BUILDER.decide(make([1] * 5, [2] * 5, page=4).host)


@pytest.mark.parametrize(("name", "size"), [("tokens", 19), ("requests", 5), ("pages", (5,))])
def test_common_metadata_of_another_bucket_is_refused(name, size):
    decision = BUILDER.decide(RX.host)
    other = dataclasses.replace(decision.common_bucket, **{name: size})
    with pytest.raises(
        MetadataError, match=re.escape(f"{name} of the common metadata's bucket: given {size}")
    ):
        build(RX.common(other), decision)


def test_default_rungs_are_few():
    """The numbers that the docstring of ``MLALadder.default`` states."""
    ladder = MLALadder.default(
        max_requests=128, max_prefill_tokens=512, max_pages=64, context_rows=4096
    )
    assert [b.decodes for b in ladder.buckets() if not b.prefills] == [8, 32, 128]
    mixed = [(b.decodes, b.prefill_tokens) for b in ladder.buckets() if b.prefills]
    assert mixed == [(128, 128), (0, 512), (128, 512)]
    assert len(ladder.buckets(absorb=48)) == 8
    assert len({(b.pages, b.context_rows) for b in ladder.buckets() if b.prefills}) == 1
    long = MLALadder.default(
        max_requests=33, max_prefill_tokens=96, max_pages=16384, context_rows=64
    )
    assert long.decodes.rungs == (8, 33)
    assert long.prefill_tokens.rungs == (96,)
    assert long.pages.rungs == (256, 2048, 16384)


def lone(n):
    return {"decodes": 0, "prefills": 1, "prefill_tokens": n, "pages": 1}


def test_a_lone_prompt_takes_the_fewest_tokens():
    ladder = MLALadder.default(
        max_requests=128, max_prefill_tokens=512, max_pages=64, context_rows=4096
    )
    assert ladder.bucket(**lone(100)).tokens == 256
    assert ladder.bucket(**lone(129)).tokens == 512
    assert ladder.bucket(**lone(129) | {"decodes": 1}).tokens == 640


def test_pairs_that_do_not_hold_every_step():
    with pytest.raises(MetadataError, match=r"pairs of decodes and prefill tokens: .* \(4, 16\)"):
        dataclasses.replace(LADDER, mixed=((0, 16), (2, 16)))


@given(st.data())
def test_a_ladder_returns_exactly_what_it_lists(data):
    """Every size that can be asked for has a listed bucket, and every listed one is returned."""
    sizes = st.sets(st.integers(1, 9), min_size=1, max_size=3)
    drawn = {n: Ladder.of(n, data.draw(sizes)) for n in ("decodes", "prefills", "prefill_tokens")}
    pairs = ()
    if data.draw(st.booleans()):
        d, t = drawn["decodes"], drawn["prefill_tokens"]
        every = [(i, j) for i in (0, *d.rungs) for j in t.rungs]
        pairs = (*data.draw(st.sets(st.sampled_from(every))), (d.largest, t.largest))
    ladder = MLALadder(**drawn, pages=Ladder("pages", (1, 3)), mixed=pairs, context_rows=4)
    most = [range(drawn[n].largest + 1) for n in drawn]
    found = set()
    for d, p, t in itertools.product(*most):
        if (p == 0) != (t == 0) or p > t:
            continue
        for pages, absorb in itertools.product(range(4), (0, 2)):
            given = {"decodes": d, "prefills": p, "prefill_tokens": t, "pages": pages}
            bucket = ladder.bucket(**given, absorb=absorb)
            assert all(getattr(bucket, name) >= n for name, n in given.items())
            found.add(bucket)
            if not absorb:
                assert ladder.step(**given) in ladder.steps()
    assert found == set(ladder.buckets(absorb=2))
    assert len(ladder.buckets(absorb=2)) == len(found)
    assert len(set(ladder.steps())) == len(ladder.steps()) == len(ladder.buckets())


def test_a_step_waits_for_nothing():
    decision = BUILDER.decide(RX.host)
    jaxpr = jax.make_jaxpr(BUILDER.build)(RX.common(decision.common_bucket), decision)
    assert "callback" not in str(jaxpr)
    assert all(v.aval.dtype in (jnp.int32, jnp.bool_) for v in jaxpr.jaxpr.outvars)
