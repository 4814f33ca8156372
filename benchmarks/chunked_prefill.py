"""Prefill over cached context: gather, up-project, attend, merge; against the torch assembly."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import paths
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.metadata.compat.chunked_context import pack_chunks
from mla_jax.metadata.compat.workspace import estimate_prefill_memory
from mla_jax.metadata.mla import ContextMetadata, PrefillMetadata
from mla_jax.model.mla import MLA
from mla_jax.model.presets import V3
from mla_jax.model.step import LOOPS_IN_GRAPHS
from mla_jax.types import cdiv

__all__ = ["CASES", "METHOD", "Case", "run"]

PAGE, RANK, ROPE, NOPE, V = 64, 512, 64, 128, 128
ROW = RANK + ROPE
CALLS = 3  # of one step of the slope
METHOD = (
    "queries, new latents and cache are given, heads come out; both sides walk the same workspace "
    "rows; peer: F.linear, index_select, keys written per head, FlashAttention-3, merges in "
    "Triton, one CUDA graph, its plan on the host and not counted; us: summed kernel time of an "
    "isolated call (kineto), span_us: start of its first kernel to end of its last, slope_us: "
    "slope of wall time over calls in a row, launched one by one; ours compiled with "
    "LOOPS_IN_GRAPHS; medians, both sides interleaved in one process on the same arrays; "
    "random-normal data, shuffled pages; tflops and floor_percent are of span_us"
)


@dataclass(frozen=True)
class Case:
    """Requests with so many new tokens each on so much context each."""

    name: str
    heads: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: int = 32768  # of the workspace

    @property
    def pairs(self) -> float:
        """Unmasked pairs of query and key."""
        both = zip(self.queries, self.contexts, strict=True)
        return sum(n * c + n * (n + 1) / 2 for n, c in both)

    @property
    def flops(self) -> float:
        up = RANK * (NOPE + V) * (sum(self.queries) + sum(self.contexts))
        return 2.0 * self.heads * (up + (NOPE + ROPE + V) * self.pairs)

    @property
    def bytes(self) -> float:
        tokens = sum(self.queries) * self.heads * (NOPE + ROPE + V)
        return 2.0 * (tokens + ROW * (sum(self.queries) + sum(self.contexts)))


def _ragged() -> tuple[int, ...]:
    draw = random.Random(1)
    return (0, *(draw.randint(1, 16383) for _ in range(6)), 16384)


CASES = (
    Case("h128_q2048_c30000", 128, (2048,), (30000,)),
    Case("h16_q2048_c30000", 16, (2048,), (30000,)),
    Case("h128_8xq512_cragged", 128, (512,) * 8, _ragged()),
)
EXTRA = (
    Case("h128_q2048_c131072", 128, (2048,), (131072,)),
    Case("h128_q2048_c0", 128, (2048,), (0,)),
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, row by row; the device is used inside ``turn`` alone."""
    if peers is not None:
        from benchmarks import fa3

        fa3.load(peers)
    for case, made in [(c, _Made.of(c)) for c in (*CASES, *EXTRA) if c.name in chosen]:
        with turn:
            row = _row(case, made, peers is not None and case in CASES)
        print(paths.line(row), flush=True)
        yield row


def attention(heads: int) -> tuple[nnx.GraphDef, nnx.State]:
    """A layer with these heads, of which only the up-projection matters here."""
    dims = dataclasses.replace(V3.dims, heads=heads, q_rank=None)
    config = dataclasses.replace(V3, hidden=64, dims=dims)
    return nnx.split(MLA(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A compiled case."""

    program: jax.stages.Compiled
    state: nnx.State
    scale: float

    @classmethod
    def of(cls, case: Case) -> "_Made":
        graph, state = attention(case.heads)

        def prefill(state, q, latent, k_rope, cache, table, query_starts, context_starts):
            new = PrefillMetadata(query_starts=query_starts, key_starts=query_starts)
            context = ContextMetadata(
                rows=case.rows, page_table=table, context_starts=context_starts,
                query_starts=query_starts,
            )  # fmt: skip
            layer = nnx.merge(graph, state)
            return layer.prefill(q, latent, k_rope, cache, new, context).out.astype(q.dtype)

        step = jax.jit(prefill, compiler_options=LOOPS_IN_GRAPHS)
        program = step.lower(state, *_specs(case)).compile()
        return cls(program=program, state=state, scale=nnx.merge(graph, state).scale)


def _specs(case: Case) -> tuple:
    spec, requests, tokens = jax.ShapeDtypeStruct, len(case.queries), sum(case.queries)
    pages = max(sum(cdiv(c, PAGE) for c in case.contexts), 1)
    cache = LatentCache(
        pages=spec((pages, PAGE, ROW), jnp.bfloat16), scale=spec((), jnp.float32), rank=RANK,
        format=FORMATS["bf16"],
    )  # fmt: skip
    return (
        spec((tokens, case.heads, NOPE + ROPE), jnp.bfloat16),
        spec((tokens, RANK), jnp.bfloat16),
        spec((tokens, ROPE), jnp.bfloat16),
        cache,
        spec((requests, max(cdiv(max(case.contexts), PAGE), 1)), jnp.int32),
        spec((requests + 1,), jnp.int32),
        spec((requests + 1,), jnp.int32),
    )


def _inputs(case: Case) -> tuple:
    keys = jax.random.split(jax.random.key(3), 4)
    specs = _specs(case)
    draw = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, specs[:3], strict=False)]
    pages = jax.random.normal(keys[3], specs[3].pages.shape, jnp.bfloat16)
    cache = dataclasses.replace(specs[3], pages=pages, scale=jnp.float32(1))
    order = np.random.default_rng(7).permutation(pages.shape[0]).astype(np.int32)
    table, k = np.zeros(specs[4].shape, np.int32), 0
    for r, c in enumerate(case.contexts):
        n = cdiv(c, PAGE)
        table[r, :n], k = order[k : k + n], k + n
    starts = [np.cumsum([0, *lens]).astype(np.int32) for lens in (case.queries, case.contexts)]
    return jax.block_until_ready((*draw, cache, *map(jnp.asarray, (table, *starts))))


def _error(case: Case, made: _Made, args: tuple, out: jax.Array) -> float:
    """Worst relative error of some tokens and heads against float32."""
    q, latent, k_rope, cache, table, starts, _ = args
    heads = np.array([0, case.heads // 2, case.heads - 1])
    up = made.state["kv_up"]["kernel"][...][:, heads]
    new = jnp.concatenate([latent, k_rope], axis=-1)
    slots, table = cache.pages.shape[0] * PAGE, np.asarray(table)
    longest = max(n + c for n, c in zip(case.queries, case.contexts, strict=True))
    worst = 0.0
    for r, (n, c) in enumerate(zip(case.queries, case.contexts, strict=True)):
        p, first = np.arange(c), int(starts[r])
        index = np.zeros(longest, np.int32)
        index[:c] = table[r, p // PAGE] * PAGE + p % PAGE
        index[c : c + n] = slots + first + np.arange(n)
        for t in (0, n // 2, n - 1):
            token = jnp.int32(first + t)
            want = _reference(
                q[token][heads], cache.pages, new, jnp.asarray(index), jnp.int32(c + t + 1), up,
                made.scale,
            )  # fmt: skip
            got = out[token][heads].astype(jnp.float32)
            worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    return worst


@jax.jit
def _reference(q, pages, new, index, seen, up, scale):
    """One token, some heads, in float32: q [heads, qk], up [rank, heads, nope + v]."""
    highest = {"precision": "highest", "preferred_element_type": jnp.float32}
    rows = jnp.concatenate([pages.reshape(-1, ROW), new])[index].astype(jnp.float32)
    kv = jnp.einsum("kr,rhd->khd", rows[:, :RANK], up.astype(jnp.float32), **highest)
    q = q.astype(jnp.float32)
    s = jnp.einsum("hd,khd->hk", q[:, :NOPE], kv[..., :NOPE], **highest)
    s = scale * (s + jnp.einsum("hd,kd->hk", q[:, NOPE:], rows[:, RANK:], **highest))
    s = jnp.where(jnp.arange(index.shape[0]) < seen, s, -jnp.inf)
    return jnp.einsum("hk,khd->hd", jax.nn.softmax(s), kv[..., NOPE:], **highest)


def _peer(case: Case, made: _Made, args: tuple) -> tuple[paths.Peer, jax.Array]:
    """The assembly as a graph, and its result."""
    from benchmarks import torch_mla as tm

    q, latent, k_rope, cache, table, starts, _ = args
    up = made.state["kv_up"]["kernel"][...]
    assembly = tm.ChunkedPrefill(up, rank=RANK, nope=NOPE, scale=made.scale)
    lens, starts = np.array(case.contexts, np.int32), np.asarray(starts)
    packed = pack_chunks(lens, starts, case.rows, PAGE)
    chunks = assembly.plan(packed, np.asarray(table), PAGE)
    given = [tm.tensor(x) for x in (q, latent, k_rope)]
    rows = tm.tensor(cache.pages).view(-1, ROW)
    starts = tm.ints(starts)
    graph = tm.Replayed(lambda: assembly(*given, rows, starts, max(case.queries), chunks))
    graph.once()
    name = "cuBLAS + FlashAttention-3"
    return paths.Peer(name=name, once=graph.once, many=graph.many), jnp.from_dlpack(graph.result)


def _row(case: Case, made: _Made, with_peer: bool) -> dict:
    """Check both sides and time them."""
    args = _inputs(case)

    def once():
        return jax.block_until_ready(made.program(made.state, *args))

    def many(n):
        for _ in range(n):
            out = made.program(made.state, *args)
        out.block_until_ready()

    error = _error(case, made, args, once())
    assert error < paths.TOLERANCE, f"{case.name}: relative error {error}"
    peer, peer_error = None, None
    if with_peer:
        peer, result = _peer(case, made, args)
        peer_error = _error(case, made, args, result)
        peer = paths.checked(case.name, peer_error, peer)
    planned = estimate_prefill_memory(case.rows, dataclasses.replace(V3.dims, heads=case.heads))
    facts = {
        "peer_error": peer_error,
        "planned_mib": (planned.workspace + planned.projected) / 2**20,
        "temp_mib": made.program.memory_analysis().temp_size_in_bytes / 2**20,
    }
    sizes = {"calls": CALLS, "flops": case.flops, "bytes": case.bytes}
    return paths.row(case.name, once, many, peer, error=error, **sizes, **facts)
