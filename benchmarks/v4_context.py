"""``python -m benchmarks.v4_context FILE``: one sequence of 1,048,576 tokens on one card.

A model of two layers of V4-Flash's widths, one that pools 4 tokens and one that pools 128, random
weights: prefilled in chunks, then decoded. Memory beside what the engine says beforehand.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.machine import clocks
from benchmarks.random_model import drawn
from benchmarks.run import versions
from mla_jax.engine import Engine
from mla_jax.model.deepseek_v4 import DeepseekV4
from mla_jax.model.presets import V4_FLASH
from mla_jax.model.sampling import SamplingParams
from mla_jax.types import round_up

PAGE, NEW = 64, 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.v4_context", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which it stops")
    parser.add_argument(
        "--experts", type=int, default=V4_FLASH.moe.experts, help="fewer: to try it"
    )
    given = parser.parse_args()
    config = dataclasses.replace(
        V4_FLASH,
        vocab=1024,
        compress_ratios=(4, 128),
        hash_layers=0,
        fp8_block=None,
        moe=dataclasses.replace(V4_FLASH.moe, experts=given.experts),
    )
    engine = Engine(
        drawn(config, DeepseekV4),
        config,
        num_pages=2 + round_up(given.context, 128 * PAGE) // PAGE,
        page=PAGE,
        max_requests=1,
        prefill_chunk=given.chunk,
        max_model_len=given.context,
        cache_format="bf16",
    )
    prompt = np.random.default_rng(0).integers(1, 1024, given.context - NEW).tolist()
    engine.add(prompt, SamplingParams(max_new_tokens=NEW))
    begin = last = time.perf_counter()
    steps, tokens = [], []
    done = False
    while not done and last - begin < given.limit:
        for event in engine.step():
            tokens += [event.token_id] if event.token_id is not None else []
            done = event.completion is not None
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    stats = engine.stats()
    said = stats.weight_bytes + stats.cache_bytes + stats.workspace_bytes
    peak = jax.devices()[0].memory_stats() or {}
    row = {
        "case": f"v4_flash_2l_{given.context}",
        "chunk": given.chunk,
        "steps": len(steps),
        "seconds": last - begin,
        "last_steps_ms": [round(1e3 * s, 1) for s in steps[-NEW - 4 :]],
        "tokens": len(tokens),
        "said_bytes": said,
        "peak_bytes": peak.get("peak_bytes_in_use", 0),
        "cache_bytes": stats.cache_bytes,
    }
    record = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "clocks": clocks(),
        "method": "Random weights, bf16 caches; wall time, compilation in it",
        "extra": [],
        "rows": [row],
    }
    given.file.write_text(json.dumps(record, indent=1) + "\n")
    print(row)


if __name__ == "__main__":
    main()
