"""Prefill end to end: prompts through the engine, random weights, by attention backend."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import paths
from benchmarks.random_model import drawn, of_layers
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import Ladder, MLALadder
from mla_jax.model.presets import V2_LITE, V3
from mla_jax.model.sampling import SamplingParams
from mla_jax.types import cdiv

__all__ = ["CASES", "METHOD", "Case", "run"]

PAGE, STEP, ROWS = 64, 8192, 32768
MODELS = {"v3": (V3, 1), "v2_lite": (V2_LITE, 4), "v2_lite_27l": (V2_LITE, 27)}
"""And how many of the first layers."""
METHOD = (
    "the first layers of V3 (1, dense) and of V2-Lite (4 and 27: 1 dense, the rest of experts), "
    f"bf16, random weights; steps of {STEP} prompt tokens through pages, {ROWS} workspace rows for "
    "cached context; wall time of Engine.generate with one new token a prompt, all programs "
    "compiled before, once; cache traffic is by kernels in both backends"
)


@dataclass(frozen=True)
class Case:
    """``prompts`` prompts of ``length`` tokens each, served together."""

    model: str
    backend: str
    prompts: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model}_{self.backend}_{self.prompts}x{self.length}"


CASES = tuple(
    Case(model, backend, *prompts)
    for backend in ("mosaic", "xla")
    for model in MODELS
    for prompts in ((8, 4096), (1, 32768))
    if backend == "mosaic" or model != "v2_lite_27l"
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Time the chosen cases, row by row; the device is timed inside ``turn`` alone."""
    del peers
    paths.prefer_kernels()
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    made = engine = None
    for case in (c for c in CASES if c.name in chosen):
        if made != (case.model, case.backend):
            engine = None  # its weights leave the device first
            made, engine = (case.model, case.backend), _engine(case)
            engine.generate([_tokens(STEP + STEP // 4, seed=9)], one)  # without and with context
        prompts = [_tokens(case.length, seed=i) for i in range(case.prompts)]
        with turn:
            start = time.perf_counter()
            engine.generate(prompts, one)
            seconds = time.perf_counter() - start
        row = {
            "case": case.name,
            "layers": MODELS[case.model][1],
            "ms": 1e3 * seconds,
            "tokens_per_s": case.prompts * case.length / seconds,
            "programs": engine.stats().compiles,
        }
        print(f"{case.name}: {row['ms']:.1f} ms, {row['tokens_per_s']:.0f} tokens/s", flush=True)
        yield row


def _engine(case: Case) -> Engine:
    facts = of_layers(*MODELS[case.model])
    model = drawn(facts)
    longest = max(c.length for c in CASES) + PAGE
    ladder = MLALadder(
        decodes=Ladder("decode requests", (8,)),
        prefills=Ladder("prefill requests", (8,)),
        prefill_tokens=Ladder("prefill tokens", (STEP,)),
        pages=Ladder("pages of one request", (cdiv(longest, PAGE),)),
        context_rows=ROWS,
    )
    return Engine(
        model,
        facts,
        num_pages=2 * cdiv(longest, PAGE),
        page=PAGE,
        max_requests=8,
        prefill_chunk=STEP,
        max_model_len=longest,
        ladder=ladder,
        backend=case.backend,
    )


def _tokens(n: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, n).tolist()
