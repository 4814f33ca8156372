"""The Triton programs of the routed experts, run by Triton's interpreter on the CPU.

A test of its own process, because Triton decides when it is imported: ``TRITON_INTERPRET=1 pytest
tests/pallas/experts_interpreted.py``; ``test_grouped_matmul_triton.py`` does. The interpreter
knows no products of bfloat16, so everything is float16. Results begin as NaN, indices as garbage.
"""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import choosing
from mla_jax.config import MoEConfig
from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import AddNorm
from mla_jax.pallas.fp8_matmul import mosaic as fp8
from mla_jax.pallas.fp8_matmul import rows_triton as fp8_rows
from mla_jax.pallas.fp8_matmul import triton as few
from mla_jax.pallas.grouped_matmul import kernels_triton, mosaic, rows_triton, tiles, triton
from mla_jax.pallas.router import triton as router
from tests.cases import draw
from tests.pallas.experts import case, following, judge, judge_added
from tests.pallas.interpreted import call
from tests.pallas.test_fp8_matmul import experts as experts_fp8
from tests.pallas.test_fp8_matmul import weight, wide

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
@pytest.mark.parametrize("tokens", [7, 30])
def test_all_rows_to_one_expert(tokens, tuning, rng):
    """All choices of each, so that a token has several rows of one expert."""
    c = case(rng, tokens, dtype="float16")
    c = c.with_choices(np.full_like(c.experts, 5)).poisoned()
    judge(run(c, tuning), c)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_nobody_at_all(tuning, rng):
    c = case(rng, 3, dtype="float16")
    c = c.with_choices(np.full_like(c.experts, -1)).poisoned()
    judge(run(c, tuning), c)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("tokens", [16, 20])
def test_a_row_alone_is_the_row_among_neighbours(tokens, tuning, rng):
    c = case(rng, tokens, dtype="float16")
    whole = np.asarray(run(c, tuning))
    order = rng.permutation(tokens)
    np.testing.assert_array_equal(np.asarray(run(c.take(order), tuning)), whole[order])
    for t in (0, 13):
        alone = np.full_like(c.experts, -1)
        alone[t] = c.experts[t]
        got = np.asarray(run(c.with_choices(alone).poisoned(), tuning))
        np.testing.assert_array_equal(got[t], whole[t])


@pytest.mark.parametrize("hidden", [128, 192])
def test_added_to_a_residual_and_normalised(hidden, rng):
    """In one program, also of a width that is no power of two; a token without an expert."""
    c = case(rng, 9, hidden=hidden, dtype="float16")
    choices = c.experts.copy()
    choices[3], choices[5, 1] = -1, 1000
    c = c.with_choices(choices).poisoned()
    then = following(c, rng)
    tuning = replace(SMALL, planned=False)
    got = triton.routed_experts(*c.args, limit=None, tuning=tuning, then=then)
    judge_added(got, run(c, tuning), then)
    np.testing.assert_array_equal(np.asarray(got[0])[3], np.asarray(then.residual)[3])


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


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "step", "most", "group"),
    [
        (700, 3, 7, 32, 96, 2),
        (1, 1, 3, 16, 64, 8),
        (513, 2, 40, 16, 48, 8),
        (600, 2, 5, 32, 192, 4),
    ],
)
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_plan_of_many_rows(tokens, topk, count, step, most, group, cluster, rng):
    """The definition's, with experts that nobody chose and choices that are no expert."""
    experts = rng.integers(-1, count + 2, (tokens, topk))
    experts = jnp.asarray(np.where(experts == 3, 1, experts), jnp.int32)
    facts = {"step": step, "most": most, "group": group, "cluster": cluster}
    got, want = mosaic.plan(experts, count, **facts), tiles.lay_out(experts, count, **facts)
    np.testing.assert_array_equal(got.places, want.places)
    np.testing.assert_array_equal(got.used, want.used)
    used = int(want.used[0])
    np.testing.assert_array_equal(np.asarray(got.table)[:used, :5], want.table[:used, :5])
    assert (np.asarray(got.table)[used:, tiles.EXPERT] == -1).all()


CHOICES = MoEConfig(experts=16, topk=3, width=64, shared=0, method="greedy")


@pytest.mark.parametrize("real", [(0,), (7,), range(8), (1, 2, 5), ()], ids=str)
def test_experts_that_choose_for_themselves(real, rng, monkeypatch):
    """A trial (``benchmarks.choosing``); tokens share experts, and some scores are equal."""
    c = case(rng, 8, experts=CHOICES.experts, dtype="float16")
    kernel = jnp.repeat(jnp.asarray(draw(rng, 128, 8, dtype="float32")), 2, axis=1)
    present = jnp.isin(jnp.arange(8), jnp.asarray(real, jnp.int32))
    x, *weights_of_experts = map(jnp.asarray, (c.x, c.gate, c.up, c.down))

    def results():
        weights, chosen = router.route_tokens(x, kernel, None, present, moe=CHOICES)
        given = x, *weights_of_experts, weights, chosen
        tuning = replace(SMALL, planned=False)
        return triton.routed_experts(*given, limit=None, tuning=tuning), chosen

    want, chosen = results()
    launched = []

    def counted(kernel, *args, **facts):
        launched.append(kernel)
        return call(kernel, *args, **facts)

    monkeypatch.setattr(triton_lib, "call", choosing.Choosing(counted))
    got, same = results()
    assert choosing.gate_up in launched and kernels_triton.gate_up not in launched
    np.testing.assert_array_equal(np.asarray(same), np.asarray(chosen))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert not np.asarray(got)[~present].any()


def placed(rng):
    """``(x, places, weights)``: some choices without a row, rows that are nobody's."""
    tokens, topk, hidden, rows = 9, 3, 512, 40
    places = rng.permutation(rows)[: tokens * topk].reshape(tokens, topk).astype(np.int32)
    places[4] = places[2, 1] = -1
    x = rng.normal(size=(tokens, hidden)).astype(np.float16)
    return x, places, rng.random((tokens, topk)).astype(np.float32), rows


def test_rows_go_to_their_places_and_back(rng):
    x, places, weights, rows = placed(rng)
    tokens, topk, hidden = *places.shape, x.shape[1]
    spread = call(
        rows_triton.permute, jnp.asarray(x), jnp.asarray(places),
        out=triton.spec((rows, hidden), x.dtype), grid=tokens, warps=4, stages=1,
        TOPK=topk, HIDDEN=hidden, BLOCK=256,
    )  # fmt: skip
    own = places >= 0
    for t, k in zip(*np.nonzero(own), strict=True):
        np.testing.assert_array_equal(spread[places[t, k]], x[t])
    others = np.setdiff1d(np.arange(rows), places)
    assert np.isnan(np.asarray(spread)[others]).all()
    assert not isinstance(spread, tuple)
    given = spread, jnp.asarray(places), jnp.asarray(np.where(own, weights, np.nan))
    back = mosaic.back(*given, None)
    assert isinstance(back, jax.Array)
    share = np.where(own, weights, 0).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(back, share * x.astype(np.float32), rtol=2e-3, atol=1e-4)
    assert not np.asarray(back)[4].any()
    then = AddNorm(*(jnp.asarray(rng.normal(size=s), x.dtype) for s in (x.shape, hidden)), 1e-6)
    judge_added(mosaic.back(*given, then), back, then)


def test_rows_in_e4m3_have_a_scale_for_every_span(rng):
    """By themselves, and on the way to their places."""
    x, places, _, rows = placed(rng)
    x[:, :128] *= 50
    x[3, 128:256] = 0
    values, scales = fp8.quantise(jnp.asarray(x), room=16)
    tokens, topk = places.shape
    top = np.abs(x.astype(np.float32).reshape(tokens, -1, 128)).max(axis=2)
    np.testing.assert_allclose(np.asarray(scales).T[:tokens], np.where(top == 0, 1, top / 448))
    spread, spread_scales = call(
        fp8_rows.permute, jnp.asarray(x), jnp.asarray(places), rows,
        out=(triton.spec((rows, 512), fp8.E4M3), triton.spec((4, rows), jnp.float32)),
        grid=tokens, warps=4, stages=1, TOPK=topk, HIDDEN=512, SPANS=2,
    )  # fmt: skip
    scales = np.asarray(scales)[:, :tokens]
    wide = np.asarray(values, np.float32)[:tokens] * np.repeat(scales.T, 128, axis=1)
    close = np.abs(wide - x) <= np.abs(x) / 16 + scales.T.repeat(128, axis=1) / 512
    assert close.mean() > 0.9  # the interpreter rounds up to powers of two wrongly; a GPU does not
    for t, k in zip(*np.nonzero(places >= 0), strict=True):
        p = places[t, k]
        assert np.asarray(spread)[p].tobytes() == np.asarray(values)[t].tobytes()
        np.testing.assert_array_equal(np.asarray(spread_scales)[:, p], scales[:, t])


@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (8, 2), (9, 1), (40, 2)])
@pytest.mark.parametrize(("out", "into"), [(192, 256), (64, 1152)])
def test_products_of_e4m3_weights(tokens, groups, out, into, rng):
    """Tiles of all sizes; channels whole and in pieces."""
    w = weight(rng, groups * out, into, std=into**-0.5)
    x = draw(rng, tokens, groups * into, dtype="float16")
    got = np.asarray(few.matmul_fp8(jnp.asarray(x), w, groups=groups))
    assert got.dtype == np.float16
    rows, matrices = x.reshape(tokens, groups, into), wide(w).reshape(groups, out, into)
    want = np.einsum("tgi,goi->tgo", rows.astype(np.float64), matrices).reshape(tokens, -1)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 1792, 128), (7, 256, 128), (40, 256, 128), (7, 128, 640)]
)
def test_experts_of_e4m3_weights(tokens, hidden, width, rng):
    """With a plan and without, in pieces and whole, with tiles of 8 and 16 rows."""
    c, args = experts_fp8(rng, tokens, hidden=hidden, width=width, dtype="float16")
    judge(few.routed_experts_fp8(*args, limit=None), c)
    for choices in (np.full_like(c.experts, 5), np.where(c.experts == 4, -1, c.experts)):
        c = c.with_choices(choices)
        judge(few.routed_experts_fp8(*args[:-1], jnp.asarray(choices), limit=None), c)
