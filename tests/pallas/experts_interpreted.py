"""The Triton programs of the routed experts, run by Triton's interpreter on the CPU.

A test of its own process, because Triton decides when it is imported: ``TRITON_INTERPRET=1 pytest
tests/pallas/experts_interpreted.py``; ``test_grouped_matmul_triton.py`` does. The interpreter
knows no products of bfloat16, so everything is float16. Results begin as NaN, indices as garbage.
"""

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.pallas import triton_lib
from mla_jax.pallas.grouped_matmul import kernels_triton, triton
from tests.pallas.experts import case, judge
from tests.pallas.interpreted import call

SMALL = triton.Tuning(
    rows=16, tail=16, planned=True, group=2,
    gate_columns=32, gate_depth=64, gate_warps=4, gate_stages=2,
    down_columns=64, down_depth=32, down_warps=4, down_stages=2,
)  # fmt: skip
TUNINGS = {
    "planned": SMALL,
    "unplanned": replace(SMALL, planned=False),
    "tail": replace(SMALL, rows=32, tail=16),
    "group": replace(SMALL, group=1),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """``triton_lib.call`` on numpy's memory."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


def run(c, tuning, limit=None):
    return triton.routed_experts(*c.args, limit=limit, tuning=tuning)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("tokens", [1, 30])
def test_against_the_truth(tokens, tuning, rng):
    c = case(rng, tokens, dtype="float16")
    judge(run(c, tuning), c)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_padding_and_experts_without_rows(tuning, rng):
    c = case(rng, 12, experts=9, dtype="float16")
    choices = np.where(c.experts == 4, -1, c.experts)
    choices[[2, 5, 11]] = -1, 9, 1000
    c = c.with_choices(choices).poisoned()
    judge(run(c, tuning, 0.7), c, 0.7)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_all_rows_to_one_expert(tuning, rng):
    c = case(rng, 30, dtype="float16")
    c = c.with_choices(np.full_like(c.experts, 5)).poisoned()
    judge(run(c, tuning), c)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_nobody_at_all(tuning, rng):
    c = case(rng, 3, dtype="float16")
    c = c.with_choices(np.full_like(c.experts, -1)).poisoned()
    judge(run(c, tuning), c)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_a_row_alone_is_the_row_among_neighbours(tuning, rng):
    c = case(rng, 20, dtype="float16")
    whole = np.asarray(run(c, tuning))
    order = rng.permutation(20)
    np.testing.assert_array_equal(np.asarray(run(c.take(order), tuning)), whole[order])
    for t in (0, 13):
        alone = np.full_like(c.experts, -1)
        alone[t] = c.experts[t]
        got = np.asarray(run(c.with_choices(alone).poisoned(), tuning))
        np.testing.assert_array_equal(got[t], whole[t])


@pytest.mark.parametrize("pairs", [1, 16, 17, 200])
def test_the_plan(pairs, rng):
    """Every valid pair once, in order; tiles of one expert, whole groups, -1 behind them."""
    experts, rows, group = 7, 16, 2
    chosen = rng.integers(-2, experts + 2, pairs)
    chosen[chosen == 3] = 5  # no rows for 3, more than a group's for 5
    most = triton.most_tiles(pairs, experts, rows)
    tiles, order = call(
        kernels_triton.plan,
        jnp.asarray(chosen, jnp.int32),
        pairs,
        most,
        out=(triton.spec((most, 8)), triton.spec((pairs,))),
        grid=experts, warps=4, stages=1,
        EXPERTS=experts, BINS=16, CHUNK=16, ROWS=rows, GROUP=group,
    )  # fmt: skip
    tiles, order = np.asarray(tiles), np.asarray(order)
    wanted = [np.flatnonzero(chosen == e) for e in range(experts)]
    np.testing.assert_array_equal(order[: sum(map(len, wanted))], np.concatenate(wanted))
    t = start = 0
    for e, own in enumerate(wanted):
        count = -(-len(own) // rows)
        for i in range(count):
            head = i // group * group
            shape = [e, t + head, min(group, count - head), start + i * rows, start + len(own)]
            np.testing.assert_array_equal(tiles[t + i, :5], shape)
        t, start = t + count, start + len(own)
    assert (tiles[t:, 0] == -1).all()
