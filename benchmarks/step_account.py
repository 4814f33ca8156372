"""Where a decode step's time goes: each kernel of one layer of experts, in order of its start.

V2-Lite's widths, few layers, random weights, caches of zeros; the engine's own programs, called
behind each other. ``python -m benchmarks.step_account --layers 7 --cases 1x4096,32x4096``;
``--without OP,OP`` has operations that fuse others done part by part (``down_sum`` is one, too).
"""

import argparse
import dataclasses
import fcntl
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks.random_model import drawn, of_layers
from benchmarks.timing import device_events
from mla_jax import ops
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import FEWEST_ROWS, Ladder, MLALadder
from mla_jax.metadata.packed import pack
from mla_jax.model.presets import V2_LITE
from mla_jax.model.step import empty_batch
from mla_jax.pallas.grouped_matmul import triton as grouped
from mla_jax.types import cdiv

PAGE, MOST, STEPS, TRACED = 64, 128, 60, 4
PATIENCE = 45.0  # seconds that a process waits for others
FIRST = "gate_up"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--cases", default="1x4096,32x4096,128x4096,1x32768")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--out")
    parser.add_argument("--timeline", type=int, default=1)
    parser.add_argument("--beside", type=int, default=0, help="processes that wait for each other")
    args = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    config = of_layers(V2_LITE, args.layers)
    model = drawn(config)
    rows, logprobs, engines = [], {}, []
    whole, most_summed = ops.in_one_kernel, grouped.MOST_SUMMED
    for without in args.without or [""]:
        left = set(filter(None, without.split(",")))
        grouped.MOST_SUMMED = 0 if "down_sum" in left else most_summed
        ops.in_one_kernel = lambda op, *a, left=left, **k: op not in left and whole(op, *a, **k)
        begin = time.perf_counter()
        engines.append((without, engine_of(model, config, cases)))
        print(f"without {without or 'nothing'}: ready in {time.perf_counter() - begin:.0f} s")
    if args.beside:  # others compile meanwhile, and are measured before or after
        folder = Path("/tmp/step_account")
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()
        until = time.perf_counter() + PATIENCE
        while len(list(folder.iterdir())) < args.beside and time.perf_counter() < until:
            time.sleep(0.1)
    with open("/tmp/step_account.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for without, engine in engines:
            for case in cases:
                us, found = timed(engine, case)
                off = float(np.abs(logprobs.setdefault(case, found) - found).max())
                rows.append({"case": case, "without": without, "step_us": us, "off": off})
                print(rows[-1], flush=True)
        turns = ((engine, case) for _, engine in engines for case in cases)
        for row, (engine, case) in zip(rows, turns, strict=True):
            lines, row["layer_us"], row["kernels"] = account(traced(engine, case))
            print(row)
            print("\n".join(lines) if args.timeline else "", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)


def engine_of(model, config, cases) -> Engine:
    """An engine whose programs of these cases are compiled, side by side."""
    widths = {cdiv(context + 64, PAGE) for _, context in cases}
    batches = {max(FEWEST_ROWS, batch) for batch, _ in cases}
    ladder = MLALadder(
        decodes=Ladder.of("decode requests", batches | {MOST}),
        prefills=Ladder("prefill requests", (MOST,)),
        prefill_tokens=Ladder("prefill tokens", (512,)),
        pages=Ladder.of("pages of one request", widths),
        context_rows=4096,
        mixed=((MOST, 512), (0, 512)),
    )
    most = max(batch * cdiv(context + 64, PAGE) for batch, context in cases)
    engine = Engine(
        model, config, num_pages=1 + most, page=PAGE, max_requests=MOST, prefill_chunk=512,
        max_model_len=max(widths) * PAGE, ladder=ladder, absorb_prefills=False,
    )  # fmt: skip

    def ready(case) -> None:
        engine._step.compile(pack(batch_of(engine, case)).layout, engine._caches)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ready, cases))
    return engine


def batch_of(engine: Engine, case: tuple[int, ...]):
    """All requests decode one token behind so many."""
    batch, context = case
    pages = cdiv(context + 64, PAGE)
    buckets = (d for d in engine.builder.rungs() if d.bucket.prefills == 0)
    rung = min(
        (d for d in buckets if d.bucket.decodes >= batch and d.bucket.pages >= pages),
        key=lambda d: (d.bucket.decodes, d.bucket.pages),
    )
    rung = dataclasses.replace(rung, num_decodes=np.asarray(batch, np.int32))
    empty = empty_batch(rung, [group.name for group in engine.groups])
    rows = len(empty.seq_lens)
    real = np.arange(rows) < batch
    table = np.zeros_like(empty.page_tables["latent"])
    table[:batch, :pages] = 1 + np.arange(batch * pages).reshape(batch, pages)
    ids = np.where(np.arange(len(empty.token_ids)) < batch, 1000 + np.arange(len(real)), 0)
    return dataclasses.replace(
        empty,
        token_ids=ids.astype(np.int32),
        query_starts=np.minimum(np.arange(rows + 1), batch).astype(np.int32),
        seq_lens=np.where(real, context, 0).astype(np.int32),
        num_requests=np.asarray(batch, np.int32),
        page_tables={"latent": table},
    )


def steps(engine: Engine, case: tuple[int, ...], n: int) -> tuple[float, np.ndarray]:
    """Seconds of so many steps behind each other, and the last one's log-probabilities."""
    packed, out, begin = pack(batch_of(engine, case)), None, time.perf_counter()
    for _ in range(n):
        out, engine._caches = engine._step.run(engine._caches, packed)
    assert out is not None
    jax.block_until_ready(out.tokens)
    return time.perf_counter() - begin, out.read()[1][: case[0]]


def timed(engine: Engine, case: tuple[int, ...]) -> tuple[float, np.ndarray]:
    """Microseconds of one more step, and log-probabilities."""
    steps(engine, case, 5)
    few = min(steps(engine, case, 5)[0] for _ in range(3))
    many = min(steps(engine, case, 5 + STEPS)[0] for _ in range(3))
    return round(1e6 * (many - few) / STEPS, 1), steps(engine, case, 1)[1]


def traced(engine: Engine, case: tuple[int, ...]) -> list[dict]:
    """Kernels of a few steps."""
    steps(engine, case, 5)
    with device_events() as (start, events):
        start()
        steps(engine, case, TRACED)
    return events


def account(events: list[dict]) -> tuple[list[str], float, dict[str, float]]:
    """Kernels of the last layer but one, the median time of a layer, and of each kernel in it."""
    firsts = [i for i, e in enumerate(events) if e["name"].startswith(FIRST)]
    gaps = [events[b]["ts"] - events[a]["ts"] for a, b in itertools.pairwise(firsts)]
    layer = float(np.median(gaps))
    inside = [i for i, gap in enumerate(gaps) if gap < 1.2 * layer]
    pick = inside[-2]
    chosen = events[firsts[pick] : firsts[pick + 1]]
    begin = chosen[0]["ts"]
    lines = [f"{e['ts'] - begin:7.1f} {e['dur']:6.1f}  {e['name'][:70]}" for e in chosen]
    each: dict[str, float] = {}
    for i in inside:
        for e in events[firsts[i] : firsts[i + 1]]:
            name = e["name"][:40]
            each[name] = each.get(name, 0.0) + e["dur"] / len(inside)
    return lines, round(layer, 1), {k: round(v, 1) for k, v in each.items()}


if __name__ == "__main__":
    main()
