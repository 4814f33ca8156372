"""``python -m benchmarks.serve_prefill --out FILE``: prompt tokens per second of the engine.

Random weights in the shape of V2-Lite (its first layers) and of one layer of V3; prompts go in
steps of 8192 tokens through pages, with gather and chunked context. Wall time of ``generate``
with one new token per prompt, the second run of each kind: nothing compiles in it.
"""

import argparse
import dataclasses
import datetime
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import paths
from benchmarks.run import turn
from mla_jax.config import ModelConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import Ladder, MLALadder
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.presets import V2_LITE, V3
from mla_jax.model.sampling import SamplingParams
from mla_jax.types import cdiv

__all__ = ["MODELS", "PROMPTS", "config", "run"]

PAGE, STEP, ROWS = 64, 8192, 32768
MODELS = {"v3": V3, "v2_lite": V2_LITE}
PROMPTS = {"8x4096": (8, 4096), "1x32768": (1, 32768)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.serve_prefill", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--backends", nargs="*", default=["mosaic", "xla"])
    parser.add_argument("--turn", type=Path, help="file that a process locks to time")
    parser.add_argument("--layers", type=int, default=4, help="of V2-Lite; V3 has one")
    given = parser.parse_args()
    record = {
        "device": jax.devices()[0].device_kind,
        "measured": f"jax {jax.__version__}, {datetime.date.today()}",
        "method": __doc__,
        "rows": [],
    }
    for name in given.models:
        for backend in given.backends:
            layers = 1 if name == "v3" else given.layers
            for row in run(name, layers, backend, list(PROMPTS), turn(given.turn)):
                record["rows"].append(row)
                given.out.write_text(json.dumps(record, indent=1) + "\n")


def config(name: str, layers: int) -> ModelConfig:
    """The first layers of a named model."""
    whole = MODELS[name]
    sparse = whole.sparse_layers[:layers]
    moe = whole.moe if any(sparse) else None
    return dataclasses.replace(whole, layers=layers, sparse_layers=sparse, moe=moe)


def run(
    name: str, layers: int, backend: str, prompts: list[str], mine: AbstractContextManager
) -> Iterator[dict]:
    """Tokens per second of each kind of prompts; the device is timed inside ``mine`` alone."""
    paths.prefer_kernels()
    engine = _engine(config(name, layers), backend)
    warm = SamplingParams(max_new_tokens=1, ignore_eos=True)
    engine.generate([_tokens(STEP + PAGE, seed=9)], warm)  # a step without and one with context
    for kind in prompts:
        count, length = PROMPTS[kind]
        asked = [_tokens(length, seed=i) for i in range(count)]
        with mine:
            start = time.perf_counter()
            engine.generate(asked, warm)
            seconds = time.perf_counter() - start
        row = {
            "model": name,
            "layers": layers,
            "backend": backend,
            "prompts": kind,
            "seconds": seconds,
            "tokens_per_second": count * length / seconds,
        }
        print(
            f"{name}, {layers} layers, {backend}, {kind}: {seconds:.3f} s, "
            f"{row['tokens_per_second']:.0f} tokens/s",
            flush=True,
        )
        yield row


def _engine(config: ModelConfig, backend: str) -> Engine:
    model = DeepseekV3(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.absorb()
    longest = max(n for _, n in PROMPTS.values()) + PAGE
    ladder = MLALadder(
        decodes=Ladder("decode requests", (8,)),
        prefills=Ladder("prefill requests", (8,)),
        prefill_tokens=Ladder("prefill tokens", (STEP,)),
        pages=Ladder("pages of one request", (cdiv(longest, PAGE),)),
        context_rows=ROWS,
    )
    return Engine(
        model,
        config,
        num_pages=2 * cdiv(longest, PAGE),
        page=PAGE,
        max_requests=8,
        prefill_chunk=STEP,
        max_model_len=longest,
        ladder=ladder,
        backend=backend,
    )


def _tokens(n: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, n).tolist()


if __name__ == "__main__":
    main()
