"""One decode step of one V4-Flash-shaped layer of each kind, with its kernels and its floor.

No peer: it says where the time goes. Pages are filled with random rows, not by prompts, because a
prefill of 128 x 65,536 tokens takes minutes.
"""

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.random_model import drawn, of_ratios
from mla_jax.config_v4 import V4Config
from mla_jax.engine import Engine
from mla_jax.metadata.common import build_common
from mla_jax.metadata.packed import pack
from mla_jax.model.deepseek_v4 import DeepseekV4
from mla_jax.model.presets import V4_FLASH
from mla_jax.model.step import GPU_OPTIONS, StepBatch
from mla_jax.types import round_up

__all__ = ["CASES", "METHOD", "Case", "run"]

PAGE, STEPS, TRACED = 64, 64, 4
BYTES_PER_S = 4.25e12
METHOD = (
    "One layer of V4-Flash's widths (experts among them; a vocabulary of 1,024), bf16, random "
    f"weights, rows and token ids; wall time of {STEPS} decode steps behind each other, then "
    f"{TRACED} traced. "
    "attention: rows and states written, selected and attended to, compiled alone, its products "
    "and metadata given; products: those of the layer's attention before and behind it; both: "
    "kernel time of an isolated call; attention_span: from its first kernel to its last one's end. "
    "attention_floor: window, selected or all states and index keys of every request, read once at "
    "4.25 TB/s; products_floor: their weights; floor: all of the layer's weights too, of the "
    "experts those that so many tokens reach"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``requests`` with one new token each behind ``context`` others."""

    ratio: int
    requests: int = 128
    context: int = 65536
    config: V4Config = V4_FLASH

    @property
    def name(self) -> str:
        kind = f"c{self.ratio}" if self.ratio else "window"
        return f"{kind}_b{self.requests}_k{self.context}"

    @property
    def layer(self) -> V4Config:
        """A model of this one layer."""
        return of_ratios(self.config, self.ratio)

    @property
    def attention_bytes(self) -> int:
        """Rows and index keys that the step must read."""
        c, row, states = self.config, 2 * self.config.dim, 0
        keys = 0
        if self.ratio:
            states = self.context // self.ratio
        if self.ratio == c.overlapping:
            keys, states = states * 2 * c.index_dim, min(states, c.index_topk)
        return self.requests * ((c.window + states) * row + keys)

    @property
    def product_bytes(self) -> int:
        """Weights of the attention's products, in 16 bits; of the indexer's heads in 32."""
        c = self.config
        wide = c.heads * c.dim
        weights = c.hidden * (c.q_rank + c.dim) + c.q_rank * wide
        weights += wide * c.out_rank + c.out_groups * c.out_rank * c.hidden
        if self.ratio:
            halves = 2 if self.ratio == c.overlapping else 1
            weights += 2 * halves * c.hidden * c.dim
        if self.ratio == c.overlapping:
            weights += c.q_rank * c.index_heads * c.index_dim + 4 * c.hidden * c.index_dim
            weights += 2 * c.hidden * c.index_heads
        return 2 * weights


CASES = tuple(Case(ratio=ratio) for ratio in (0, 4, 128))


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Time the chosen cases, row by row; compiles outside of ``turn``, measures inside."""
    del peers
    for case in (c for c in CASES if c.name in chosen):
        engine, batch = made(case)
        engine._step.compile(pack(batch).layout, engine._caches)
        parts = attention_parts(engine, batch)
        with turn:
            row = {"case": case.name} | attention(case, parts) | timed(case, engine, batch)
        print({k: v for k, v in row.items() if "kernels" not in k}, flush=True)
        yield row


def made(case: Case) -> tuple[Engine, StepBatch]:
    """An engine whose caches hold random rows, and a step of decodes over them."""
    config, keys = case.layer, case.context + 1
    engine = Engine(
        drawn(config, DeepseekV4),
        config,
        num_pages=2 + case.requests * (round_up(keys, 4 * PAGE) // PAGE),  # whole pages of states
        page=PAGE,
        max_requests=case.requests,
        prefill_chunk=case.requests,
        max_model_len=keys + PAGE,
        cache_format="bf16",
    )
    for i, (name, cache) in enumerate(sorted(engine._caches.items())):
        key = jax.random.key(i)
        pages = jax.random.normal(key, cache.pages.shape, jnp.bfloat16).astype(cache.pages.dtype)
        engine._caches[name] = dataclasses.replace(cache, pages=pages)
    return engine, decodes_of(engine, case.requests, keys)


def attention_parts(engine: Engine, batch: StepBatch) -> dict[str, Callable[[], Any]]:
    """Calls of the layer's attention alone and of its products; and what these weigh."""
    step, caches = engine._step, jax.tree.map(jnp.copy, engine._caches)
    model, builder = step._merged(step.leaves), engine.builder
    attn = model.layers[0].attn

    @jax.jit
    def metadata(batch: StepBatch) -> Any:
        bucket = batch.decision.common_bucket
        tables = {name: jnp.asarray(table) for name, table in batch.page_tables.items()}
        lens = jnp.asarray(batch.query_starts), jnp.asarray(batch.seq_lens)
        facts = {"bucket": bucket, "groups": builder.groups}
        common = build_common(*lens, tables, jnp.asarray(batch.num_requests), **facts)
        meta = builder.build(common, batch.decision)
        return meta, model._shared(meta)[attn.ratio]

    meta, shared = metadata(batch)
    graph, state = nnx.split(attn)

    def products(state, x, out, angles):
        layer = nnx.merge(graph, state)
        return layer.products(x, angles), layer._project(out, angles)

    def attend(caches, state, new, meta, shared):
        return nnx.merge(graph, state).attend(new, meta, caches, shared, layer=0, number=0)[::-1]

    tokens, c = len(batch.token_ids), attn.config
    x, out = (
        jax.random.normal(jax.random.key(1), (tokens, *n), jnp.bfloat16)
        for n in ((c.hidden,), (c.heads, c.dim))
    )
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    given = state, x, out, shared.angles
    project = jax.jit(products, compiler_options=options).lower(*given).compile()
    new, _ = project(*given)
    rest = state, new, meta, shared
    program = jax.jit(attend, donate_argnums=0, compiler_options=options)
    program = program.lower(caches, *rest).compile()
    held = [caches]

    def once() -> None:
        held[0], out = program(held[0], *rest)
        jax.block_until_ready((held[0], out))

    return {"attention": once, "products": lambda: jax.block_until_ready(project(*given))}


def attention(case: Case, parts: dict[str, Callable[[], Any]]) -> dict:
    """Times of the layer's attention and of its products, each by itself."""
    from benchmarks.timing import isolated_us

    found = isolated_us(parts)
    row = {f"{name}_us": side.sum for name, side in found.items()}
    row["attention_span_us"] = found["attention"].span
    row |= {f"{name}_kernels": side.kernels for name, side in found.items()}
    return row | {"products_floor_us": 1e6 * case.product_bytes / BYTES_PER_S}


def timed(case: Case, engine: Engine, batch: StepBatch, *, traced: bool = True) -> dict:
    """Steps behind each other; the kernels of the last ones."""
    packed = pack(batch)

    def steps(n: int) -> None:
        for _ in range(n):
            out, engine._caches = engine._step.run(
                engine._caches, packed, engine._tokens, engine._history
            )
            engine._tokens = out.tokens
        out.read()

    steps(3)
    us = []
    for _ in range(3):
        begin = time.perf_counter()
        steps(STEPS)
        us.append(1e6 * (time.perf_counter() - begin) / STEPS)
    config, moe = case.layer, case.layer.moe
    reached = moe.experts * (1 - (1 - moe.topk / moe.experts) ** case.requests)
    unused = 2 * 3 * config.hidden * moe.width * (moe.experts - reached)
    weights = engine.stats().weight_bytes - unused
    found = statistics.median(us)
    row = {
        "ours_us": found,
        "attention_floor_us": 1e6 * case.attention_bytes / BYTES_PER_S,
        "floor_us": 1e6 * (case.attention_bytes + weights) / BYTES_PER_S,
        "cache_bytes": engine.stats().cache_bytes,
    }
    return row | (_kernels(steps) if traced else {})


def _kernels(steps) -> dict:
    """Microseconds of each kernel in a step."""
    from benchmarks.timing import device_events

    with device_events() as (start, events):
        start()
        steps(TRACED)
    each: Counter[str] = Counter()
    for event in events:
        each[event["name"][:64]] += event["dur"] / TRACED
    return {
        "busy_us": sum(each.values()),
        "kernels": {k: round(v, 1) for k, v in each.most_common(24)},
    }
