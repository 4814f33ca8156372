"""``python -m benchmarks.cards``: a model of V3's or another's widths over all cards here.

Random weights, drawn where they stay, e4m3 where the model is published so. As many layers as asked
for: V3's 61 need eight cards of 141 GB. The cache takes what fits. Wall time through
``Engine.generate``: of a decode step, from calls of 2 and of 66 new tokens; of prompts, from a call
with one new token each. With ``--processes`` each card has a process of its own.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import processes
from benchmarks.random_model import drawn, of_layers
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import Ladder, MLALadder, StepLadder
from mla_jax.model.family import family_of
from mla_jax.model.presets import PRESETS
from mla_jax.model.sampling import SamplingParams
from mla_jax.placement import Placement
from mla_jax.types import round_up

PAGE, CHUNK, MOST = 64, 2048, 32
PROMPT, STEPS = 1024, 64
PROMPTS = 2048  # tokens of each of eight prompts that are timed


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cards", description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="V3")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens before timed decodes")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="prompt tokens of a step")
    parser.add_argument("--fp8-activations", action=argparse.BooleanOptionalAction)
    parser.add_argument("--out", type=Path, help="a JSON file")
    processes.add_options(parser)
    given = parser.parse_args()
    processes.enter(given, "benchmarks.cards")
    facts = {"chunk": given.chunk, "fp8_activations": given.fp8_activations}
    config = PRESETS[given.model]
    row = {"model": given.model, "processes": given.processes}
    row |= measured(of_layers(config, given.layers), jax.devices(), prompt=given.prompt, **facts)
    if jax.process_index() > 0:
        return
    print(json.dumps(row, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(row, indent=1) + "\n")


def measured(
    config: AnyConfig,
    devices: list[Any],
    *,
    prompt: int,
    chunk: int,
    fp8_activations: bool | None,
) -> dict[str, Any]:
    """Memory of one card, and milliseconds."""
    placement = Placement.of(devices)
    longest = round_up(max(prompt, PROMPTS) + STEPS + PAGE, PAGE)
    module = family_of(config.family).module
    engine = Engine(
        drawn(config, module, fp8=config.fp8_block is not None, placement=placement),
        config,
        page=PAGE,
        max_requests=MOST,
        prefill_chunk=chunk,
        max_model_len=longest,
        ladder=ladder_of(config, (8, MOST), tokens=chunk, pages=longest // PAGE, alone=True),
        devices=placement,
        absorb_prefills=False,
        fp8_activations=fp8_activations,
    )
    engine.warm_up()
    rng = np.random.default_rng(0)

    def seconds(requests: int, tokens: int, new: int) -> float:
        asked = [rng.integers(0, config.vocab, tokens).tolist() for _ in range(requests)]
        start = time.perf_counter()
        engine.generate(asked, SamplingParams(max_new_tokens=new, ignore_eos=True))
        return time.perf_counter() - start

    def step_ms(requests: int) -> float:
        few, many = (seconds(requests, prompt, new) for new in (2, 2 + STEPS))
        return 1e3 * (many - few) / STEPS

    seconds(1, prompt, 4)
    stats = engine.stats()
    row: dict[str, Any] = {"device": devices[0].device_kind, "cards": len(devices)}
    row |= {"layers": config.layers, "weight_bytes": stats.weight_bytes}
    row |= {"cache_bytes": stats.cache_bytes, "workspace_bytes": stats.workspace_bytes}
    for requests in (1, MOST):
        row[f"decode_{requests}x{prompt}_ms"] = [round(step_ms(requests), 2) for _ in range(2)]
    row |= {"chunk": chunk, "fp8_activations": fp8_activations}
    row[f"prefill_8x{PROMPTS}_s"] = [round(seconds(8, PROMPTS, 1), 3) for _ in range(2)]
    return row


def ladder_of(
    config: AnyConfig, decodes: tuple[int, ...], *, tokens: int, pages: int, alone: bool = False
) -> StepLadder:
    """Programs of decodes only, and one of prompts beside the most decodes, or also ``alone``."""
    most = max(decodes)
    rungs: dict[str, Any] = {
        "decodes": Ladder("decode requests", decodes),
        "prefills": Ladder("prefill requests", (most,)),
        "prefill_tokens": Ladder("prefill tokens", (tokens,)),
        "pages": Ladder("pages of one request", (pages,)),
        "mixed": ((most, tokens), *([(0, tokens)] if alone else [])),
    }
    if isinstance(config, ModelConfig) and config.indexer is None:
        return MLALadder(**rungs, context_rows=4096)
    return StepLadder(**rungs)


if __name__ == "__main__":
    main()
