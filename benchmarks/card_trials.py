"""``python -m benchmarks.card_trials``: how a decode step over several cards is compiled best.

XLA's host launches what is not in a CUDA graph: sums over the cards, and what stands between the
begin and the end of a copy. The trials change what that is, one after the other in one process,
with the weights of a model's widths that are drawn once. Each row says how long a step takes, and
how much of that the host waits, and whether its tokens are those of the first trial. With
``--processes`` each card has a process of its own: the calls of several cards in one process may
wait for each other. ``--trace FOLDER`` writes what ran on the cards in the last steps of one
request: name, start, microseconds, card and stream, a file for each trial and process. ``--host
FOLDER`` has JAX's profiler write what the host did.
"""

import argparse
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import lax

from benchmarks import processes
from benchmarks.cards import ladder_of
from benchmarks.compiling import gpu_options
from benchmarks.random_model import drawn, of_layers
from benchmarks.timing import device_events
from mla_jax.config_v4 import AnyConfig
from mla_jax.engine import Engine
from mla_jax.model import mla, moe, step
from mla_jax.model.family import family_of
from mla_jax.model.presets import PRESETS
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.step import LOOPS_IN_GRAPHS
from mla_jax.placement import Placement
from mla_jax.types import cdiv

PAGE, CHUNK, MOST, STEPS, REPEATS = 64, 2048, 8, 64, 3
TRACED = 12_000  # events in a file

type Patches = tuple[tuple[Any, str, Any], ...]
"""Modules or classes, a name in each, and what stands for it."""

PASSES = "xla_disable_hlo_passes"

TRIALS: dict[str, dict[str, Any]] = {
    "default": {},
    "beside": {PASSES: "rematerialization", "xla_gpu_disable_async_collectives": ""},
    "one_graph": {name: f"{kinds},COLLECTIVES" for name, kinds in LOOPS_IN_GRAPHS.items()},
    "looped": {"xla_gpu_command_buffer_unroll_loops": False},
    "more_captures": {"xla_cmd_buffer_trace_cache_size": 256},
    "nccl": {},
    "shared_beside": {},
    "shared_plain": {},
    "choice_anywhere": {},
    "plain_order": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "tokens_apart": {},
    "unlooped": {},
    "twins": {},
    "absorbed_apart": {},
    "norm_apart": {},
    "copies": {PASSES: "rematerialization"},
    "choosing": {},
    "in_kernels": {PASSES: f"{step.IN_PLACE[PASSES]},{step.IN_KERNELS[PASSES]}"},
}
"""Options in place of a step's own: copies and sums begin early; XLA's sums are in the graph; the
graph has a loop over layers; XLA keeps 256 captured launches of each call, not 16; every sum
over the cards is NCCL's; shared experts do not wait for the router's logits; the choice of
experts is launched where XLA puts it; 16-bit shared experts are cuBLAS's; kernels in the order
of a plain schedule; tokens are elsewhere in each step; layers one after the other in the
program; every other step runs a second copy of its program, with CUDA graphs of its own; queries
are absorbed in a launch of their own; rows are normalised in a launch before the router's; the
step's words and tokens are copied, not read and written by kernels; the experts' first product
makes the choice itself (``benchmarks.choosing``); over several cards too kernels read and write the
host's memory."""


class _Twins:
    """A program compiled twice; calls take turns."""

    def __init__(self, *programs: jax.stages.Compiled):
        self._turns, self.memory_analysis = itertools.cycle(programs), programs[0].memory_analysis

    def __call__(self, *args: Any) -> Any:
        return next(self._turns)(*args)


_COMPILED = step.Step._compiled


def _compiled_twice(self: Any, *args: Any) -> Any:
    return _Twins(*(_COMPILED(self, *args) for _ in range(2)))


def _choosing() -> Patches:
    from benchmarks.choosing import Choosing  # needs Triton
    from mla_jax.pallas import triton_lib

    return ((triton_lib, "call", Choosing(triton_lib.call)),)


PATCHES: dict[str, Patches | Callable[[], Patches]] = {
    "nccl": ((step, "_has_peers", lambda _: False),),
    "shared_beside": ((moe, "FEWEST_ROWS", 0),),
    "shared_plain": ((moe, "_beside", lambda shared, x, **facts: shared(x, **facts)),),
    "choice_anywhere": ((moe, "_ahead", lambda *found: found),),
    "tokens_apart": ((step, "DONATED", step.DONATED[:2]),),
    "unlooped": ((lax, "scan", functools.partial(lax.scan, unroll=True)),),
    "twins": ((step.Step, "_compiled", _compiled_twice),),
    "absorbed_apart": ((mla, "FEW_HEADS", 0),),
    "norm_apart": ((moe.MoE, "_normalises", lambda *args, **facts: False),),
    "choosing": _choosing,
}
"""What a trial changes in the library, or what returns this."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.card_trials", description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="V3")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--trials", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--trace", type=Path, help="a folder")
    parser.add_argument("--host", type=Path, help="a folder")
    processes.add_options(parser)
    given = parser.parse_args()
    processes.enter(given, "benchmarks.card_trials")
    layers = of_layers(PRESETS[given.model], given.layers)
    compare(layers, given.trials, context=given.context, trace=given.trace, host=given.host)


def compare(
    config: AnyConfig,
    trials: list[str],
    *,
    context: int,
    trace: Path | None = None,
    host: Path | None = None,
) -> list[dict[str, Any]]:
    """A row for each trial, printed when it is known."""
    placement = Placement.of(jax.devices())
    weights = weights_of(config, placement)
    rows: list[dict[str, Any]] = []
    first: list[list[int]] = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial, "layers": config.layers, "cards": placement.size}
        row["processes"] = placement.processes
        try:
            name = f"{trial}_{jax.process_index()}"
            files = {"trace": trace and trace / f"{name}.json", "host": host and host / name}
            with changed(trial):
                found, tokens = _measured(weights, config, placement, context, **files)
            first = first or tokens
            row |= found | {"equal": tokens == first}
        except Exception as error:  # a trial may fail where the next one does not
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)
        rows.append(row)
        gc.collect()
    return rows


@contextmanager
def changed(trial: str) -> Iterator[None]:
    """Within it the library is as the trial wants it."""
    patches = PATCHES.get(trial, ())
    with ExitStack() as stack, gpu_options(TRIALS[trial]):
        for patch in patches() if callable(patches) else patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def weights_of(config: AnyConfig, placement: Placement) -> Any:
    """Random ones, in e4m3 if the model is published so."""
    module = family_of(config.family).module
    return drawn(config, module, fp8=config.fp8_block is not None, placement=placement)


def engine_of(
    weights: Any, config: AnyConfig, placement: Placement, *, longest: int, requests: int = MOST
) -> Engine:
    """With one program of decodes, and room for so many requests of the longest."""
    pages = cdiv(longest, PAGE)
    return Engine(
        weights, config, page=PAGE, num_pages=1 + requests * pages, max_requests=MOST,
        prefill_chunk=CHUNK, max_model_len=longest, devices=placement, absorb_prefills=False,
        ladder=ladder_of(config, (MOST,), tokens=CHUNK, pages=pages),
    )  # fmt: skip


def _measured(
    weights: Any,
    config: AnyConfig,
    placement: Placement,
    context: int,
    *,
    trace: Path | None,
    host: Path | None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Microseconds of a step, and the tokens of all requests."""
    engine = engine_of(weights, config, placement, longest=context + STEPS + PAGE)
    begun = time.perf_counter()
    engine.warm_up()
    row: dict[str, Any] = {"compile_s": round(time.perf_counter() - begun, 1)}
    rng, tokens = np.random.default_rng(0), []
    for requests in (1, MOST):
        prompts = [rng.integers(0, config.vocab, context).tolist() for _ in range(requests)]
        runs = [_run(engine, prompts) for _ in range(1 + REPEATS)]
        row[f"us_{requests}"] = [round(us) for us, *_ in runs[1:]]
        row[f"waits_{requests}"] = [round(us) for _, us, _ in runs[1:]]
        tokens += runs[-1][2]
        if trace is not None and requests == 1:
            _traced(engine, prompts, trace)
        if host is not None and requests == 1:
            with jax.profiler.trace(host):
                wish = SamplingParams(max_new_tokens=20, ignore_eos=True)
                engine.generate(prompts, wish)
    return row, tokens


def _traced(engine: Engine, prompts: list[list[int]], file: Path) -> None:
    """What ran on the cards from the 40th token on; the last of it, so that the file is small."""
    with device_events() as (start, events):
        seen = itertools.count()
        wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
        engine.generate(prompts, wish, on_progress=lambda _: start() if next(seen) == 40 else None)
    short = [
        (e["name"][:60], e["ts"], e["dur"], e["args"].get("device"), e["args"].get("stream"))
        for e in events
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(short[-TRACED:]))


def _run(engine: Engine, prompts: list[list[int]]) -> tuple[float, float, list[list[int]]]:
    """The mean time of the last steps, in which all requests decode; the median time that the host
    waits for a step's tokens; and the tokens."""
    times: dict[str, list[float]] = {}
    waits: list[float] = []
    read = step.StepOutput.read

    def timed(out: step.StepOutput) -> Any:
        begun = time.perf_counter()
        found = read(out)
        waits.append(1e6 * (time.perf_counter() - begun))
        return found

    def watch(event: Any) -> None:
        times.setdefault(event.id, []).append(time.perf_counter())

    wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    with mock.patch.object(step.StepOutput, "read", timed):
        done = engine.generate(prompts, wish, on_progress=watch)
    last = list(times.values())[-1][4:]
    us = statistics.mean(1e6 * (b - a) for a, b in itertools.pairwise(last))
    return us, statistics.median(waits[-STEPS // 2 :]), [list(d.token_ids) for d in done]


if __name__ == "__main__":
    main()
