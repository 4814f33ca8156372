"""``python -m benchmarks.metadata --out FILE``: what the metadata of one step costs.

Per model one jitted program builds everything that a step of it needs. What consumers derive has
rows of its own: one prefill chunk of the indexer, all of them in one batch, the lists of C128A
layers; and so have the two ways to find a token's request. Growth: requests x1, x4, x16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import clocks
from mla_jax.metadata.buckets import CommonBucket, MLALadder, default_steps
from mla_jax.metadata.builder import AttentionMetadataBuilder, MLAMetadataBuilder
from mla_jax.metadata.common import GroupSpec, HostBatch, build_common
from mla_jax.metadata.deepseek_v4 import V4MetadataBuilder
from mla_jax.metadata.deepseek_v32 import V32MetadataBuilder
from mla_jax.metadata.indexer import Indexer
from mla_jax.metadata.packed import Packed, pack
from mla_jax.metadata.sparse import build_c128a_topk_metadata
from mla_jax.metadata.staging import staged
from mla_jax.metadata.window import Windows

PAGE = 64
TOKENS_PER_REQUEST = 16
TARGETS = {"v3": 100, "v32": 150, "v4": 200}  # device microseconds at 512 requests
HOST_TARGET = 150
ROW = 16
METHOD = (
    "returned is whatever is built, once, and not merely passed on. kernels_us: sum of the "
    "kernels' times of one call (CUPTI, median of calls), kernels: how many; chain_us: slope of "
    "wall time over the turns of a loop around the same build in one program, gaps between "
    "kernels count. host_us: Python time of a step, from the lengths to the return of the call: "
    "decide_us (split, rungs, chunk plans, padding, packing into one buffer) and call_us, of a "
    "staged program (its words in page-locked memory) that builds everything and, like a model, "
    "uses it there (here: one kernel reads it all); device idle at the start of each. least_us: "
    "the least of all calls instead of the median. warm_us: decide alone, again and again. "
    "jit_us: the same call through jax.jit, which transfers the buffer. empty_us: the call of a "
    "jitted program that only sums the buffer. row_us: host_us of one of 16 steps in a row, none "
    "waited for: a host that is ahead of its GPU (median of rows). Words and results of a step "
    "are released outside of all times. _async: host times of a process of its own with "
    "PJRT_GPU_ENABLE_ASYNC_DISPATCH=1. 15 of 16 requests decode, each 16th prefills 241 tokens; "
    "lengths uniform up to the longest; page 64; the bucket of the default ladder"
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step as the host knows it."""

    requests: int
    max_len: int
    query_lens: np.ndarray
    seq_lens: np.ndarray

    @classmethod
    def draw(cls, requests: int, max_len: int) -> "Batch":
        """Decodes first; ``TOKENS_PER_REQUEST`` tokens per request on average."""
        rng = np.random.default_rng(0)
        prefills = requests // 16
        query = np.ones(requests, np.int32)
        query[requests - prefills :] += 16 * (TOKENS_PER_REQUEST - 1)
        seq = np.maximum(rng.integers(1, max_len + 1, requests), query).astype(np.int32)
        return cls(requests=requests, max_len=max_len, query_lens=query, seq_lens=seq)

    @property
    def tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def sizes(self) -> dict[str, int]:
        """What the default ladders are made for: this batch, with one size for all steps."""
        pages = GroupSpec("", PAGE).pages_of(self.max_len)
        return {
            "max_requests": self.requests,
            "max_prefill_tokens": self.tokens,
            "max_pages": pages,
        }

    def host(self) -> HostBatch:
        """A new one: what it remembers belongs to one step."""
        return HostBatch.of(self.query_lens, self.seq_lens)


@dataclass(frozen=True, kw_only=True)
class Program:
    """``decide()`` on the host, then ``build(*decision, tables)`` on the device."""

    decide: Callable[[], tuple]
    build: Callable[..., object]
    tables: dict[str, jax.Array]

    def packed(self) -> Packed:
        """What the host sends."""
        return pack(self.decide())

    def fresh(self, packed: Packed, tables: dict[str, jax.Array]) -> list[jax.Array]:
        """What is built, each once, without what was given: inside a step that costs nothing."""
        decision = packed.unpack()
        found = {id(x): x for x in jax.tree.leaves(self.build(*decision, tables))}
        given = {id(x) for x in jax.tree.leaves((decision, tables))}
        return [x for key, x in found.items() if key not in given]

    def used(self, packed: Packed, tables: dict[str, jax.Array]) -> jax.Array:
        """Everything is built and used inside the program."""
        return jnp.concatenate([x.astype(jnp.int32).ravel() for x in self.fresh(packed, tables)])


def mla(batch: Batch) -> MLAMetadataBuilder:
    ladder = MLALadder.default(**batch.sizes, context_rows=64 * 1024)
    return MLAMetadataBuilder(ladder=ladder, group=GroupSpec("latent", PAGE))


def v32(batch: Batch) -> V32MetadataBuilder:
    return V32MetadataBuilder(
        ladder=default_steps(**batch.sizes),
        latent=GroupSpec("latent", PAGE),
        indexer=Indexer(group=GroupSpec("index_keys", PAGE)),
    )


def v4(batch: Batch) -> V4MetadataBuilder:
    return V4MetadataBuilder(
        ladder=default_steps(**batch.sizes),
        windows=Windows(
            group=GroupSpec("window", PAGE),
            window=128,
            compress_ratios=(1, 4, 128),
            max_model_len=batch.max_len,
            max_batched_tokens=batch.tokens,
        ),
        compressed=(GroupSpec("c4", PAGE, ratio=4), GroupSpec("c128", PAGE, ratio=128)),
        indexer=Indexer(group=GroupSpec("index_keys", PAGE, ratio=4)),
    )


def draw_tables(builder: AttentionMetadataBuilder, bucket: CommonBucket) -> dict[str, jax.Array]:
    """Page tables of every group, on the device."""
    key = jax.random.key(0)
    return {
        g.name: jax.random.randint(key, (bucket.requests, width), 0, 1 << 20, jnp.int32)
        for g, width in zip(builder.groups, bucket.pages, strict=True)
    }


def programs(batch: Batch) -> dict[str, Program]:
    """What each model builds in a step; the parts that are derived later; the search's ways."""
    dense, sparse, compressed = mla(batch), v32(batch), v4(batch)

    def program(builder: AttentionMetadataBuilder, build=None) -> Program:
        bucket = builder.decide(batch.host()).common_bucket

        def decide():
            host = batch.host()
            decision = builder.decide(host)
            return *host.padded_arrays(decision.common_bucket), decision

        def run(starts, lens, requests, decision, tables):
            common = build_common(
                starts, lens, tables, requests, bucket=bucket, groups=builder.groups
            )
            found = builder.build(common, decision)
            return (common, found) if build is None else build(common, found)

        return Program(decide=decide, build=run, tables=draw_tables(builder, bucket))

    def chunk(_, meta):
        return meta.indexer.prefill.chunk(0)

    def chunks(_, meta):
        number = jnp.arange(meta.indexer.bucket.chunks, dtype=jnp.int32)
        return jax.vmap(meta.indexer.prefill.chunk)(number)

    def c128a(common, meta):
        bucket = meta.windows.bucket
        return build_c128a_topk_metadata(
            common.page_tables["c128"],
            common.requests,
            common.positions,
            common.slots["window"],
            meta.windows.num_decode_tokens,
            decode_tokens=bucket.decode_tokens,
            prefill_tokens=bucket.prefill_tokens,
            width=bucket.c128a_width,
            page=PAGE,
        )

    def search(method) -> Program:
        def find(common, _):
            lanes = jnp.arange(common.bucket.tokens, dtype=jnp.int32)
            return jnp.searchsorted(common.query_starts[1:], lanes, side="right", method=method)

        return program(dense, find)

    return {
        "v3": program(dense),
        "v32": program(sparse),
        "v32_chunk": program(sparse, chunk),
        "v32_chunks": program(sparse, chunks),
        "v4": program(compressed),
        "v4_chunk": program(compressed, chunk),
        "v4_chunks": program(compressed, chunks),
        "v4_c128a": program(compressed, c128a),
        "find_all": search("compare_all"),
        "find_steps": search("scan_unrolled"),
    }


def chain(program: Program, turns: int):
    """One program that builds ``turns`` times; what it returns keeps every array alive."""

    def run(packed, table, zero):
        def turn(i):
            return program.fresh(replace(packed, words=packed.words + zero * i), table)

        return jax.lax.fori_loop(1, turns, lambda i, _: turn(i), turn(jnp.int32(0)))

    return jax.jit(run)


def times(run: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds until ``run`` returns, in order of size; the device is idle when it begins."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = run()
        found.append(1e6 * (time.perf_counter() - start))
        jax.block_until_ready(result)
        del result  # as after a model's step, not within the next one's time
    return sorted(found)


def split_times(first: Callable, second: Callable, rounds: int) -> tuple[list, list]:
    """Microseconds of ``first()`` and of ``second`` of its result, round by round."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        made = first()
        middle = time.perf_counter()
        result = second(made)
        found.append((1e6 * (middle - start), 1e6 * (time.perf_counter() - middle)))
        jax.block_until_ready(result)
        del made, result
    return tuple(map(list, zip(*found, strict=True)))


def row_us(first: Callable, second: Callable, rounds: int) -> float:
    """Microseconds of a step of ``first`` and ``second`` among ``ROW`` that nobody waits for."""
    found = []
    for _ in range(rounds):
        kept = []
        start = time.perf_counter()
        for _ in range(ROW):
            made = first()
            kept.append((made, second(made)))
        found.append(1e6 * (time.perf_counter() - start) / ROW)
        jax.block_until_ready([result for _, result in kept])
        del made, kept
    return statistics.median(found)


def chain_us(program: Program, *, rounds: int) -> float:
    """Slope of wall time over the turns of the loop."""
    few, many = 8, 72
    arguments = jax.device_put((program.packed(), program.tables, np.int32(0)))
    wall = []
    for turns in (few, many):
        run = chain(program, turns)
        jax.block_until_ready(run(*arguments))
        one = times(lambda r=run: jax.block_until_ready(r(*arguments)), rounds)
        wall.append(statistics.median(one))
    return (wall[1] - wall[0]) / (many - few)


def kernel_times(run, arguments, *, rounds: int) -> list[tuple[str, float]]:
    """Name and median microseconds of each kernel of a call, in order."""
    from jax.experimental.mosaic.gpu.profiler import Cupti

    measure = Cupti(finalize=False).measure(run, aggregate=False, iterations=rounds)
    _, calls = measure(*arguments)
    assert calls, "no kernel was recorded"
    return [
        (each[0][0], 1e3 * statistics.median(t for _, t in each))
        for each in zip(*calls, strict=True)
    ]


def host_times(name: str, batch: Batch, program: Program, *, rounds: int) -> dict:
    """What the host pays for one row of the table."""
    table, packed = program.tables, program.packed()
    used, sent = jax.jit(program.used), staged(program.used)
    empty = jax.jit(lambda packed: jnp.sum(packed.words))
    jax.block_until_ready([used(packed, table), sent(packed, table), empty(packed)])
    calls = 20 * rounds
    decide, call = split_times(program.packed, lambda p: sent(p, table), calls)
    host = sorted(a + b for a, b in zip(decide, call, strict=True))
    row = row_us(program.packed, lambda p: sent(p, table), 2 * rounds)
    middle = statistics.median
    return {
        "case": name,
        "requests": batch.requests,
        "tokens": batch.tokens,
        "max_len": batch.max_len,
        "host_us": round(middle(host), 1),
        "least_us": round(host[0], 1),
        "row_us": round(row, 1),
        "decide_us": round(middle(decide), 1),
        "call_us": round(middle(call), 1),
        "warm_us": round(middle(times(program.packed, calls)), 1),
        "jit_us": round(middle(times(lambda: used(packed, table), calls)), 1),
        "empty_us": round(middle(times(lambda: empty(packed), calls)), 1),
    }


def device_times(name: str, batch: Batch, program: Program, *, rounds: int, chained: bool) -> dict:
    """The rest of the row."""
    arguments = jax.device_put((program.packed(), program.tables))
    alone = jax.jit(program.fresh)
    jax.block_until_ready(alone(*arguments))
    kernels = []
    if jax.default_backend() == "gpu":
        kernels = kernel_times(alone, arguments, rounds=rounds)
    return {
        "kernels_us": round(sum(t for _, t in kernels), 2) if kernels else None,
        "kernels": len(kernels) or None,
        "slowest": sorted(kernels, key=lambda k: -k[1])[:6],
        "chain_us": round(chain_us(program, rounds=rounds), 2) if chained else None,
        "target_us": TARGETS.get(name) if batch.requests == 512 else None,
    }


def async_rows(requests: int, given: argparse.Namespace) -> list[dict]:
    """Host times of the models in a process whose launches have a thread of their own.

    XLA reads the variable when it starts; two processes on one GPU need this one to start first.
    """
    names = [name for name in TARGETS if name in (given.cases or TARGETS)]
    if not names:
        return []
    options = {"requests": requests, "max-len": given.max_len, "rounds": given.rounds}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.metadata", "--host", "--out", str(out)]
        for name, value in options.items():
            command += f"--{name}", str(value)
        variable = {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}
        subprocess.run(
            [*command, "--cases", *names],
            env=os.environ | variable,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = json.loads(out.read_text())["rows"]
    return [row | {"case": f"{row['case']}_async"} for row in rows]


COLUMNS = (
    "case",
    "requests",
    "tokens",
    "kernels_us",
    "kernels",
    "chain_us",
    "target_us",
    "host_us",
    "least_us",
    "row_us",
    "decide_us",
    "call_us",
    "warm_us",
    "jit_us",
    "empty_us",
)


def line(row: dict) -> str:
    """A row as text."""
    found = (row.get(c) for c in COLUMNS)
    return " ".join(f"{'-' if x is None else x!s:>11}" for x in found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.metadata", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--requests", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--max-len", type=int, default=131_072, help="longest request, tokens")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="*", help="names of the first column; default all")
    parser.add_argument("--host", action="store_true", help="host times only")
    parser.add_argument(
        "--async", action="store_true", help="the models' host times with asynchronous dispatch too"
    )
    given = parser.parse_args()

    apart = async_rows(given.requests[0], given) if vars(given)["async"] else []
    chosen = [
        (name, batch, program)
        for batch in (Batch.draw(n, given.max_len) for n in given.requests)
        for name, program in programs(batch).items()
        if name in (given.cases or [name])
        # a batch of that many chunks is nobody's plan, and slow to compile
        and not (name.endswith("chunks") and batch.requests != given.requests[0])
    ]
    # The profiler, once attached, slows every launch: all host times come first.
    rows = [host_times(*each, rounds=given.rounds) for each in chosen]
    print(" ".join(f"{c:>11}" for c in COLUMNS))
    for row, (name, batch, program) in zip(rows, chosen, strict=True):
        if not given.host:
            chained = name in TARGETS and batch.requests == given.requests[0]
            row |= device_times(name, batch, program, rounds=given.rounds, chained=chained)
        print(line(row), flush=True)
    for row in apart:
        print(line(row))
    record = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        "clocks": clocks(),
        "method": METHOD,
        "host_target_us": HOST_TARGET,
        "rows": rows + apart,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
