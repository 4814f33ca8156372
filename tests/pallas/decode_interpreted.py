"""The Triton program of a decode's values, by the interpreter on the CPU."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.pallas import triton_lib
from mla_jax.pallas.dense_decode import values
from mla_jax.pallas.dense_decode import work_plan as wp
from tests.cases import draw
from tests.pallas.interpreted import call

RANK, WIDTH, HEADS = 64, 64, 5
UNTOUCHED = 7.0


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


def listed(entries):
    """A list of what to merge: the number of rows, then (first slot, pieces, query, token)."""
    table = np.zeros((128, 8), np.int32)
    table[0, 0] = len(entries)
    table[1 : 1 + len(entries), list(wp.MERGE_FIELDS)] = entries
    return table


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("pieces", [1, 2, 15, 70])
def test_pieces_are_merged_and_multiplied(pieces, tokens, rng):
    """The first token in pieces, the second whole, the third nobody's, all others in two pieces.

    Unused rows and the slots behind the last piece are NaN; a piece without a key is too.
    """
    padded, slots = 8, 1 + pieces + 2 * tokens + 20
    part = np.full((slots, 1, 64, RANK), np.nan, np.float16)
    part_lse = np.full((slots, 1, 64), np.nan, np.float32)
    latents = np.full((tokens * padded, RANK), np.nan, np.float16)
    lse = np.full(tokens * padded, UNTOUCHED, np.float32)
    up = draw(rng, HEADS, RANK, WIDTH, dtype="float16", std=RANK**-0.5)
    want, want_lse = np.zeros((tokens, HEADS, RANK)), np.full((tokens, HEADS), -np.inf)
    entries, base = [], 1
    for t in range(tokens):
        rows = slice(t * padded, t * padded + HEADS)
        if t == 1:
            latents[rows] = want[t] = rng.normal(size=(HEADS, RANK)).astype(np.float16)
            want_lse[t] = UNTOUCHED
            continue
        if t == 2:
            entries.append((0, 0, 0, t))
            continue
        n, query = (pieces, 1) if t == 0 else (2, 0)
        at = slice(base, base + n), 0, slice(query * padded, query * padded + HEADS)
        part[at] = rng.normal(size=(n, HEADS, RANK))
        part_lse[at] = 3 * rng.normal(size=(n, HEADS))
        if n > 2:
            part[base + 1, at[1], at[2]], part_lse[base + 1, at[1], at[2]] = np.nan, -np.inf
        powers = np.exp2(part_lse[at].astype(np.float64))
        y = np.where(powers[..., None] > 0, part[at].astype(np.float64), 0.0)
        want[t] = (powers[..., None] * y).sum(0) / powers.sum(0)[:, None]
        want_lse[t] = np.log(powers.sum(0))
        entries.append((base, n, query, t))
        base += n
    given = map(jnp.asarray, (latents, lse, part, part_lse, listed(entries), up))
    out, found = values.merged_values(*given, tokens=tokens, pieces=132)
    wanted = np.einsum("thr,hrv->thv", want.astype(np.float16).astype(np.float64), up)
    np.testing.assert_allclose(np.asarray(out), wanted, rtol=2e-3, atol=3e-3)
    found = np.asarray(found).reshape(tokens, padded)
    np.testing.assert_allclose(found[:, :HEADS], want_lse, rtol=1e-5, atol=1e-5)
    assert (found[:, HEADS:] == UNTOUCHED).all()
