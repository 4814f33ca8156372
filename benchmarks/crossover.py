"""``python -m benchmarks.crossover --out FILE``: prefill over pages against gather and expand.

Times one attention layer (of a tiny hidden width) both ways for few queries on long contexts and
fits the rates of ``mla_jax.model.prefill_crossover``, whose data file this writes.
"""

import argparse
import dataclasses
import datetime
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import isolated_us
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.mla import build_mla
from mla_jax.model.mla import MLA
from mla_jax.model.prefill_crossover import absorbed_flops, expanded_flops
from mla_jax.model.presets import V3
from mla_jax.types import cdiv

PAGE = 64
HEADS = (128, 16)
QUERIES = (16, 64, 128, 256, 512)
CONTEXTS = (4096, 32768)
RUNS = {128: (1, 2, 4), 16: (4,)}
SHAPE = (64, 32768)  # queries and context at which the run length is chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.crossover", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["absorbed", "expanded"], help="one of the paths")
    given = parser.parse_args()
    record = {
        "device": jax.devices()[0].device_kind,
        "measured": f"jax {jax.__version__}, {datetime.date.today()}, bf16, page {PAGE}, "
        "one request, one layer, span of an isolated call",
        "rates": [],
        "rows": [],
    }
    for heads in HEADS:
        rates, rows = measure(heads, given.only)
        record["rates"].append(rates)
        record["rows"] += rows
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(heads: int, only: str | None = None) -> tuple[dict, list[dict]]:
    """Fitted rates of both paths, and the times they were fitted to."""
    layer = _Layer(heads)
    run = min(RUNS[heads], key=lambda n: layer.us(*SHAPE, absorb=n)) if only != "expanded" else 0
    rows = []
    for context in CONTEXTS:
        for queries in QUERIES:
            row = {"heads": heads, "queries": queries, "context": context}
            if run:
                row["absorbed_us"] = layer.us(queries, context, absorb=run)
            if only != "absorbed":
                row["expanded_us"] = layer.us(queries, context, absorb=0)
            print(row, flush=True)
            rows.append(row)
    rates: dict = {"heads": heads, "run": run}
    if run:
        pairs = [absorbed_flops(layer.dims, [r["queries"]], [r["context"]]) for r in rows]
        rates["absorbed"] = _fit([sum(p) for p in pairs], [r["absorbed_us"] for r in rows])
    if only != "absorbed":
        rates["projection_tflops"] = layer.projection_tflops()
        flops = [expanded_flops(layer.dims, [r["queries"]], [r["context"]]) for r in rows]
        up = [p / rates["projection_tflops"] / 1e6 for p, _ in flops]
        rest = [r["expanded_us"] - u for r, u in zip(rows, up, strict=True)]
        rates["expanded"] = _fit([a for _, a in flops], rest)
    print(rates, flush=True)
    return rates, rows


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
        layer.absorb()
        self.graph, self.state = nnx.split(layer)

    def us(self, queries: int, context: int, *, absorb: int) -> float:
        """Span of one call on one request; ``absorb`` is a run length, 0 = expanded."""
        pages = cdiv(queries + context, PAGE)
        rows = 0 if absorb else min(context, 32768)
        bucket = MLABucket(
            decodes=0, prefills=1, prefill_tokens=queries, pages=pages, context_rows=rows,
            absorb=absorb,
        )  # fmt: skip

        def attend(state, cache, x, starts, lens, table):
            meta = build_mla(starts, lens, table, jnp.int32(0), bucket=bucket, page=PAGE)
            return nnx.merge(self.graph, state)(x, meta, cache, backend="mosaic")

        made = jax.jit(
            lambda key: jax.random.normal(key, (pages, PAGE, self.dims.row), jnp.bfloat16)
        )(jax.random.key(0))
        cache = LatentCache(
            pages=made, scale=jnp.float32(1), rank=self.dims.rank, format=FORMATS["bf16"]
        )
        x = jax.random.normal(jax.random.key(1), (queries, 64), jnp.bfloat16)
        table = np.random.default_rng(0).permutation(pages)[None]
        given = [jnp.asarray(a, jnp.int32) for a in ([0, queries], [queries + context], table)]
        program = jax.jit(attend, donate_argnums=(1,)).lower(self.state, cache, x, *given).compile()
        held = [cache]

        def once():
            y, held[0] = program(self.state, held[0], x, *given)
            y.block_until_ready()

        return round(isolated_us({"once": once}, rounds=1)["once"].span, 1)

    def projection_tflops(self) -> float:
        """Of the up-projection of one full workspace."""
        x = jax.random.normal(jax.random.key(0), (32768, self.dims.rank), jnp.bfloat16)
        up = jax.jit(lambda state, x: nnx.merge(self.graph, state).kv_up(x))
        span = isolated_us({"up": lambda: up(self.state, x).block_until_ready()}, rounds=1)
        flops = 2.0 * 32768 * self.dims.rank * self.dims.heads * (self.dims.nope + self.dims.v)
        return round(flops / span["up"].span / 1e6, 1)


if __name__ == "__main__":
    main()
