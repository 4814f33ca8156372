"""``python -m benchmarks.crossover --out FILE``: prefill over pages against gather and expand.

Times one attention layer (of a tiny hidden width) both ways for few queries on long contexts and
fits the rates of ``mla_jax.model.prefill_crossover``, whose data file this writes.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.run import turn as run_turn
from benchmarks.timing import isolated_us
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.mla import build_mla
from mla_jax.model.mla import MLA
from mla_jax.model.prefill_crossover import absorbed_flops, expanded_flops, tiled_flops
from mla_jax.model.presets import V3
from mla_jax.model.step import LOOPS_IN_GRAPHS
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import cdiv

PAGE = 64
RUNS = {128: (1, 4), 16: (4,)}  # lengths tried, by heads
LONG, SHORT = (64, 32768), (128, 4096)  # queries and context; LONG decides the run length
ABSORBED = (LONG, (16, 32768), (256, 32768), SHORT)
EXPANDED = (LONG, (256, 32768), SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.crossover", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turn", type=Path, help="file that a process locks to time")
    parser.add_argument("--part", help="for internal use: heads, run length (0 = expanded)")
    given = parser.parse_args()
    if given.part:
        heads, run = map(int, given.part.split(","))
        for rows in measure(heads, run, run_turn(given.turn)):
            given.out.write_text(json.dumps(rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        parts = {}
        for heads, runs in RUNS.items():
            for run in (0, *runs):
                part = Path(folder) / f"{heads}_{run}.json"
                command = [sys.executable, "-m", "benchmarks.crossover", "--out", str(part)]
                command += ["--part", f"{heads},{run}", "--turn", str(given.turn or part)]
                parts[heads, run] = subprocess.Popen(command), part
        times = {}
        for key, (process, part) in parts.items():
            process.wait()
            times[key] = json.loads(part.read_text()) if part.exists() else []
    found = record(DeviceInfo.current(), times)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(heads: int, run: int, turn: AbstractContextManager) -> Iterator[list[dict]]:
    """Times of one path, more and more; expanded rows begin with the projection's rate."""
    layer, rows, rate = _Layer(heads), [], {}
    if not run:
        up = layer.projection()
        with turn:
            us = isolated_us({"once": up}, rounds=1)["once"].span
        flops = 2.0 * 32768 * layer.dims.rank * heads * (layer.dims.nope + layer.dims.v)
        rate = {"projection_tflops": round(flops / us / 1e6, 1)}
    for queries, context in ABSORBED if run else EXPANDED:
        once = layer.compiled(queries, context, absorb=run)
        with turn:
            us = isolated_us({"once": once}, rounds=1)["once"].span
        sizes = {"heads": heads, "queries": queries, "context": context}
        rows.append(sizes | {"us": round(us, 1)} | rate)
        print("run", run, rows[-1], flush=True)
        yield rows


def record(device: DeviceInfo, times: dict[tuple[int, int], list[dict]]) -> dict:
    """The data file, from the times of every path by heads and run length."""
    rates, rows = [], []
    for heads, runs in RUNS.items():
        run = min(runs, key=lambda n: times[heads, n][0]["us"])
        dims = dataclasses.replace(V3.dims, heads=heads)
        absorbed, expanded = times[heads, run], times[heads, 0]
        projection = expanded[0]["projection_tflops"]
        lens = [([r["queries"]], [r["context"]]) for r in expanded]
        up = [expanded_flops(dims, *n)[0] for n in lens]
        rest = [r["us"] - f / projection / 1e6 for r, f in zip(expanded, up, strict=True)]
        tiles = [tiled_flops(dims, *n, multiprocessors=device.sms) for n in lens]
        whole = [sum(absorbed_flops(dims, [r["queries"]], [r["context"]])) for r in absorbed]
        rates.append(
            {
                "heads": heads,
                "run": run,
                "projection_tflops": projection,
                "expanded": _fit(tiles, rest),
                "absorbed": _fit(whole, [r["us"] for r in absorbed]),
            }
        )
        by_shape = {(r["queries"], r["context"]): r["us"] for r in expanded}
        for r in absorbed:
            row = {k: r[k] for k in ("heads", "queries", "context")} | {"absorbed_us": r["us"]}
            expanded_us = by_shape.get((r["queries"], r["context"]))
            rows.append(row | ({"expanded_us": expanded_us} if expanded_us else {}))
    return {
        "device": device.kind,
        "multiprocessors": device.sms,
        "measured": f"jax {jax.__version__}, {datetime.date.today()}, bf16, page {PAGE}, "
        "one request, one layer, span of an isolated call, loops in graphs as in the engine",
        "rates": rates,
        "rows": rows,
        "tried": {f"{heads} heads, run {run}": t for (heads, run), t in times.items()},
    }


def _fit(flops: list[float], us: list[float]) -> dict[str, float]:
    """``us = fixed_us + flops / tflops / 1e6``, least squares of the relative error."""
    x, y = np.array(flops) / 1e6, np.array(us)
    slope, fixed = np.linalg.lstsq(np.stack([x / y, 1 / y], 1), np.ones(len(y)), rcond=None)[0]
    return {"tflops": round(float(1 / slope), 1), "fixed_us": round(max(float(fixed), 0.0), 1)}


class _Layer:
    """A layer with so many heads, and its timing."""

    def __init__(self, heads: int):
        self.dims = dataclasses.replace(V3.dims, heads=heads, q_rank=None)
        config = dataclasses.replace(V3, hidden=64, dims=self.dims)
        layer = MLA(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        self.graph, state = nnx.split(layer)
        self.state = state, layer.absorbed()

    def compiled(self, queries: int, context: int, *, absorb: int) -> Callable[[], None]:
        """One call on one request; ``absorb`` is a run length, 0 = expanded."""
        pages = cdiv(queries + context, PAGE)
        rows = 0 if absorb else min(context, 32768)
        bucket = MLABucket(
            decodes=0, prefills=1, prefill_tokens=queries, pages=pages, context_rows=rows,
            absorb=absorb,
        )  # fmt: skip

        def attend(state, cache, x, starts, lens, table):
            meta = build_mla(starts, lens, table, jnp.int32(0), bucket=bucket, page=PAGE)
            layer = nnx.merge(self.graph, state[0])
            return layer(x, meta, cache, absorbed=state[1], backend="mosaic")

        made = jax.jit(
            lambda key: jax.random.normal(key, (pages, PAGE, self.dims.row), jnp.bfloat16)
        )(jax.random.key(0))
        cache = LatentCache(
            pages=made, scale=jnp.float32(1), rank=self.dims.rank, format=FORMATS["bf16"]
        )
        x = jax.random.normal(jax.random.key(1), (queries, 64), jnp.bfloat16)
        table = np.random.default_rng(0).permutation(pages)[None]
        given = [jnp.asarray(a, jnp.int32) for a in ([0, queries], [queries + context], table)]
        jitted = jax.jit(attend, donate_argnums=(1,), compiler_options=LOOPS_IN_GRAPHS)
        program = jitted.lower(self.state, cache, x, *given).compile()
        held = [cache]

        def once():
            y, held[0] = program(self.state, held[0], x, *given)
            y.block_until_ready()

        return once

    def projection(self) -> Callable[[], None]:
        """The up-projection of one full workspace."""
        x = jax.random.normal(jax.random.key(0), (32768, self.dims.rank), jnp.bfloat16)
        up = jax.jit(lambda state, x: nnx.merge(self.graph, state[0]).kv_up(x))
        up(self.state, x).block_until_ready()
        return lambda: up(self.state, x).block_until_ready()


if __name__ == "__main__":
    main()
