"""Cached context in chunks, against attention over everything at once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import ops
from mla_jax.metadata.mla import ContextMetadata, PrefillMetadata
from mla_jax.model.mla import MLA
from mla_jax.types import AttnState, cdiv
from tests.cases import paged, starts
from tests.compare import close_states, same_bits
from tests.model import tiny

PAGE, REQUESTS, TOKENS, KEYS = 4, 3, 20, 120
DIMS = tiny.config().dims
WIDTH = 10  # pages of a request


@functools.cache
def layer() -> MLA:
    return tiny.model(tiny.config(None, layers=1, sparse_layers=(False,))).layers[0].attn


@functools.cache
def chunked(rows: int):
    """A jitted prefill with a workspace of so many rows; 0 = without context."""
    graph, state = nnx.split(layer())

    @jax.jit
    def run(q, latent, k_rope, cache, table, query_starts, context_starts):
        new = PrefillMetadata(query_starts=query_starts, key_starts=query_starts)
        context = ContextMetadata(
            rows=rows,
            page_table=table,
            context_starts=context_starts,
            query_starts=query_starts,
        )
        attn = nnx.merge(graph, state)
        return attn.prefill(q, latent, k_rope, cache, new, context if rows else None)

    return run


@functools.cache
def whole():
    """Context and new tokens as the keys of one causal attention."""
    attn = layer()

    @jax.jit
    def run(q, rows, query_starts, key_starts):
        meta = PrefillMetadata(query_starts=query_starts, key_starts=key_starts)
        kv = attn.kv_up(rows[:, : DIMS.rank])
        return ops.mla_prefill(q, kv, rows[:, DIMS.rank :], meta, scale=attn.scale)

    return run


def case(contexts, queries, seed=0):
    """Arguments of ``chunked``, and every request's rows ``[context + new, row]``."""
    rng = np.random.default_rng(seed)
    spare = REQUESTS * WIDTH - sum(cdiv(n, PAGE) for n in contexts)
    cache, table, rows = paged(
        rng, contexts, dims=DIMS, page=PAGE, format="fp32", width=WIDTH, spare=spare
    )
    qs = starts(queries)
    q = np.full((TOKENS, DIMS.heads, DIMS.qk), np.nan, np.float32)
    new = np.full((TOKENS, DIMS.row), np.nan, np.float32)
    q[: qs[-1]] = rng.standard_normal((qs[-1], DIMS.heads, DIMS.qk))
    new[: qs[-1]] = rng.standard_normal((qs[-1], DIMS.row))
    every = [np.concatenate([rows[r], new[qs[r] : qs[r + 1]]]) for r in range(len(queries))]
    latent, k_rope = new[:, : DIMS.rank], new[:, DIMS.rank :]
    args = q, latent, k_rope, cache, table, qs, starts(contexts)
    return list(map(functools.partial(jax.tree.map, jnp.asarray), args)), every


def at_once(args, every) -> AttnState:
    lens = [len(x) for x in every]
    rows = np.full((KEYS, DIMS.row), np.nan, np.float32)
    rows[: sum(lens)] = np.concatenate(every)
    return whole()(args[0], jnp.asarray(rows), args[5], jnp.asarray(starts(lens)))


batches = st.tuples(
    st.lists(st.integers(0, 33), min_size=REQUESTS, max_size=REQUESTS),
    st.lists(st.integers(0, 6), min_size=REQUESTS, max_size=REQUESTS),
)


@pytest.mark.parametrize("rows", [3, 8, 100])
@given(batch=batches)
def test_any_chunk_plan_equals_everything_at_once(rows, batch):
    """Lengths are multiples of neither page nor chunk; some contexts and queries are empty."""
    args, every = case(*batch)
    close_states(chunked(rows)(*args), at_once(args, every))


@given(batch=batches, order=st.permutations(range(REQUESTS)))
def test_the_order_of_requests_is_the_order_of_results(batch, order):
    args, _ = case(*batch)
    state = chunked(8)(*args)
    q, latent, k_rope, cache, table, qs, cs = args
    tokens = np.concatenate([np.arange(qs[r], qs[r + 1]) for r in order]).astype(np.int32)
    queries, contexts = np.diff(qs)[list(order)], np.diff(cs)[list(order)]
    behind = np.arange(len(tokens), TOKENS)
    rows = np.concatenate([tokens, behind]).astype(np.int32)
    moved = chunked(8)(
        *(x[rows] for x in (q, latent, k_rope)),
        cache,
        table[np.array(order)],
        *map(jnp.asarray, (starts(queries), starts(contexts))),
    )
    close_states(moved, AttnState(out=state.out[rows], lse=state.lse[rows]))


@pytest.mark.parametrize("contexts", [(0, 0, 0), (0, 17, 0)])
def test_a_request_without_context_keeps_its_bits(contexts):
    args, _ = case(contexts, (4, 5, 6))
    with_context, without = chunked(8)(*args), chunked(0)(*args)
    alone = np.concatenate([np.arange(4), np.arange(9, TOKENS)] if any(contexts) else [range(15)])
    same_bits(*(AttnState(out=s.out[alone], lse=s.lse[alone]) for s in (with_context, without)))


@pytest.mark.parametrize(
    ("contexts", "turns"), [((0, 0, 0), 0), ((0, 9, 0), 2), ((8, 0, 8), 2), ((3, 3, 3), 2)]
)
def test_only_the_owners_chunks_are_walked(contexts, turns, monkeypatch):
    walked = []
    gather = ops.gather_latent

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: walked.append(1))
        return gather(*args, **kwargs)

    monkeypatch.setattr(ops, "gather_latent", counted)
    args, _ = case(contexts, (4, 5, 6))
    chunked.__wrapped__(8)(*args)
    jax.effects_barrier()
    assert len(walked) == turns == cdiv(sum(contexts), 8)


def compiled(width: int, rows: int):
    """The program for page tables of this width."""
    args, _ = case((0, 0, 0), (4, 5, 6))
    args[4] = jax.ShapeDtypeStruct((REQUESTS, width), jnp.int32)
    return chunked(rows).lower(*args).compile()


def test_memory_does_not_know_the_length_of_a_context():
    """16 times the pages cost the loop nothing but a table's worth of indices."""
    short, long = (compiled(w, 8).memory_analysis().temp_size_in_bytes for w in (WIDTH, 16 * WIDTH))
    assert long - short <= 4 * REQUESTS * 15 * WIDTH
    assert compiled(WIDTH, 64).memory_analysis().temp_size_in_bytes > short


def test_the_running_state_is_not_copied():
    """The body of the loop reads the state and writes it once, by the fused merge."""
    shape = re.escape(f"f32[{TOKENS},{DIMS.heads},{DIMS.v}]")
    computations = compiled(WIDTH, 8).as_text().split("\n\n")
    carried = rf"= {shape}\S* get-tuple-element\(%\S*arg_tuple"
    (body,) = (c for c in computations if re.search(carried, c))
    assert re.findall(rf"= {shape}\S* ([\w-]+)\(", body) == ["get-tuple-element", "fusion"]
