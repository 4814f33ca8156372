"""Decoding end to end: a model of V2-Lite's widths, random weights.

The step is the engine's own: host arrays to the device, one compiled program, tokens back to the
host. Caches hold random rows of the stated context instead of a prompt's.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks.random_model import drawn, of_layers
from mla_jax.config import ModelConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import FEWEST_ROWS, Ladder, MLALadder
from mla_jax.metadata.common import HostBatch
from mla_jax.model.presets import V2_LITE
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import StepBatch, empty_batch
from mla_jax.types import cdiv

__all__ = ["CASES", "METHOD", "Case", "run"]

PAGE = 64
STEPS = 40
PROMPT = 8  # tokens of the engine's own requests
METHOD = (
    "V2-Lite widths (1 dense layer, the rest experts), bf16, random weights and cache rows; median "
    f"wall time of {STEPS} decode steps: batch to the device, step, tokens back; peak_bytes is the "
    "device's most, of it weights, caches and the programs' temporaries; tokens_per_s counts one "
    "token a request and step"
)


@dataclass(frozen=True)
class Case:
    """``batch`` requests of ``context`` cached tokens each; ``backend`` None is the library's."""

    layers: int
    batch: int
    context: int
    backend: str | None

    @property
    def name(self) -> str:
        which = self.backend or "default"
        return f"v2_lite_{self.layers}l_b{self.batch}_c{self.context}/{which}"

    @property
    def pages(self) -> int:
        return cdiv(self.context + STEPS, PAGE)

    @property
    def rows(self) -> int:
        """Decodes of a step, as default ladders have them."""
        return max(self.batch, FEWEST_ROWS)

    @property
    def fed(self) -> int:
        return PROMPT * self.batch

    @property
    def config(self) -> ModelConfig:
        return of_layers(V2_LITE, self.layers)


CASES = tuple(
    Case(layers, batch, context, backend)
    for layers, sizes, backends in (
        (4, ((1, 32768), (32, 4096), (128, 4096)), (None, "xla")),
        (27, ((1, 4096), (32, 4096), (128, 4096), (1, 32768)), (None,)),
    )
    for batch, context in sizes
    for backend in backends
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Time the chosen cases, row by row; compiles outside of ``turn``, measures inside."""
    del peers
    model, layers = None, 0
    for case in (c for c in CASES if c.name in chosen):
        if case.layers != layers:
            model = None  # its weights leave the device first
            model, layers = drawn(case.config), case.layers
        engine = _engine(case, model)
        with turn:
            row = _row(case, engine)
        del engine
        print(
            f"{row['case']:36s} {row['step_us']:9.0f} us a step {row['tokens_per_s']:9.0f} "
            f"tokens/s; engine {row['engine_tokens_per_s']:.0f} tokens/s",
            flush=True,
        )
        yield row


def _engine(case: Case, model) -> Engine:
    """An engine that has compiled its two programs: all prompts, all decodes."""
    engine = Engine(
        model,
        case.config,
        num_pages=1 + case.batch * case.pages,
        page=PAGE,
        max_requests=case.batch,
        prefill_chunk=case.fed,
        max_model_len=case.context + STEPS,
        ladder=MLALadder(
            decodes=Ladder("decode requests", (case.rows,)),
            prefills=Ladder("prefill requests", (case.rows,)),
            prefill_tokens=Ladder("prefill tokens", (case.fed,)),
            pages=Ladder("pages of one request", (case.pages,)),
            context_rows=case.fed,
        ),
        backend=case.backend,
    )
    _generate(engine, case)
    return engine


def _generate(engine: Engine, case: Case) -> int:
    """Short requests through ``generate``: how many new tokens."""
    prompts = [[1 + i % 100] * PROMPT for i in range(case.batch)]
    wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    return sum(len(c.token_ids) for c in engine.generate(prompts, wish))


def _fill(engine: Engine) -> None:
    """Random rows in the engine's caches, where they are."""

    cache = engine._caches["latent"]
    row = jax.jit(lambda key: jax.random.normal(key, cache.pages.shape[1:], cache.pages.dtype))
    put = jax.jit(lambda pages, row, i: pages.at[i].set(row), donate_argnums=0)
    pages, engine._caches = cache.pages, {}
    for i, key in enumerate(jax.random.split(jax.random.key(1), pages.shape[0])):
        pages = put(pages, row(key), i)
    engine._caches = {"latent": dataclasses.replace(cache, pages=pages)}


def _row(case: Case, engine: Engine) -> dict:
    start = time.perf_counter()
    tokens = _generate(engine, case)
    served = tokens / (time.perf_counter() - start)
    _fill(engine)
    times = _decode(engine, case)
    middle = statistics.median(times)
    memory = engine.placement.device.memory_stats() or {}
    return {
        "case": case.name,
        "step_us": 1e6 * middle,
        "step_us_least": 1e6 * min(times),
        "tokens_per_s": case.batch / middle,
        "engine_tokens_per_s": served,
        "layers": case.layers,
        "programs": engine.stats().compiles,
        "peak_bytes": memory.get("peak_bytes_in_use", 0),
        "weight_bytes": sum(x.nbytes for x in engine._step.leaves),
        "derived_bytes": sum(x.nbytes for x in jax.tree.leaves(engine._step.derived)),
        "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(engine._caches)),
        "workspace_bytes": engine.stats().workspace_bytes,
        "in_use_bytes": memory.get("bytes_in_use", 0),
    }


def _decode(engine: Engine, case: Case) -> list[float]:
    """Seconds of decode steps that follow each other, the first ones left out."""
    order = np.random.default_rng(0).permutation(case.batch * case.pages).astype(np.int32)
    table = 1 + order.reshape(case.batch, case.pages)
    tokens, times = np.ones(case.batch, np.int32), []
    for i in range(STEPS):
        start = time.perf_counter()
        batch = _batch(engine, table, tokens, case.context + i + 1)
        out, engine._caches = engine._step.run(engine._caches, batch)
        tokens = out.read()[0][: case.batch]
        times.append(time.perf_counter() - start)
    return times[5:]


def _batch(engine: Engine, table: np.ndarray, tokens: np.ndarray, length: int) -> StepBatch:
    """One token for each request."""
    n = len(tokens)
    lens = np.full(n, length, np.int32)
    host = HostBatch.of(np.ones_like(lens), lens)
    batch = empty_batch(engine.builder.decide(host), ["latent"])
    starts, padded, count = host.padded_arrays(batch.decision.common_bucket)
    batch.page_tables["latent"][:n] = table
    batch.token_ids[:n] = tokens
    return dataclasses.replace(
        batch,
        query_starts=starts,
        seq_lens=padded,
        num_requests=np.asarray(count, np.int32),
        sampling=dataclasses.replace(batch.sampling, position=padded),
    )
