"""V3.2's attention as a whole beside dense attention over the same sequences, both of this library.

Sparse: index scores, the best of them, and attention over these rows of a 656-byte cache. Dense:
bf16 rows; decodes absorbed over all pages, a prefill expanded over its context in chunks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.chunked_prefill import attention
from benchmarks.sparse_decode import (
    CHECKED,
    PAGE,
    RANK,
    ROPE,
    TOPK,
    drawn_cache,
    error_of,
    floor_us,
)
from benchmarks.timing import isolated_us, once
from mla_jax import ops
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.metadata.buckets import Ladder, StepLadder
from mla_jax.metadata.common import GroupSpec, HostBatch, build_common
from mla_jax.metadata.deepseek_v32 import V32Metadata, V32MetadataBuilder
from mla_jax.metadata.indexer import Indexer
from mla_jax.model.deepseek_v32 import slots_of
from mla_jax.model.step import LOOPS_IN_GRAPHS
from mla_jax.pallas.sparse_attention import xla

__all__ = ["CASES", "METHOD", "Case", "run"]

HEADS, NOPE, SCALE = 128, 128, 192**-0.5
INDEX_HEADS, INDEX_DIM, INDEX_BYTES = 64, 128, 132
WORKSPACE = 32768  # rows of a chunk of the dense prefill's context
CODES_PER_S = 1600e12
TOLERANCE = 0.02
METHOD = (
    f"{HEADS} heads, index {INDEX_HEADS} x {INDEX_DIM}, {TOPK} selected, 656-byte rows and "
    f"132-byte index keys, all in shuffled pages of {PAGE}; queries, weights and metadata are "
    "given, projections are not in it; dense: the same lengths over bf16 rows, decodes absorbed "
    "with the step's plan, the prefill through MLA.prefill, the up-projection of its context in "
    f"it, {WORKSPACE} rows a chunk; sparse_us, dense_us: summed kernel time of an isolated call "
    "(kineto), select_us and attend_us the same of both parts compiled alone, sparse_span_us and "
    "dense_span_us: start of the first kernel to end of the last; medians, all in turn in one "
    "process; ratio: dense_us / sparse_us; error: of the attention over the rows that were "
    "selected, four tokens against float32; floors: parts added up, each the larger of bytes / "
    "4.25 TB/s and FLOPs / 800 TFLOP/s, of scores 1600"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``requests`` of ``queries`` new tokens each behind ``context`` others."""

    requests: int
    queries: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        return f"{kind}_{self.requests}x{self.queries}_k{self.context}"

    @property
    def tokens(self) -> int:
        return self.requests * self.queries

    @property
    def length(self) -> int:
        """Keys of a request's last token."""
        return self.context + self.queries

    @property
    def pairs(self) -> int:
        """Queries and the keys that they see."""
        n = self.queries
        return self.requests * (n * self.context + n * (n + 1) // 2)

    @property
    def floor_us(self) -> float:
        """Of the sparse side: index keys once, then each token's own rows."""
        bytes_us = floor_us(self.requests * self.length, INDEX_BYTES, 0, 0)
        flops_us = 1e6 * 2 * self.pairs * INDEX_HEADS * INDEX_DIM / CODES_PER_S
        rows = 656 if self.queries == 1 else 0  # neighbours of a prefill share what they read
        attended = floor_us(self.tokens * TOPK, rows, HEADS, 2 * RANK + ROPE)
        return max(bytes_us, flops_us) + attended

    @property
    def dense_floor_us(self) -> float:
        """Of the dense side; a prefill's keys are projected up once."""
        keys, row = self.requests * self.length, 2 * (RANK + ROPE)
        if self.queries == 1:
            return floor_us(keys, row, HEADS, 2 * RANK + ROPE)
        up = floor_us(keys, 0, HEADS, RANK * 2 * NOPE)
        return up + max(floor_us(self.pairs, 0, HEADS, 2 * NOPE + ROPE), floor_us(keys, row, 0, 0))


CASES = (
    Case(requests=128, queries=1, context=32767),
    Case(requests=1, queries=2048, context=131072),
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, one after the other: each needs much memory."""
    del peers
    for case in (c for c in CASES if c.name in chosen):
        meta, dense = (_metadata(case, topk) for topk in (None, case.length))
        facts = {"case": case.name, "floor_us": case.floor_us}
        facts["dense_floor_us"] = case.dense_floor_us
        yield facts | _row(case, meta, dense, turn)


def _row(case: Case, meta: V32Metadata, dense: V32Metadata, turn: AbstractContextManager) -> dict:
    """Both sides on their caches, and the parts of the sparse one."""
    latent, keys, rows = _caches(case, meta)
    q, weights, q_latent, q_rope = _queries(case)
    selecting = q, weights, keys, meta
    select = _compiled(_selected, *selecting)
    slots = select(*selecting)
    attending = q_latent, q_rope, latent, slots
    attend = _compiled(_attended, *attending)
    whole = _compiled(_sparse, *selecting, q_latent, q_rope, latent)
    other, given = _dense(case, q_latent, q_rope, rows, dense)
    with turn:
        error = _error(q_latent, q_rope, latent, slots, attend(*attending))
        sides = {
            "sparse": functools.partial(once, whole, (*selecting, q_latent, q_rope, latent)),
            "dense": functools.partial(once, other, given),
            "select": functools.partial(once, select, selecting),
            "attend": functools.partial(once, attend, attending),
        }
        found = isolated_us(sides)
    row: dict[str, Any] = {"error": error}
    row |= {f"{name}_us": side.sum for name, side in found.items()}
    row |= {f"{name}_span_us": found[name].span for name in ("sparse", "dense")}
    row["ratio"] = row["dense_us"] / row["sparse_us"]
    row["ratio_span"] = row["dense_span_us"] / row["sparse_span_us"]
    row["kernels"], row["dense_kernels"] = (found[k].kernels for k in ("sparse", "dense"))
    print({"case": case.name} | row, flush=True)
    return row


def _compiled(function: Callable[..., Any], *given: Any) -> Any:
    options = LOOPS_IN_GRAPHS if jax.default_backend() == "gpu" else None
    return jax.jit(function, compiler_options=options).lower(*given).compile()


def _selected(q, weights, keys: RecordCache, meta: V32Metadata) -> jax.Array:
    """The slots of each token's best positions."""
    chosen = ops.select_topk(q, weights, keys, meta.indexer, TOPK)
    return slots_of(chosen, meta, page=PAGE)


def _attended(q_latent, q_rope, latent: RecordCache, slots) -> jax.Array:
    return ops.mla_sparse_decode(q_latent, q_rope, latent, slots, scale=SCALE).out


def _sparse(q, weights, keys, meta, q_latent, q_rope, latent) -> jax.Array:
    return _attended(q_latent, q_rope, latent, _selected(q, weights, keys, meta))


def _error(q_latent, q_rope, latent, slots, out) -> float:
    """Of the attention; the selection must have as many distinct rows as it can."""
    lists = np.asarray(slots[:CHECKED])
    assert all(len(np.unique(x[x >= 0])) == TOPK for x in lists), "not distinct rows"
    q = jnp.concatenate([q_latent[:CHECKED], q_rope[:CHECKED]], axis=-1)
    facts = {"scale": SCALE, "value": RANK, "out_dtype": jnp.float32}
    want = xla.sparse_decode(q, ((latent, slots[:CHECKED], None),), **facts).out
    error = error_of(out, want)
    assert error < TOLERANCE, f"relative error {error}"
    return error


def _dense(
    case: Case, q_latent, q_rope, rows: LatentCache, meta: V32Metadata
) -> tuple[Any, tuple[Any, ...]]:
    """The dense side compiled, and its arguments."""
    view = meta.dense
    assert view is not None
    if case.queries == 1:
        sizes = {"tokens": case.tokens, "heads": HEADS, "dtype": q_latent.dtype}
        plan = jax.jit(functools.partial(ops.plan_decode, **sizes))(view.decode, rows)

        def decode(q_latent, q_rope, rows, view, plan):
            return ops.mla_decode(q_latent, q_rope, rows, view, scale=SCALE, plan=plan).out

        given = q_latent, q_rope, rows, view.decode, plan
        return _compiled(decode, *given), given
    graph, state = attention(HEADS)
    keys = jax.random.split(jax.random.key(7), 3)
    shapes = (case.tokens, HEADS, NOPE + ROPE), (case.tokens, RANK), (case.tokens, ROPE)
    new = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]

    def prefill(state, q, latent, k_rope, rows, new, context):
        layer = nnx.merge(graph, state)
        return layer.prefill(q, latent, k_rope, rows, new, context).out.astype(q.dtype)

    given = state, *new, rows, view.prefill, view.context
    return _compiled(prefill, *given), given


def _queries(case: Case) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (INDEX_HEADS, INDEX_DIM), (INDEX_HEADS,), (HEADS, RANK), (HEADS, ROPE)
    return tuple(
        jax.random.normal(k, (case.tokens, *s), jnp.float32 if i == 1 else jnp.bfloat16)
        for i, (k, s) in enumerate(zip(keys, shapes, strict=True))
    )


def _caches(case: Case, meta: V32Metadata) -> tuple[RecordCache, RecordCache, LatentCache]:
    """Latents as records, index keys, and latents in bf16: all pages full of normal numbers."""
    pages = case.requests * meta.page_table.shape[1]
    widths, key = (RANK, ROPE), jax.random.key(0)
    latent, rows = (drawn_cache(form, pages, PAGE, widths, key) for form in ("ds_mla", "bf16"))
    keys = RecordCache.alloc(num_pages=pages, page=PAGE, format="index_key")
    each = pages * PAGE // 8

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(keys, i):
        x = jax.random.normal(jax.random.fold_in(key, i), (each, INDEX_DIM), jnp.bfloat16)
        return ops.write_rows(keys, (x,), i * each + jnp.arange(each, dtype=jnp.int32))

    for i in range(8):
        keys = fill(keys, i)
    assert isinstance(latent, RecordCache) and isinstance(rows, LatentCache)
    return jax.block_until_ready((latent, keys, rows))


def _metadata(case: Case, topk: int | None) -> V32Metadata:
    """Of one step of the case, its pages shuffled; dense if ``topk`` allows for it."""
    width = -(-case.length // PAGE)
    ladder = StepLadder(
        decodes=Ladder("decode requests", (case.requests,)),
        prefills=Ladder("prefill requests", (case.requests,)),
        prefill_tokens=Ladder("prefill tokens", (case.tokens,)),
        pages=Ladder("pages of one request", (width,)),
    )
    latent, keys = GroupSpec("latent", PAGE), GroupSpec("index_keys", PAGE)
    builder = V32MetadataBuilder(
        ladder=ladder, latent=latent, indexer=Indexer(group=keys), topk=topk,
        context_rows=WORKSPACE,
    )  # fmt: skip
    lens = np.full(case.requests, case.queries, np.int32)
    host = HostBatch.of(lens, lens + np.int32(case.context))
    decision = builder.decide(host)
    bucket = decision.common_bucket
    ids = np.random.default_rng(0).permutation(case.requests * width).astype(np.int32)
    table = jnp.asarray(ids.reshape(case.requests, width))
    starts, seq_lens, requests = map(jnp.asarray, host.padded_arrays(bucket))

    @jax.jit
    def build(starts, seq_lens, requests, table, decision):
        tables = {group.name: table for group in builder.groups}
        facts = {"bucket": bucket, "groups": builder.groups}
        return builder.build(build_common(starts, seq_lens, tables, requests, **facts), decision)

    return build(starts, seq_lens, requests, table, decision)
