"""One DeepSeek-V3 attention layer, projections and cache write included, against torch."""

import dataclasses
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
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.mla import build_mla
from mla_jax.model.mla import MLA, Absorbed, plan_step
from mla_jax.model.presets import V3
from mla_jax.model.rope import cos_sin, rotate
from mla_jax.types import cdiv

__all__ = ["CASES", "METHOD", "Case", "run"]

PAGE = 64
D = V3.dims
WEIGHTS = V3.hidden * (D.q_rank + D.row) + D.q_rank * D.heads * D.qk + D.heads * D.v * V3.hidden
METHOD = (
    "hidden states in, hidden states out, new rows written to the cache; the step's metadata and "
    "the plan of decode are given to both sides; peer: F.linear and bmm, small Triton kernels for "
    "the rotation, FlashMLA (decode) or FlashAttention-3 with keys written per head (prefill), "
    "one CUDA graph; us: summed kernel time of an isolated call (kineto), span_us: start of its "
    "first kernel to end of its last, slope_us: slope of wall time over calls in a row, ours "
    "launched one by one; medians, both sides interleaved in one process on equal data; tflops, "
    "gbs and floor_percent are of span_us"
)


@dataclass(frozen=True)
class Case:
    """Requests of so many new tokens on so much context each."""

    name: str
    requests: int
    queries: int
    context: int
    calls: int  # of one step of the slope

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def bucket(self) -> MLABucket:
        tokens = self.requests * self.queries
        return MLABucket(
            decodes=self.requests if self.decode else 0,
            prefills=0 if self.decode else self.requests,
            prefill_tokens=0 if self.decode else tokens,
            pages=cdiv(self.queries + self.context, PAGE),
            context_rows=0,
        )

    @property
    def flops(self) -> float:
        n = self.queries
        pairs = self.requests * (n * self.context + n * (n + 1) / 2)
        width = 2 * D.rank + D.rope if self.decode else D.qk + D.v
        weights = WEIGHTS + D.heads * D.rank * (D.nope + D.v)
        return 2.0 * (self.requests * n * weights + D.heads * width * pairs)

    @property
    def bytes(self) -> float:
        weights = WEIGHTS + D.heads * D.rank * (D.nope + D.v)
        tokens = self.requests * self.queries
        return 2.0 * (weights + self.requests * self.context * D.row + 2 * tokens * V3.hidden)


CASES = (
    Case("v3_decode_b128_k4096", 128, 1, 4095, 20),
    Case("v3_prefill_8192", 1, 8192, 0, 4),
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, row by row; the device is used inside ``turn`` alone."""
    if peers is not None:
        from benchmarks import fa3, flashmla

        fa3.load(peers)
        flashmla.load(peers)
    for case, made in [(c, _Made.of(c)) for c in CASES if c.name in chosen]:
        with turn:
            row = _row(case, made, peers is not None)
        print(paths.line(row), flush=True)
        yield row


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A compiled case and its weights."""

    meta: jax.stages.Compiled
    program: jax.stages.Compiled
    given: tuple[nnx.State, Absorbed]

    @classmethod
    def of(cls, case: Case) -> "_Made":
        layer = MLA(V3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        given = state, layer.absorbed()

        x, cache, *batch = _specs(case)

        def metadata(starts, lens, table, decodes):
            meta = build_mla(starts, lens, table, decodes, bucket=case.bucket, page=PAGE)
            return meta, plan_step(V3.dims, V3.rope, meta, cache, dtype=x.dtype)

        def attend(given, cache, x, meta, plan):
            state, absorbed = given
            return nnx.merge(graph, state)(x, meta, cache, absorbed=absorbed, plan=plan)

        shared = jax.eval_shape(metadata, *batch)
        program = jax.jit(attend, donate_argnums=(1,)).lower(given, cache, x, *shared).compile()
        return cls(meta=jax.jit(metadata).lower(*batch).compile(), program=program, given=given)


def _specs(case: Case) -> tuple:
    spec, b = jax.ShapeDtypeStruct, case.bucket
    cache = LatentCache(
        pages=spec((b.requests * b.pages, PAGE, D.row), jnp.bfloat16), scale=spec((), jnp.float32),
        rank=D.rank, format=FORMATS["bf16"],
    )  # fmt: skip
    ints = [(b.requests + 1,), (b.requests,), (b.requests, b.pages), ()]
    return spec((b.tokens, V3.hidden), jnp.bfloat16), cache, *(spec(s, jnp.int32) for s in ints)


def _inputs(case: Case) -> tuple:
    x, cache, *_ = _specs(case)
    b, keys = case.bucket, jax.random.split(jax.random.key(3))
    pages = jax.random.normal(keys[1], cache.pages.shape, jnp.bfloat16)
    cache = dataclasses.replace(cache, pages=pages, scale=jnp.float32(1))
    table = np.random.default_rng(7).permutation(pages.shape[0]).reshape(b.requests, b.pages)
    batch = (
        np.arange(b.requests + 1) * case.queries,
        np.full(b.requests, case.queries + case.context),
        table,
        np.asarray(b.decodes),
    )
    x = jax.random.normal(keys[0], x.shape, x.dtype)
    return jax.block_until_ready((x, cache, *(jnp.asarray(a, jnp.int32) for a in batch)))


def _weights(given: tuple[nnx.State, Absorbed]) -> dict[str, jax.Array]:
    state, absorbed = given
    found = {k: state[k]["kernel"][...] for k in ("q_down", "q_up", "kv_down", "kv_up", "out")}
    norms = {k: state[k]["scale"][...] for k in ("q_norm", "kv_norm")}
    return found | norms | {"k_absorb": absorbed.k, "v_absorb": absorbed.v}


def _error(case: Case, made: _Made, args: tuple, y: jax.Array) -> float:
    """Worst relative error of some tokens against float32."""
    x, cache, _, _, table, _ = args
    worst, n = 0.0, case.queries
    for r in sorted({0, case.requests // 2, case.requests - 1}):
        prior = cache.pages[table[r]].reshape(-1, D.row)[: case.context]
        mine = x[r * n : (r + 1) * n]
        for t in sorted({0, n // 2, n - 1}):
            want = _reference(_weights(made.given), mine, prior, jnp.int32(t))
            got = y[r * n + t].astype(jnp.float32)
            worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    return worst


@jax.jit
def _reference(w, x, prior, t):
    """Token ``t`` of one request's new tokens ``x``, in float32, heads expanded."""
    w, x, prior = jax.tree.map(lambda a: a.astype(jnp.float32), (w, x, prior))

    def product(spec, a, b):
        return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=jnp.float32)

    def norm(a, scale):
        return scale * a / jnp.sqrt(jnp.mean(a * a, axis=-1, keepdims=True) + V3.eps)

    angles = cos_sin(prior.shape[0] + jnp.arange(x.shape[0]), V3.rope)
    down = product("th,hr->tr", x, w["kv_down"])
    k_rope = rotate(down[:, D.rank :], *angles, interleaved=True)
    latent = norm(down[:, : D.rank], w["kv_norm"])
    rows = jnp.concatenate([prior, jnp.concatenate([latent, k_rope], axis=-1)])
    kv = product("kr,rhd->khd", rows[:, : D.rank], w["kv_up"])
    q = norm(product("h,hr->r", x[t], w["q_down"]), w["q_norm"])
    q = product("r,rhd->hd", q, w["q_up"])
    q_rope = rotate(q[None, :, D.nope :], *(a[t][None] for a in angles), interleaved=True)[0]
    s = product("hd,khd->hk", q[:, : D.nope], kv[..., : D.nope])
    s = V3.scale * (s + product("hd,kd->hk", q_rope, rows[:, D.rank :]))
    s = jnp.where(jnp.arange(rows.shape[0]) <= prior.shape[0] + t, s, -jnp.inf)
    heads = product("hk,khd->hd", jax.nn.softmax(s), kv[..., D.nope :])
    return product("hd,hdm->m", heads, w["out"])


def _peer(case: Case, made: _Made, args: tuple, slots, positions) -> tuple[paths.Peer, jax.Array]:
    """The layer as a graph over its own copy of the cache, and its result."""
    import torch

    from benchmarks import torch_mla as tm

    x, cache, starts, lens, table, _ = args
    angles = jax.jit(lambda p: cos_sin(p, V3.rope))(positions)
    weights, pages = _weights(made.given), tm.tensor(cache.pages).clone()
    slots = tm.tensor(slots).to(torch.int64)
    if case.decode:
        layer = tm.DecodeLayer(weights, D, *angles, scale=V3.scale)
        given = tm.tensor(x), pages, slots, tm.tensor(table), tm.tensor(lens)
        name = "cuBLAS + FlashMLA"
    else:
        layer = tm.PrefillLayer(weights, D, *angles, scale=V3.scale)
        given = tm.tensor(x), pages.view(-1, D.row), slots, tm.tensor(starts), case.queries
        name = "cuBLAS + FlashAttention-3"
    graph = tm.Replayed(lambda: layer(*given))
    graph.once()
    return paths.Peer(name=name, once=graph.once, many=graph.many), jnp.from_dlpack(graph.result)


def _row(case: Case, made: _Made, with_peer: bool) -> dict:
    """Check both sides and time them."""
    args = _inputs(case)
    meta, plan = made.meta(*args[2:])
    slots, positions = meta.slots + 0, meta.positions + 0
    peer, peer_error = None, None
    if with_peer:
        peer, result = _peer(case, made, args, slots, positions)
        peer_error = _error(case, made, args, result)
        peer = paths.checked(case.name, peer_error, peer)
    x, held = args[0], [jax.tree.map(jnp.copy, args[1])]

    def once():
        y, held[0] = made.program(made.given, held[0], x, meta, plan)
        return y.block_until_ready()

    def many(n):
        for _ in range(n):
            y, held[0] = made.program(made.given, held[0], x, meta, plan)
        y.block_until_ready()

    error = _error(case, made, args, once())
    assert error < paths.TOLERANCE, f"{case.name}: relative error {error}"
    facts = {
        "peer_error": peer_error,
        "temp_mib": made.program.memory_analysis().temp_size_in_bytes / 2**20,
    }
    sizes = {"calls": case.calls, "flops": case.flops, "bytes": case.bytes}
    return paths.row(case.name, once, many, peer, error=error, **sizes, **facts)
