"""Decoding end to end beside vLLM: V2-Lite's shape, random weights, ``Engine.generate``.

vLLM runs before, in processes of its own on the same machine (``shared/peers/vllm``), and leaves
JSON files; ``--peers`` is their folder. Of several files for one depth the faster figure counts.
"""

import itertools
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.random_model import drawn, of_layers
from benchmarks.timing import device_events
from mla_jax.config import ModelConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import FEWEST_ROWS, Ladder, MLALadder
from mla_jax.metadata.packed import pack
from mla_jax.model.presets import V2_LITE
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import empty_batch
from mla_jax.placement import ONE_QUEUE
from mla_jax.scheduler import Event
from mla_jax.types import cdiv

os.environ.setdefault(*ONE_QUEUE)  # as the command line does

__all__ = ["CASES", "METHOD", "PREFILLS", "Case", "engine_of", "generate", "run", "step_times"]

PAGE, CHUNK, ROWS = 64, 16384, 32768
LONGEST = 33280
STEPS, SETTLED, TRACED = 128, 4, 6
REPEATS = 3
BYTES_PER_S, FLOPS_PER_S = 4.25e12, 800e12
SHOWN = 14  # kernels of a breakdown
ROUTER = "choose"  # the kernel that every layer of experts launches once
METHOD = (
    "V2-Lite's shape (1 dense layer, the rest experts), bf16, random weights, prompts of random "
    f"tokens through Engine.generate, greedy, steps of at most {CHUNK} prompt tokens. Decode: wall "
    f"time of a step over {STEPS} steps in which all requests decode, from the stated context on. "
    f"Prefill: wall time of a call with one new token a prompt. Medians of {REPEATS} runs, except "
    f"128 requests. Peer: vLLM, "
    "torch.compile and CUDA graphs, on the same machine right before; the faster of its expert "
    "configurations that were run. Floor: the larger of the bytes of weights and caches that must "
    "be read / 4.25 TB/s and FLOPs / 800 TFLOP/s. Busy: the time in which any kernel runs, of a "
    "step in a traced run, over that of a timed step. Ours with CUDA_DEVICE_MAX_CONNECTIONS=1, as "
    "the command line has it"
)


@dataclass(frozen=True)
class Case:
    """``batch`` requests with prompts of ``context`` tokens each."""

    layers: int
    batch: int
    context: int
    decodes: bool  # else the prompts are what is timed

    @property
    def name(self) -> str:
        kind = "decode" if self.decodes else "prefill"
        return f"v2_lite_{self.layers}l_{kind}_{self.batch}x{self.context}"

    @property
    def peer(self) -> str:
        """Its name in vLLM's files."""
        return f"{'decode' if self.decodes else 'prefill'}_{self.batch}x{self.context}"

    @property
    def config(self) -> ModelConfig:
        return of_layers(V2_LITE, self.layers)


CASES = tuple(
    Case(layers, batch, context, True)
    for layers in (27, 4)
    for batch, context in ((1, 4096), (32, 4096), (128, 4096), (1, 32768))
)
PREFILLS = tuple(
    Case(layers, batch, context, False)
    for layers in (27, 4)
    for batch, context in ((8, 4096), (1, 32768))
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Time the chosen cases, row by row; compiles outside of ``turn``, measures inside.

    All runs of a case are timed before it is traced.
    """
    every = [c for c in CASES + PREFILLS if c.name in chosen]
    for layers in dict.fromkeys(c.layers for c in every):
        cases = [c for c in every if c.layers == layers]
        engine = engine_of(cases)
        _compile(engine)
        for case in cases:
            with turn:
                row = {"case": case.name, "layers": layers}
                row |= (_decode if case.decodes else _prefill)(case, engine)
                row |= _traced(case, engine, row["ours_us"]) | _memory(engine)
                row |= _beside(case, row["ours_us"], peers)
            shown = {k: v for k, v in row.items() if k.endswith("us") or k.startswith("ratio")}
            print(case.name, {k: round(v, 3) for k, v in shown.items()}, flush=True)
            yield row
        del engine  # its weights leave the device before the next one's come


def engine_of(cases: Sequence[Case]) -> Engine:
    """An engine for cases of one model; nothing is compiled yet."""
    config = cases[0].config
    pages = sorted({cdiv(4096 + STEPS + 64, PAGE), LONGEST // PAGE})
    decodes = sorted({FEWEST_ROWS, *(c.batch for c in cases if c.batch > FEWEST_ROWS)})
    most = decodes[-1]
    ladder = MLALadder(
        decodes=Ladder("decode requests", tuple(decodes)),
        prefills=Ladder.of("prefill requests", (8, most)),
        prefill_tokens=Ladder("prefill tokens", (CHUNK,)),
        pages=Ladder("pages of one request", tuple(pages)),
        context_rows=ROWS,
        mixed=((most, CHUNK), (0, CHUNK)),
    )
    return Engine(
        drawn(config),
        config,
        num_pages=1 + max(most * pages[0], pages[-1]),
        page=PAGE,
        max_requests=most,
        prefill_chunk=CHUNK,
        max_model_len=LONGEST,
        ladder=ladder,
        absorb_prefills=False,
    )


def _compile(engine: Engine) -> None:
    """The programs that the cases run, side by side."""
    used = [d for d in engine.builder.rungs() if d.bucket.prefills in (0, 8)]

    def ready(decision) -> None:
        layout = pack(empty_batch(decision, [group.name for group in engine.groups])).layout
        engine._step.compile(layout, engine._caches)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ready, used))


class _Watch:
    """Sees every event of a call: when steps ended in which all requests decoded.

    After so many ``steps`` of them it calls ``then``.
    """

    def __init__(self, case: Case, steps: int, then: Callable[[], None] = lambda: None):
        self.case, self._steps, self._then = case, steps, then
        self.counts: Counter[str] = Counter()
        self.times: list[float] = []
        self._seen: set[str] = set()
        self.last: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.id in self._seen:
            self._step_ended()
        self._seen.add(event.id)
        self.counts[event.id] += 1
        self.last[event.id] = event.token_id or 0

    def _step_ended(self) -> None:
        whole = len(self._seen) == self.case.batch and min(self.counts.values()) > 1
        if whole and len(self.times) <= self._steps:
            self.times.append(time.perf_counter())
            if len(self.times) == self._steps + 1:
                self._then()
        self._seen.clear()


def _decode(case: Case, engine: Engine) -> dict:
    """The median of ``REPEATS`` runs; one run where the prompts alone take seconds."""
    few = case.batch * case.context <= 140_000
    if few:
        generate(engine, case, 8)
    runs = [_decode_once(case, engine) for _ in range(REPEATS if few else 1)]
    median = sorted(runs, key=lambda run: run["ours_us"])[len(runs) // 2]
    return median | {"runs": [run["ours_us"] for run in runs]}


def _decode_once(case: Case, engine: Engine) -> dict:
    """Steps behind each other, all requests decoding."""
    us, last = step_times(case, engine, STEPS)
    mean = sum(us) / len(us)
    return {
        "ours_us": mean,
        "median_us": statistics.median(us),
        "tokens_per_s": 1e6 * case.batch / mean,
        **_floor(case, mean, steps_behind=STEPS // 2),
        "distinct_last_tokens": len(set(last)),
    }


def step_times(case: Case, engine: Engine, steps: int) -> tuple[list[float], list[int]]:
    """Microseconds of so many steps in which all requests decode, and the last token of each."""
    watch = _Watch(case, steps)
    generate(engine, case, _lead(case) + steps + 2, watch)
    times = watch.times
    assert len(times) == steps + 1, f"{case.name}: {len(times)} steps in which all decode"
    return [1e6 * (b - a) for a, b in itertools.pairwise(times)], list(watch.last.values())


def _lead(case: Case) -> int:
    """Steps, at most, until all requests decode."""
    return 2 + cdiv(case.batch * case.context, CHUNK)


def _prefill(case: Case, engine: Engine) -> dict:
    """Whole calls with one new token a prompt."""
    generate(engine, case, 1)
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        generate(engine, case, 1)
        seconds.append(time.perf_counter() - begin)
    us = 1e6 * statistics.median(seconds)
    return {
        "ours_us": us,
        "runs": [1e6 * s for s in seconds],
        "tokens_per_s": 1e6 * case.batch * case.context / us,
        **_floor(case, us),
    }


def _traced(case: Case, engine: Engine, us: float) -> dict:
    """Where the time of a step goes, or of a whole call of prompts."""
    with device_events() as (start, events):
        if case.decodes:
            new = _lead(case) + SETTLED + TRACED + 2
            generate(engine, case, new, _Watch(case, SETTLED, start))
        else:
            start()
            generate(engine, case, 1)
    return _breakdown(events, us, sum(case.config.sparse_layers) if case.decodes else None)


def generate(engine: Engine, case: Case, new: int, watch: Callable | None = None) -> None:
    """Serve the case's requests with prompts that no one saw before, ``new`` tokens each."""
    rng = np.random.default_rng(engine.stats().new_tokens)  # no prompt twice
    prompts = [rng.integers(100, 99_000, case.context).tolist() for _ in range(case.batch)]
    wish = SamplingParams(max_new_tokens=new, ignore_eos=True)
    engine.generate(prompts, wish, on_progress=watch)


def _floor(case: Case, us: float, steps_behind: int = 0) -> dict:
    floor = _floor_us(case, steps_behind)
    return {"floor_us": floor, "floor_percent": 100 * floor / us}


def _floor_us(case: Case, steps_behind: int = 0) -> float:
    """No machine with these rates is faster; weights are read once in a step."""
    config, dims, moe = case.config, case.config.dims, case.config.moe
    assert moe is not None
    layers, dense = case.layers, case.config.sparse_layers.count(False)
    new = case.batch if case.decodes else case.batch * case.context
    down = config.hidden * (dims.rank + dims.rope)
    heads = dims.heads * (config.hidden * (dims.nope + dims.rope + dims.v))
    up = dims.rank * dims.heads * (dims.nope + dims.v)
    expert = 3 * config.hidden * moe.width
    attention = down + heads + up
    shared = moe.shared * expert + config.hidden * moe.experts
    per_token = layers * attention + dense * 3 * config.hidden * config.mlp
    per_token += (layers - dense) * (shared + moe.topk * expert)
    head = config.hidden * config.vocab
    touched = moe.experts * (1 - (1 - moe.topk / moe.experts) ** new)
    read = per_token + (layers - dense) * (touched - moe.topk) * expert + head
    row = dims.rank + dims.rope
    keys = case.context + steps_behind
    if case.decodes:
        read += layers * case.batch * keys * row
        pairs = case.batch * keys * dims.heads * (row + dims.rank)
    else:
        wide = dims.nope + dims.rope + dims.v
        pairs = case.batch * keys * (keys + 1) / 2 * dims.heads * wide
    flops = 2 * (per_token * new + head * case.batch + layers * pairs)
    return 1e6 * max(2 * read / BYTES_PER_S, flops / FLOPS_PER_S)


def _breakdown(events: list[dict], us: float, sparse: int | None = None) -> dict:
    """Microseconds of each kernel in a step, and of the time in which any runs.

    Each of the ``sparse`` layers chooses its experts once in a step. The first ``TRACED`` steps
    count: later ones are shorter, as requests have ended. None: all is one step.
    """
    steps = 1
    if sparse:
        starts = [e["ts"] for e in events if e["name"] == ROUTER][::sparse][: TRACED + 1]
        steps = len(starts) - 1
        events = [e for e in events if starts and starts[0] <= e["ts"] < starts[-1]]
    if not events:
        return {}
    each: Counter[str] = Counter()
    end, busy = events[0]["ts"], 0.0
    for e in events:
        each[e["name"][:64]] += e["dur"] / steps
        busy += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
        end = max(end, e["ts"] + e["dur"])
    return {
        "busy_us": busy / steps,
        "busy_percent": 100 * busy / steps / us,
        "events_a_step": len(events) / steps,
        "kernels": {k: round(v, 1) for k, v in each.most_common(SHOWN)},
        **({"layer": _layer(events)} if sparse else {}),
    }


def _layer(events: list[dict]) -> list[tuple[float, float, str]]:
    """Start, duration and name of the kernels of one layer of experts, a median one, in order."""
    firsts = [i for i, e in enumerate(events) if e["name"] == ROUTER]
    if len(firsts) < 2:
        return []
    by_time = sorted(
        itertools.pairwise(firsts), key=lambda p: events[p[1]]["ts"] - events[p[0]]["ts"]
    )
    a, b = by_time[(len(by_time) - 1) // 2]
    begin = events[a]["ts"]
    return [(round(e["ts"] - begin, 1), round(e["dur"], 1), e["name"][:40]) for e in events[a:b]]


def _beside(case: Case, us: float, peers: Path | None) -> dict:
    """The ratio to the faster of vLLM's runs of this depth."""
    found = {}
    for path in sorted(peers.glob("*.json")) if peers else []:
        record = json.loads(path.read_text())
        if record["args"]["layers"] != case.layers:
            continue
        if row := record["cases"].get(case.peer):
            ms = row.get("step_ms") or 1e3 * row.get("s", math.nan)
            if math.isfinite(ms):  # vLLM's side leaves NaN where it saw too few steps
                found[record["args"]["moe_config"]] = 1e3 * ms
    if not found:
        return {}
    best = min(found, key=found.__getitem__)
    ratio = {"ratio": found[best] / us, "peer_us": found[best], "peer": f"vLLM, {best}"}
    return ratio | {f"peer_{name}_us": value for name, value in found.items()}


def _memory(engine: Engine) -> dict:
    stats = engine.stats()
    found = engine.placement.device.memory_stats() or {}
    return {
        "programs": stats.compiles,
        "weight_bytes": stats.weight_bytes,
        "cache_bytes": stats.cache_bytes,
        "workspace_bytes": stats.workspace_bytes,
        "peak_bytes": found.get("peak_bytes_in_use", 0),
    }
