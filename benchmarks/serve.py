"""Decoding end to end: a model of V2-Lite's widths, random weights, by backend of dense decode.

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
from mla_jax.model.step import StepBatch
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
    for case in (c for c in CASES if c.name in chosen):
        engine = _engine(case)
        with turn:
            row = _row(case, engine)
        print(
            f"{row['case']:36s} {row['step_us']:9.0f} us a step {row['tokens_per_s']:9.0f} "
            f"tokens/s; engine {row['engine_tokens_per_s']:.0f} tokens/s",
            flush=True,
        )
        yield row


def _config() -> ModelConfig:
    return dataclasses.replace(V2_LITE, layers=LAYERS, sparse_layers=V2_LITE.sparse_layers[:LAYERS])


def _engine(case: Case) -> Engine:
    """An engine of random weights that has compiled its two programs: all prompts, all decodes."""
    dtype = jnp.dtype(jnp.bfloat16)
    abstract = nnx.eval_shape(lambda: DeepseekV3(_config(), dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree.flatten(state)

    def draw():
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return [
            0.02 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
        ]

    engine = Engine(
        nnx.merge(graph, jax.tree.unflatten(tree, jax.jit(draw)())),
        _config(),
        num_pages=1 + case.batch * case.pages,
        page=PAGE,
        max_requests=case.batch,
        prefill_chunk=case.fed,
        max_model_len=case.context + STEPS,
        ladder=MLALadder(
            decodes=Ladder("decode requests", (case.batch,)),
            prefills=Ladder("prefill requests", (case.batch,)),
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


def _caches(case: Case) -> list[LatentCache]:
    """Random rows, on the device as the engine's own are."""
    dims, pages = _config().dims, 1 + case.batch * case.pages

    def fill(key):
        c = LatentCache.alloc(num_pages=pages, page=PAGE, rank=dims.rank, rope=dims.rope)
        return dataclasses.replace(c, pages=jax.random.normal(key, c.pages.shape, c.pages.dtype))

    filled = list(map(jax.jit(fill), jax.random.split(jax.random.key(1), LAYERS)))
    return jax.device_put(filled, jax.devices()[0])


def _row(case: Case, engine: Engine) -> dict:
    start = time.perf_counter()
    tokens = _generate(engine, case)
    served = tokens / (time.perf_counter() - start)
    times = _decode(engine, case, _caches(case))
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
        tokens, _ = out.read()
        times.append(time.perf_counter() - start)
    return times[5:]


def _bucket(case: Case) -> MLABucket:
    return MLABucket(
        decodes=case.batch, prefills=0, prefill_tokens=0, pages=case.pages, context_rows=0
    )


def _batch(bucket: MLABucket, table: np.ndarray, tokens: np.ndarray, length: int) -> StepBatch:
    """One token for each request of a decode bucket."""
    n = bucket.requests
    lens = np.full(n, length, np.int32)
    return StepBatch(
        token_ids=tokens,
        query_starts=np.arange(n + 1, dtype=np.int32),
        seq_lens=lens,
        page_table=table,
        num_decodes=np.asarray(n, np.int32),
        sampling=SamplingBatch(
            temperature=np.zeros(n, np.float32),
            top_k=np.zeros(n, np.int32),
            top_p=np.ones(n, np.float32),
            seed=np.zeros(n, np.uint32),
            position=lens,
        ),
    )
