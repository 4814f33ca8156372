"""Cached context in chunks by the kernels, on a GPU; widths of DeepSeek-V3, poisoned memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import ops
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.metadata.mla import ContextMetadata, PrefillMetadata, query_runs
from mla_jax.model.linear import contract
from mla_jax.model.mla import MLA
from mla_jax.model.presets import V3
from mla_jax.model.step import LOOPS_IN_GRAPHS
from mla_jax.types import AttnState, cdiv
from tests.cases import starts
from tests.compare import same_bits

pytestmark = pytest.mark.gpu

PAGE, HEADS, TOKENS, WIDTH = 64, 16, 700, 20
DIMS = dataclasses.replace(V3.dims, heads=HEADS, q_rank=None)
QUERIES, CONTEXTS = (200, 1, 0, 300, 130), (1000, 640, 77, 0, 1279)


@functools.cache
def layer():
    config = dataclasses.replace(V3, hidden=64, dims=DIMS)
    attn = MLA(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return nnx.split(attn)


@functools.cache
def chunked(rows: int, backend: str, options=None):
    graph, state = layer()

    @functools.partial(jax.jit, compiler_options=dict(options or ()))
    def run(q, latent, k_rope, cache, table, query_starts, context_starts):
        new = PrefillMetadata(query_starts=query_starts, key_starts=query_starts)
        context = ContextMetadata(
            rows=rows, page_table=table, context_starts=context_starts, query_starts=query_starts
        )
        attn = nnx.merge(graph, state)
        return attn.prefill(q, latent, k_rope, cache, new, context, backend=backend)

    return run


def case(order=range(5)):
    """The requests in some order, every request with the same numbers; the rest is NaN."""
    order = list(order)
    pages = np.full((5 * WIDTH + 1, PAGE, DIMS.row), np.nan, np.float32)
    table = np.full((5, WIDTH), 5 * WIDTH, np.int32)
    queries, contexts = ([x[r] for r in order] for x in (QUERIES, CONTEXTS))
    ids = np.random.default_rng(0).permutation(5 * WIDTH).reshape(5, WIDTH)
    new = np.full((TOKENS, HEADS * DIMS.qk + DIMS.row), np.nan, np.float32)
    qs = starts(queries)
    for i, r in enumerate(order):
        draw = np.random.default_rng(r + 1).standard_normal
        n = cdiv(contexts[i], PAGE)
        table[i, :n] = ids[r, :n]
        rows = np.full((n * PAGE, DIMS.row), np.nan, np.float32)
        rows[: contexts[i]] = draw((contexts[i], DIMS.row))
        pages[table[i, :n]] = rows.reshape(n, PAGE, DIMS.row)
        new[qs[i] : qs[i + 1]] = draw((queries[i], new.shape[1]))
    cache = LatentCache(
        pages=jnp.asarray(pages, jnp.bfloat16),
        scale=jnp.float32(1),
        rank=DIMS.rank,
        format=FORMATS["bf16"],
    )
    q, latent, k_rope = np.split(new, [HEADS * DIMS.qk, HEADS * DIMS.qk + DIMS.rank], axis=1)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q.reshape(TOKENS, HEADS, -1), latent, k_rope)]
    return (*low, cache, *map(jnp.asarray, (table, qs, starts(contexts))))


def close(got: AttnState, want: AttnState, *, lse: float):
    np.testing.assert_allclose(got.lse, want.lse, atol=lse, rtol=1e-3)
    np.testing.assert_allclose(
        np.asarray(got.out, np.float32), np.asarray(want.out, np.float32), atol=3e-2, rtol=3e-2
    )


@pytest.mark.parametrize("rows", [512, 4096])
def test_the_kernels_equal_the_reference(rows):
    args = case()
    state = chunked(rows, "mosaic")(*args)
    close(state, chunked(4096, "xla")(*args), lse=5e-3)
    assert np.isneginf(np.asarray(state.lse)[sum(QUERIES) :]).all()


def test_a_loop_within_a_graph_takes_as_many_turns():
    """One program, several contexts one after the other: none, some chunks, all, some again."""
    *args, contexts = case()
    graphs = chunked(512, "mosaic", tuple(LOOPS_IN_GRAPHS.items()))
    for longest in (0, 600, 4000, 77):
        lens = np.minimum(CONTEXTS, longest)
        given = *args, jnp.asarray(starts(lens), contexts.dtype)
        same_bits(graphs(*given), chunked(512, "mosaic")(*given))


def test_permuted_requests_keep_their_bits():
    """One chunk holds all contexts, so that no cut moves."""
    order = [3, 0, 4, 2, 1]
    state, moved = (chunked(4096, "mosaic")(*case(o)) for o in (range(5), order))
    qs = starts(QUERIES)
    rows = np.concatenate([np.arange(qs[r], qs[r + 1]) for r in order])
    n = len(rows)
    same_bits(
        AttnState(out=moved.out[:n], lse=moved.lse[:n]),
        AttnState(out=state.out[rows], lse=state.lse[rows]),
    )


def test_runs_over_pages_equal_the_expanded_path():
    """The new tokens' rows are written first; the decode kernel takes runs of four queries."""
    q, latent, k_rope, cache, table, qs, _ = case()
    n, page_ids = sum(QUERIES), np.asarray(table).copy()
    pages = np.asarray(cache.pages, np.float32)
    free = iter(sorted(set(range(5 * WIDTH)) - set(page_ids.ravel())))
    wide = np.concatenate([page_ids, np.zeros((5, 6), np.int32)], axis=1)
    rows = np.concatenate([np.asarray(latent, np.float32), np.asarray(k_rope, np.float32)], axis=1)
    for r, (m, c) in enumerate(zip(QUERIES, CONTEXTS, strict=True)):
        for column in range(cdiv(c, PAGE), cdiv(c + m, PAGE)):
            wide[r, column] = next(free)
        p = c + np.arange(m)
        pages[wide[r, p // PAGE], p % PAGE] = rows[int(qs[r]) : int(qs[r]) + m]
    cache = dataclasses.replace(cache, pages=jnp.asarray(pages, jnp.bfloat16))
    lens = jnp.asarray(np.add(QUERIES, CONTEXTS) * (np.array(QUERIES) > 0), jnp.int32)
    graph, state = layer()

    @jax.jit
    def absorbed(q, cache, table, qs, lens):
        attn = nnx.merge(graph, state)
        meta, _ = query_runs(qs, lens, table, longest=4, runs=TOKENS // 4 + 5)
        q_latent = contract("thd,hdr->thr", q[..., : DIMS.nope], attn.absorbed().k)
        part = ops.mla_decode(
            q_latent, q[..., DIMS.nope :], cache, meta, scale=attn.scale, backend="mosaic"
        )
        out = contract("thr,hrv->thv", part.out, attn.absorbed().v)
        return AttnState(out=out, lse=part.lse)

    got = absorbed(q, cache, jnp.asarray(wide), qs, lens)
    want = chunked(4096, "mosaic")(*case())
    real = (AttnState(out=s.out[:n], lse=s.lse[:n]) for s in (got, want))
    close(*real, lse=5e-2)  # queries and values are rounded elsewhere
