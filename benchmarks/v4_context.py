"""One sequence of 1,048,576 tokens on one card, by a model of two V4-Flash-shaped layers.

One layer pools 4 tokens, one 128. The prompt is prefilled in chunks, then tokens are decoded;
memory beside what the engine says before the first step.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks.random_model import drawn, of_ratios
from mla_jax.config_v4 import V4Config
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import FEWEST_ROWS, Ladder, MLALadder
from mla_jax.model.deepseek_v4 import DeepseekV4
from mla_jax.model.presets import V4_FLASH
from mla_jax.model.sampling import SamplingParams
from mla_jax.types import round_up

__all__ = ["CASES", "METHOD", "Case", "made", "run", "walked"]

PAGE = 64
SAID = 0.02  # that the peak may be off what was said
METHOD = (
    "Two layers of V4-Flash's widths (ratios 4 and 128, experts among them; a vocabulary of "
    "1,024), bf16, random weights and prompt, one request; the programs (a chunk of prefill with "
    "and without decodes, and decodes alone, each for the longest context) compiled side by side "
    "before the first step; ready_s: all of that; prefill_s: wall time until the first token was "
    "read; decode_ms: median of a step behind that; said: weights, caches and the largest "
    "program's workspace, as the engine says them before the first step; peak: of all the process "
    "has done, by the allocator"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sequence of ``context`` tokens, the last ``new`` of which are drawn."""

    context: int
    chunk: int = 8192
    new: int = 64
    config: V4Config = V4_FLASH

    @property
    def name(self) -> str:
        return f"v4_flash_2l_{self.context}"

    @property
    def model(self) -> V4Config:
        return of_ratios(self.config, self.config.overlapping, self.config.disjoint)

    @property
    def ladder(self) -> MLALadder:
        """One chunk, with decodes beside it or not, and decodes alone: three programs."""
        return MLALadder(
            decodes=Ladder("decode requests", (FEWEST_ROWS,)),
            prefills=Ladder("prefill requests", (1,)),
            prefill_tokens=Ladder("prefill tokens", (self.chunk,)),
            pages=Ladder("pages of one request", (self.context // PAGE,)),
            mixed=((0, self.chunk), (FEWEST_ROWS, self.chunk)),
            context_rows=PAGE,  # of a workspace that this family has not
        )


CASES = (Case(context=1 << 20),)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """The chosen cases, one after the other; compiles outside of ``turn``, measures inside."""
    del peers
    for case in (c for c in CASES if c.name in chosen):
        begin = time.perf_counter()
        engine = made(case)
        ready = time.perf_counter() - begin
        with turn:
            row = {"case": case.name, "ready_s": ready} | walked(case, engine)
        print(row, flush=True)
        yield row
        assert row["tokens"] == case.new and row["finite"], "tokens are missing, or no numbers"
        assert not row["peak_bytes"] or abs(row["off"]) < SAID, f"memory is off by {row['off']}"


def made(case: Case) -> Engine:
    """The engine, its programs compiled."""
    engine = Engine(
        drawn(case.model, DeepseekV4),
        case.model,
        num_pages=2 + round_up(case.context, 128 * PAGE) // PAGE,
        page=PAGE,
        max_requests=1,
        prefill_chunk=case.chunk,
        max_model_len=case.context,
        cache_format="bf16",
        ladder=case.ladder,
    )
    engine.warm_up(progress=lambda state: print(state, flush=True))
    return engine


def walked(case: Case, engine: Engine) -> dict:
    """The whole sequence, chunk by chunk, then token by token."""
    stats = engine.stats()
    said = stats.weight_bytes + stats.cache_bytes + stats.workspace_bytes
    prompt = np.random.default_rng(0).integers(1, case.model.vocab, case.context - case.new)
    engine.add(prompt.tolist(), SamplingParams(max_new_tokens=case.new, ignore_eos=True))
    begin = time.perf_counter()
    at, events, done = [begin], [], False
    first = 0  # steps until the first token
    while not done:
        events += engine.step()
        at.append(time.perf_counter())
        first += not events
        done = bool(events) and events[-1].completion is not None
        if len(at) % 16 == 0:
            print(f"{len(at) - 1} steps, {at[-1] - begin:.1f} s", flush=True)
    ms = [1e3 * (b - a) for a, b in itertools.pairwise(at)]
    device = jax.devices()[0].memory_stats() or {}
    peak = device.get("peak_bytes_in_use", 0)
    tokens = [e for e in events if e.token_id is not None]
    return {
        "prefill_tokens": len(prompt),
        "chunk": case.chunk,
        "prefill_s": at[first + 1] - begin,
        "first_chunks_ms": [round(x, 1) for x in ms[2:6]],
        "last_chunks_ms": [round(x, 1) for x in ms[first - 4 : first]],
        "decode_ms": statistics.median(ms[first + 2 :] or ms),
        "tokens": len(tokens),
        "finite": all(math.isfinite(e.logprob) for e in tokens),
        "compiles": engine.stats().compiles,
        "said_bytes": said,
        "peak_bytes": peak,
        "off": peak / said - 1,
        "cache_bytes": stats.cache_bytes,
        "weight_bytes": stats.weight_bytes,
    }
