"""Three clocks, the same for us and for every peer.

Isolated calls are traced: the *sum* of their kernels' device times, and the *span* from the
start of the first kernel to the end of the last, in which gaps count and overlaps do not count
twice. *Back to back* is the slope of wall time over the number of calls: launches, gaps and
sinking clocks count. Its longer runs take 10 ms more than the shorter ones, because the start of a
run is as uncertain as 0.1 ms. Clocks follow the power drawn in the last tenths of a second: at the
limit of power each side, timed right behind the other, would have the other's clocks. So each
calls itself for half a second before it is timed.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Isolated", "back_to_back_us", "device_events", "isolated_us", "once", "waited"]

ROUNDS = 2
CALLS = 12  # of one traced stretch
FEW, LEAST = 2, 2  # chains of a short run; how many more a long one has at least
STRETCH = 1e4  # microseconds that a long run takes more
SETTLE = 5e5  # microseconds of its own calls before a side is timed
TURNS, RUNS, TRIES = 2, 4, 3  # turns of each side, timed pairs of a turn, repetitions


@dataclass(frozen=True, kw_only=True)
class Isolated:
    """Medians over calls, microseconds: of one launch of each kernel, of all its launches too."""

    sum: float
    span: float
    kernels: dict[str, float]
    totals: dict[str, float]


def once(run: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """A call of ours, and the wait for its end."""
    jax.block_until_ready(run(*given))


def waited(call: Callable[[], Any]) -> Any:
    """A call of a peer in torch, and the wait for its end; what it made."""
    out = call()
    torch.cuda.synchronize()
    return out


def isolated_us(runs: dict[str, Callable[[], None]], rounds: int = ROUNDS) -> dict[str, Isolated]:
    """Trace calls of every run in turn; ``run()`` waits for the device."""
    calls: dict[str, list[list[dict]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            calls[name] += _trace(run)
    return {name: _summary(found) for name, found in calls.items()}


def back_to_back_us(
    runs: dict[str, Callable[[int], None]], calls: dict[str, int], *, least_us: float = 0.0
) -> dict[str, float]:
    """Microseconds that one more call takes. ``run(n)`` makes ``n * calls`` calls, waits once.

    From the medians of short and long runs. What comes out below ``least_us`` was disturbed: it
    is measured again, a few times at most.
    """
    found: dict[str, float] = {}
    each = {name: _each_us(run) for name, run in runs.items()}
    more = {name: max(LEAST, math.ceil(STRETCH / us)) for name, us in each.items()}
    for _ in range(TRIES):
        rest = {k: run for k, run in runs.items() if not found.get(k, -1.0) >= least_us}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in rest}
        for _ in range(TURNS):
            for name, run in rest.items():
                run(math.ceil(SETTLE / each[name]))
                for _ in range(RUNS):
                    seconds[name].append((_seconds(run, FEW), _seconds(run, FEW + more[name])))
        for name, pairs in seconds.items():
            few, many = map(statistics.median, zip(*pairs, strict=True))
            found[name] = 1e6 * (many - few) / more[name] / calls[name]
    return found


def _each_us(run: Callable[[int], None]) -> float:
    """Microseconds that one more chain takes, roughly: not less than ten."""
    run(FEW)
    return max((_seconds(run, FEW + LEAST) - _seconds(run, FEW)) / LEAST * 1e6, 10.0)


def _seconds(run: Callable[[int], None], n: int) -> float:
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


def _trace(run: Callable[[], None]) -> list[list[dict]]:
    """Device events of a few calls, call by call, in order of their start."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(CALLS):
            run()
    events = _events(traced)
    each, rest = divmod(len(events), CALLS)
    assert (each > 0) > rest, f"{len(events)} device events in {CALLS} calls"
    return [events[i * each : (i + 1) * each] for i in range(CALLS)]


def _events(traced: profile) -> list[dict]:
    """What ran on the device, in order of its start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])


@contextmanager
def device_events() -> Iterator[tuple[Callable[[], None], list[dict]]]:
    """A function that starts to trace; the events are in the list behind the block."""
    traced, running = profile(activities=[ProfilerActivity.CUDA]), []
    events: list[dict] = []

    def start() -> None:
        running.append(traced.start())

    yield start, events
    if running:
        traced.stop()
        events += _events(traced)


def _summary(calls: list[list[dict]]) -> Isolated:
    kernels: dict[str, list[float]] = {}
    totals: dict[str, list[float]] = {}
    for call in calls:
        whole: dict[str, float] = {}
        for event in call:
            name = event["name"][:48]
            kernels.setdefault(name, []).append(event["dur"])
            whole[name] = whole.get(name, 0.0) + event["dur"]
        for name, us in whole.items():
            totals.setdefault(name, []).append(us)
    return Isolated(
        sum=statistics.median(sum(e["dur"] for e in call) for call in calls),
        span=statistics.median(
            max(e["ts"] + e["dur"] for e in call) - call[0]["ts"] for call in calls
        ),
        kernels={k: round(statistics.median(v), 2) for k, v in kernels.items()},
        totals={k: round(statistics.median(v), 2) for k, v in totals.items()},
    )
