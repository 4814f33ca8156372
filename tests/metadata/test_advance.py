"""Decode steps on the device, without the host between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.check import check
from mla_jax.metadata.compat.advance import DecodeInputs, advance_mla, advance_step
from mla_jax.metadata.mla import build_mla

TABLE = jnp.array([[7, 3], [2, 9], [0, 0]])
START = DecodeInputs(
    input_tokens=jnp.array([1, 2, 3]),
    input_positions=jnp.array([3, 4, 0]),
    seq_lens=jnp.array([4, 5, 1]),
    slot_mapping=jnp.array([31, 36, 5]),
)


def test_one_step():
    """attention edges 21 and 22: padding writes nothing, a page boundary is crossed."""
    step = advance_step(START, jnp.array([11, 12, 13]), TABLE, jnp.int32(2), block_size=4)
    assert step.input_tokens.tolist() == [11, 12, 0]
    assert step.input_positions.tolist() == [4, 5, 0]
    assert step.slot_mapping.tolist() == [12, 37, -1]
    assert step.seq_lens.tolist() == [5, 6, 1]


def test_many_steps_without_the_host():
    """Three steps in one scan are three single steps; past the table nothing is written."""

    def one(inputs, _):
        step = advance_step(inputs, inputs.input_tokens + 1, TABLE, jnp.int32(2), block_size=4)
        return step, step.slot_mapping

    last, slots = jax.jit(lambda s: jax.lax.scan(one, s, length=5))(START)
    assert slots.tolist() == [
        [12, 37, -1],
        [13, 38, -1],
        [14, 39, -1],
        [15, -1, -1],
        [-1, -1, -1],
    ]
    assert last.seq_lens.tolist() == [9, 10, 1]
    assert last.input_tokens.tolist() == [6, 7, 0]


BUCKET = MLABucket(decodes=3, prefills=0, prefill_tokens=0, pages=2, context_rows=0)


def built(seq_lens):
    starts = jnp.array([0, 1, 2, 2])
    return build_mla(starts, jnp.array(seq_lens), TABLE, jnp.int32(2), bucket=BUCKET, page=4)


def test_metadata_advances_as_if_built_anew():
    def steps(meta, n):
        return jax.lax.fori_loop(0, n, lambda _, m: advance_mla(m, page=4), meta)

    advanced = jax.jit(steps, static_argnums=1)(built([4, 5, 0]), 3)
    rebuilt = built([7, 8, 0])
    for a, b in zip(jax.tree.leaves(advanced), jax.tree.leaves(rebuilt), strict=True):
        assert np.array_equal(a, b)
    check(advanced, page=4, num_pages=10)


def test_prefills_do_not_advance():
    bucket = MLABucket(decodes=0, prefills=1, prefill_tokens=2, pages=2, context_rows=0)
    meta = build_mla(
        jnp.array([0, 2]), jnp.array([2]), TABLE[:1], jnp.int32(0), bucket=bucket, page=4
    )
    with pytest.raises(MetadataError, match="bucket to advance"):
        advance_mla(meta, page=4)
