"""``python -m benchmarks.step_chain``: ways to compile a decode step, some layers, by the device.

A step of a few layers is shorter than what an engine's host does for it. So a step's program is
called again and again with one batch; each call needs the caches and tokens of the one before, and
no profiler is there. The trials are those of ``card_trials``: the same weights, one program each.
A row: microseconds of a step of one request and of eight, and what they draw. Trials within one
process differ by less than 0.2 %; machines differ by more.
"""

import argparse
import gc
import json
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.card_trials import CHUNK, MOST, PAGE, PATCHES, TRIALS
from benchmarks.cards import ladder_of
from benchmarks.compiling import gpu_options
from benchmarks.decodes import decodes_of
from benchmarks.random_model import drawn, of_layers
from mla_jax.config_v4 import AnyConfig
from mla_jax.engine import Engine
from mla_jax.metadata.packed import pack
from mla_jax.model.family import family_of
from mla_jax.model.presets import PRESETS
from mla_jax.placement import Placement
from mla_jax.types import cdiv

CALLS, REPEATS, AHEAD = 150, 5, 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_chain", description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="V2_LITE")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--trials", nargs="*", choices=TRIALS, default=["default"])
    given = parser.parse_args()
    config = of_layers(PRESETS[given.model], given.layers)
    placement, module = Placement.of(jax.devices()[:1]), family_of(config.family).module
    weights = drawn(config, module, fp8=config.fp8_block is not None, placement=placement)
    for trial in given.trials:
        row = {"trial": trial, "model": given.model, "layers": given.layers}
        patched = mock.patch.object(*PATCHES[trial]) if trial in PATCHES else nullcontext()
        jax.clear_caches()  # traced operations are kept, and know nothing of the patches
        with patched, gpu_options(TRIALS[trial]):
            row |= _measured(weights, config, placement, given.context)
        print(json.dumps(row), flush=True)
        gc.collect()


def _measured(
    weights: Any, config: AnyConfig, placement: Placement, context: int
) -> dict[str, Any]:
    """Of a step of one request, and of the most."""
    longest = context + PAGE
    pages = cdiv(longest, PAGE)
    engine = Engine(
        weights, config, page=PAGE, num_pages=1 + (1 + MOST) * pages, max_requests=MOST,
        prefill_chunk=CHUNK, max_model_len=longest, devices=placement, absorb_prefills=False,
        ladder=ladder_of(config, (MOST,), tokens=CHUNK, pages=pages),
    )  # fmt: skip
    row: dict[str, Any] = {"compile_s": 0.0}
    caches, tokens, step = engine._caches, engine._tokens, engine._step
    for requests in (1, MOST):
        batch = pack(decodes_of(engine, requests, context))
        begun = time.perf_counter()
        step.compile(batch.layout, caches)
        row["compile_s"] += round(time.perf_counter() - begun, 1)
        times, found = [], None
        for _ in range(1 + REPEATS):
            sent, begun = [], time.perf_counter()
            for _ in range(CALLS):
                out, caches = step.run(caches, batch, tokens)
                tokens = out.tokens
                sent.append(out)
                if len(sent) > AHEAD:
                    found = sent.pop(0).read()
            found = sent.pop().read()
            times.append((time.perf_counter() - begun) / CALLS)
        row[f"us_{requests}"] = [round(1e6 * s, 1) for s in times[1:]]
        row[f"drawn_{requests}"] = np.asarray(found[0])[:requests].tolist()
    return row


if __name__ == "__main__":
    main()
