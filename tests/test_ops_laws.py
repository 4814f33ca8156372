"""The laws that make absorbing, splitting, chunking and paging free."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.metadata.mla import ContextMetadata, DecodeMetadata, PrefillMetadata
from mla_jax.ops import gather_latent, merge_attn_states, mla_decode, mla_prefill, write_latent
from mla_jax.types import AttnState
from tests.cases import TINY, draw, paged, run, starts
from tests.compare import close_states

D = TINY
SCALE = D.qk**-0.5
WIDTH, PAGE, TOKENS, ROWS = 6, 5, 12, 16


def up_project(w, latent):
    """``[keys, rank] -> [keys, heads, nope + v]``."""
    return jnp.einsum("kr,rhd->khd", latent, w, precision="highest")


def request_batch(seed, *, max_query=4):
    """Three requests with pages, new queries (the last tokens of each), and projections."""
    rng = np.random.default_rng(seed)
    seq_lens = rng.integers(0, WIDTH * PAGE + 1, size=3)
    query_lens = np.minimum(seq_lens, rng.integers(0, max_query + 1, size=3))
    cache, table, rows = paged(
        rng, seq_lens, dims=D, page=PAGE, format="fp32", width=WIDTH,
        spare=20 - sum(-(-int(n) // PAGE) for n in seq_lens),
    )  # fmt: skip
    q = draw(rng, TOKENS, D.heads, D.qk)
    w = draw(rng, D.rank, D.heads, D.nope + D.v, std=D.rank**-0.5)
    rows = np.concatenate([*rows, np.full((90, D.row), np.nan)])[:90].astype(np.float32)
    return cache, table, jnp.asarray(rows), seq_lens, query_lens, jnp.asarray(q), jnp.asarray(w)


def as_arrays(*lens):
    return [jnp.asarray(starts(x)) for x in lens]


def prefill(q, rows, w, query_starts, key_starts, *, causal):
    meta = PrefillMetadata(query_starts=query_starts, key_starts=key_starts)
    kv, k_rope = up_project(w, rows[:, : D.rank]), rows[:, D.rank :]
    return run(mla_prefill, q, kv, k_rope, meta, scale=SCALE, causal=causal, backend=None)


@given(seed=st.integers(0, 2**16))
def test_absorbed_equals_expanded(seed):
    """``q_nope (W_UK c) = (q_nope W_UK) c`` and the value projection is linear; equal lse too."""
    cache, table, rows, seq_lens, query_lens, q, w = request_batch(seed)
    qs, ks = as_arrays(query_lens, seq_lens)
    expanded = prefill(q, rows, w, qs, ks, causal=True)
    w_uk, w_uv = w[..., : D.nope], w[..., D.nope :]
    q_latent = jnp.einsum("thn,rhn->thr", q[..., : D.nope], w_uk, precision="highest")
    meta = DecodeMetadata(
        max_query_len=4, page_table=table, query_starts=qs,
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
    )  # fmt: skip
    state = run(mla_decode, q_latent, q[..., D.nope :], cache, meta, scale=SCALE, backend=None)
    out = jnp.einsum("thr,rhv->thv", state.out, w_uv, precision="highest")
    close_states(AttnState(out=out, lse=state.lse), expanded, atol=1e-5)


@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_chunked_context_equals_whole(seed):
    """Context gathered chunk by chunk and merged with the causal part, against one causal call."""
    cache, table, rows, seq_lens, query_lens, q, w = request_batch(seed)
    context = seq_lens - query_lens
    qs, cs, ks = as_arrays(query_lens, context, seq_lens)
    expected = prefill(q, rows, w, qs, ks, causal=True)

    own = [
        np.arange(s + c, s + n)
        for s, c, n in zip(starts(seq_lens)[:-1], context, seq_lens, strict=True)
    ]
    own = np.concatenate([*own, np.full(TOKENS, 89)])[:TOKENS]
    state = prefill(q, rows[jnp.asarray(own)], w, qs, qs, causal=True)
    meta = ContextMetadata(rows=ROWS, page_table=table, context_starts=cs, query_starts=qs)
    for i in range(int(meta.num_chunks())):
        first, part = meta.chunk(jnp.int32(i))
        held = run(
            gather_latent, cache, table, first, part.key_starts, rows=ROWS, dtype=jnp.float32,
            backend=None,
        )  # fmt: skip
        piece = prefill(q, held, w, qs, part.key_starts, causal=False)
        state = run(merge_attn_states, state, piece, backend=None)
    close_states(state, expected, atol=1e-5)


@given(seed=st.integers(0, 2**16), cut=st.integers(0, 30))
@settings(max_examples=10)
def test_split_keys_equal_whole(seed, cut):
    """States over the keys before and after any cut merge to the state over all."""
    rng = np.random.default_rng(seed)
    q, rows = jnp.asarray(draw(rng, TOKENS, D.heads, D.qk)), jnp.asarray(draw(rng, 30, D.row))
    w = jnp.asarray(draw(rng, D.rank, D.heads, D.nope + D.v, std=D.rank**-0.5))
    qs = jnp.array([0, TOKENS], jnp.int32)

    def part(a, b):
        moved = jnp.roll(rows, -a, axis=0)
        return prefill(q, moved, w, qs, jnp.array([0, b - a], jnp.int32), causal=False)

    merged = run(merge_attn_states, part(0, cut), part(cut, 30), backend=None)
    close_states(merged, part(0, 30), atol=1e-5)


def test_a_request_without_context_keeps_its_bits(rng):
    """Contexts [8, 0]: request 1's context part is empty, so the merge changes no bit of it."""
    q = jnp.asarray(draw(rng, 6, D.heads, D.qk))
    rows = jnp.asarray(draw(rng, 16, D.row))
    w = jnp.asarray(draw(rng, D.rank, D.heads, D.nope + D.v, std=D.rank**-0.5))
    qs = jnp.array([0, 3, 6], jnp.int32)
    own = prefill(q, rows[8:14], w, qs, qs, causal=True)
    context = prefill(q, rows, w, qs, jnp.array([0, 8, 8], jnp.int32), causal=False)
    merged = merge_attn_states(own, context)
    assert np.isneginf(context.lse[3:]).all() and not np.asarray(context.out[3:]).any()
    np.testing.assert_array_equal(merged.out[3:], own.out[3:])
    np.testing.assert_array_equal(merged.lse[3:], own.lse[3:])


@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_page_numbers_do_not_matter(seed):
    """Writing and reading through any page table gives the same bits."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(draw(rng, 20, D.row))
    q = jnp.asarray(draw(rng, 1, D.heads, D.row))
    states = []
    for ids in (np.arange(20), rng.permutation(20)):
        table = jnp.asarray(ids[:5].reshape(1, 5), jnp.int32)
        slots = jnp.asarray(ids[:5].repeat(4) * 4 + np.tile(np.arange(4), 5), jnp.int32)
        pages = jnp.full((20, 4, D.row), jnp.nan)
        cache, _, _ = paged(rng, [1], dims=D, page=4, format="fp32", spare=19)
        cache = jax.tree.map(lambda a, p=pages: p if a.ndim else a, cache)
        args = cache, x[:, : D.rank], x[:, D.rank :], slots
        cache = run(write_latent, *args, backend=None)
        meta = DecodeMetadata(
            max_query_len=1, page_table=table, seq_lens=jnp.array([18], jnp.int32),
            query_starts=jnp.array([0, 1], jnp.int32),
        )  # fmt: skip
        args = q[..., : D.rank], q[..., D.rank :], cache, meta
        states.append(run(mla_decode, *args, scale=SCALE, backend=None))
    np.testing.assert_array_equal(states[0].out, states[1].out)
    np.testing.assert_array_equal(states[0].lse, states[1].lse)
