"""Decoding end to end: a model of V2-Lite's widths, random weights, by backend of dense decode.

The step is the engine's own: host arrays to the device, one compiled program, tokens back to the
host. Caches hold random rows of the stated context instead of a prompt's.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import ModelConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import Ladder, MLABucket, MLALadder
from mla_jax.metadata.packed import pack
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.presets import V2_LITE
from mla_jax.model.sampling import SamplingBatch, SamplingParams
from mla_jax.model.step import Step, StepBatch
from mla_jax.types import cdiv

__all__ = ["CASES", "Case", "run"]

LAYERS = 4  # of V2-Lite's 27, the first dense: compile time
PAGE = 64
STEPS = 40
PROMPT = 8  # tokens of the engine's own requests
METHOD = (
    f"V2-Lite widths, {LAYERS} layers (1 dense, the rest experts), bf16, random weights and cache "
    f"rows; median wall time of {STEPS} decode steps: batch to the device, step, tokens back; "
    "tokens_per_s counts one token a request and step"
)


@dataclass(frozen=True)
class Case:
    """``batch`` requests of ``context`` cached tokens each; ``backend`` None is the library's."""

    batch: int
    context: int
    backend: str | None

    @property
    def name(self) -> str:
        return f"v2_lite_{LAYERS}l_b{self.batch}_c{self.context}/{self.backend or 'default'}"

    @property
    def pages(self) -> int:
        return cdiv(self.context + STEPS, PAGE)

    @property
    def fed(self) -> int:
        return PROMPT * self.batch


CASES = tuple(
    Case(batch, context, backend)
    for batch, context in ((1, 32768), (32, 4096), (128, 4096))
    for backend in (None, "xla")
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Time the chosen cases, row by row; compiles outside of ``turn``, measures inside."""
    del peers
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for case, programs in [(c, _compile(c)) for c in CASES if c.name in chosen]:
            with turn:
                row = _row(case, programs)
            print(
                f"{row['case']:36s} {row['step_us']:9.0f} us a step {row['tokens_per_s']:9.0f} "
                f"tokens/s; engine {row['engine_tokens_per_s']:.0f} tokens/s",
                flush=True,
            )
            yield row


def _config() -> ModelConfig:
    return dataclasses.replace(V2_LITE, layers=LAYERS, sparse_layers=V2_LITE.sparse_layers[:LAYERS])


def _abstract() -> DeepseekV3:
    dtype = jnp.dtype(jnp.bfloat16)
    return nnx.eval_shape(lambda: DeepseekV3(_config(), dtype=dtype, rngs=nnx.Rngs(0)))


def _compile(case: Case) -> dict:
    """The step of the engine's two buckets into JAX's cache of programs, and random arrays."""
    step = Step.of(_abstract(), page=PAGE, backend=case.backend)
    caches = jax.eval_shape(lambda: _caches(case))
    for bucket in (_bucket(case), _bucket(case, prefill=True)):
        batch = pack(_batch(bucket))
        step.run.lower(step.leaves, caches, batch, bucket=bucket, want_logits=False).compile()  # pyright: ignore

    def draw():
        keys = jax.random.split(jax.random.key(0), len(step.leaves))
        return [
            0.02 * jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, step.leaves, strict=True)
        ]

    def fill():
        keys = jax.random.split(jax.random.key(1), LAYERS)
        return [
            dataclasses.replace(c, pages=jax.random.normal(k, c.pages.shape, c.pages.dtype))
            for c, k in zip(_caches(case), keys, strict=True)
        ]

    return {"leaves": jax.jit(draw).lower().compile(), "caches": jax.jit(fill).lower().compile()}


def _caches(case: Case) -> list[LatentCache]:
    dims, pages = _config().dims, 1 + case.batch * case.pages
    return [
        LatentCache.alloc(num_pages=pages, page=PAGE, rank=dims.rank, rope=dims.rope)
        for _ in range(LAYERS)
    ]


def _row(case: Case, programs: dict) -> dict:
    graph, state = nnx.split(_abstract())
    tree = jax.tree.structure(state)
    model = nnx.merge(graph, jax.tree.unflatten(tree, programs["leaves"]()))
    engine = Engine(
        model,
        _config(),
        num_pages=1 + case.batch * case.pages,
        page=PAGE,
        max_requests=case.batch,
        prefill_chunk=case.fed,
        max_model_len=case.context + STEPS,
        ladder=MLALadder(  # two programs: all prompts, all decodes
            decodes=Ladder("decode requests", (case.batch,)),
            prefills=Ladder("prefill requests", (case.batch,)),
            prefill_tokens=Ladder("prefill tokens", (case.fed,)),
            pages=Ladder("pages of one request", (case.pages,)),
            context_rows=case.fed,
        ),
        backend=case.backend,
    )
    served = _serve(engine, case)
    times = _decode(engine, case, programs["caches"]())
    middle = statistics.median(times)
    return {
        "case": case.name,
        "step_us": 1e6 * middle,
        "step_us_least": 1e6 * min(times),
        "tokens_per_s": case.batch / middle,
        "engine_tokens_per_s": served,
        "layers": LAYERS,
        "programs": engine.stats().compiles,
    }


def _serve(engine: Engine, case: Case) -> float:
    """New tokens a second of short requests through ``generate``, the second time."""
    prompts = [[1 + i % 100] * PROMPT for i in range(case.batch)]
    wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    engine.generate(prompts, wish)
    start = time.perf_counter()
    done = engine.generate(prompts, wish)
    return sum(len(c.token_ids) for c in done) / (time.perf_counter() - start)


def _decode(engine: Engine, case: Case, caches: list[LatentCache]) -> list[float]:
    """Seconds of decode steps that follow each other, the first ones left out."""
    step, bucket = engine._step, _bucket(case)
    order = np.random.default_rng(0).permutation(case.batch * case.pages).astype(np.int32)
    table = 1 + order.reshape(case.batch, case.pages)
    tokens, times = np.ones(case.batch, np.int32), []
    for i in range(STEPS):
        start = time.perf_counter()
        batch = pack(_batch(bucket, table, tokens, case.context + i + 1))
        out, caches = step.run(step.leaves, caches, batch, bucket=bucket, want_logits=False)
        tokens = np.asarray(jax.device_get(out.token_ids))
        times.append(time.perf_counter() - start)
    return times[5:]


def _bucket(case: Case, *, prefill: bool = False) -> MLABucket:
    return MLABucket(
        decodes=0 if prefill else case.batch,
        prefills=case.batch if prefill else 0,
        prefill_tokens=case.fed if prefill else 0,
        pages=case.pages,
        context_rows=0,
    )


def _batch(bucket: MLABucket, table=None, tokens=None, length: int = 1) -> StepBatch:
    """One token for each request of a decode bucket; for any bucket, its shapes."""
    n = bucket.requests
    lens = np.full(n, length, np.int32)
    return StepBatch(
        token_ids=np.zeros(bucket.tokens, np.int32) if tokens is None else tokens,
        query_starts=np.arange(n + 1, dtype=np.int32),
        seq_lens=lens,
        page_table=np.zeros((n, bucket.pages), np.int32) if table is None else table,
        num_decodes=np.asarray(n, np.int32),
        sampling=SamplingBatch(
            temperature=np.zeros(n, np.float32),
            top_k=np.zeros(n, np.int32),
            top_p=np.ones(n, np.float32),
            seed=np.zeros(n, np.uint32),
            position=lens,
        ),
    )
