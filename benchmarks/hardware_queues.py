"""``python -m benchmarks.hardware_queues``: a step's two speeds, and the hardware queues of CUDA.

With eight queues, as CUDA has by itself, a step of one request has two speeds, 4 % apart: in the
slow one each kernel starts 0.3 us later behind the one before. Prompts make steps slow, other
programs make them fast again. With one queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, the default here)
no slow step was seen yet. docs/log/served_step.md has the story.

A chain calls the step's program again and again with one batch, without an engine's host, so many
steps ``ahead`` of the one that is read. A row has what ran before, the microseconds of a step in
each chain, and (``--traced``) the median of the gaps between kernels in one more chain. Tracing
makes slow steps fast too, so only a run without ``--traced`` shows the slow speed.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.decodes import chained, decodes_of
from benchmarks.run import turn
from benchmarks.serve import CASES, engine_of, generate
from mla_jax.engine import Engine
from mla_jax.metadata.packed import pack

CALLS, TRACED, PROMPTS = 60, 12, 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.hardware_queues", description=__doc__)
    parser.add_argument("--traced", action="store_true")
    parser.add_argument("--turn", type=Path, help="file that a process locks to use the device")
    given = parser.parse_args()
    engine, case = engine_of([CASES[0]]), CASES[0]
    one = jnp.zeros(8)
    add = jax.jit(lambda x: x + 1)

    def prompts() -> None:
        for _ in range(PROMPTS):
            generate(engine, case, 2)

    def added() -> None:
        jax.block_until_ready(add(one))

    prompts()
    added()
    chain = Chain(engine, given.traced)
    with turn(given.turn):
        chain.shown("nothing", lambda: (), (2, 2))
        for _ in range(2):
            chain.shown("prompts", prompts, (2, 2))
            chain.shown("nothing", lambda: (), (0, 1, 2, 3))
            chain.shown("1 added to 8 numbers", added, (2,) * 8)
            chain.shown("nothing", lambda: (), (0, 1, 2, 3))


class Chain:
    """Steps of one request, each with the caches and the tokens of the one before."""

    def __init__(self, engine: Engine, traced: bool):
        self._engine, self._batch = engine, pack(decodes_of(engine, 1, CASES[0].context))
        self._traced = traced

    def us(self, ahead: int, calls: int = CALLS) -> float:
        """Microseconds of a step."""
        return chained(self._engine, self._batch, calls, ahead)[0]

    def gap(self, ahead: int) -> float:
        """Median of the microseconds between kernels."""
        from benchmarks.timing import device_events

        with device_events() as (start, events):
            start()
            self.us(ahead, TRACED)
        gaps, end = [], 0.0
        for e in events:
            if 0 < e["ts"] - end < 3:
                gaps.append(e["ts"] - end)
            end = max(end, e["ts"] + e["dur"])
        return statistics.median(gaps)

    def shown(self, what: str, before: Callable[[], Any], aheads: tuple[int, ...]) -> None:
        queues = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        row: dict[str, Any] = {"queues": queues, "behind": what, "ahead": aheads, "us": []}
        for ahead in aheads:
            before()
            row["us"].append(round(self.us(ahead)))
            if self._traced:
                row.setdefault("gaps_us", []).append(round(self.gap(ahead), 2))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
