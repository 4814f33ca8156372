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
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import clocks
from mla_jax.metadata.buckets import CommonBucket, MLALadder
from mla_jax.metadata.builder import MLACommonMetadataBuilder
from mla_jax.metadata.common import CommonAttentionHost, build_common
from mla_jax.metadata.indexer import DeepseekV32IndexerMetadataBuilder, get_max_prefill_buffer_size
from mla_jax.metadata.packed import Packed, pack
from mla_jax.metadata.sparse import build_c128a_topk_metadata
from mla_jax.metadata.sparse_buckets import IndexerLadder, SWALadder
from mla_jax.metadata.sparse_swa import DeepseekSparseSWAMetadataBuilder
from mla_jax.metadata.staging import staged
from mla_jax.types import cdiv

PAGE = 64
TOKENS_PER_REQUEST = 16
SMS = 132
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
    "lengths uniform up to the longest; page 64"
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step as the host knows it, and the page tables that the device holds."""

    requests: int
    max_len: int
    query_lens: np.ndarray
    seq_lens: np.ndarray
    bucket: CommonBucket  # of its own size
    padded: CommonBucket  # of the default ladder of dense latent attention
    tables: dict[CommonBucket, jax.Array]

    @classmethod
    def draw(cls, requests: int, max_len: int) -> "Batch":
        """Decodes first; ``TOKENS_PER_REQUEST`` tokens per request on average."""
        rng = np.random.default_rng(0)
        prefills = requests // 16
        query = np.ones(requests, np.int32)
        query[requests - prefills :] += 16 * (TOKENS_PER_REQUEST - 1)
        seq = np.maximum(rng.integers(1, max_len + 1, requests), query).astype(np.int32)
        host = CommonAttentionHost.of(query, seq)
        pages = cdiv(max_len, PAGE)
        exact = CommonBucket(requests=requests, tokens=host.num_actual_tokens, pages=pages)
        padded = mla(exact).decide(host).common_bucket
        key = jax.random.key(0)
        tables = {
            b: jax.random.randint(key, (b.requests, pages), 0, 1 << 20, jnp.int32)
            for b in (exact, padded)
        }
        return cls(
            requests=requests,
            max_len=max_len,
            query_lens=query,
            seq_lens=seq,
            bucket=exact,
            padded=padded,
            tables=tables,
        )

    def host(self) -> CommonAttentionHost:
        """A new one: what it remembers belongs to one step."""
        return CommonAttentionHost.of(self.query_lens, self.seq_lens)


@dataclass(frozen=True, kw_only=True)
class Program:
    """``decide()`` on the host, then ``build(*decision, table)`` on the device."""

    decide: Callable[[], tuple]
    build: Callable[..., object]
    table: jax.Array

    def packed(self) -> Packed:
        """What the host sends."""
        return pack(self.decide())

    def fresh(self, packed: Packed, table: jax.Array) -> list[jax.Array]:
        """What is built, each once, without what was given: inside a step that costs nothing."""
        decision = packed.unpack()
        found = {id(x): x for x in jax.tree.leaves(self.build(*decision, table))}
        given = {id(x) for x in jax.tree.leaves((decision, table))}
        return [x for key, x in found.items() if key not in given]

    def used(self, packed: Packed, table: jax.Array) -> jax.Array:
        """Everything is built and used inside the program."""
        return jnp.concatenate([x.astype(jnp.int32).ravel() for x in self.fresh(packed, table)])


def mla(bucket: CommonBucket) -> MLACommonMetadataBuilder:
    ladder = MLALadder.default(
        max_requests=bucket.requests,
        max_prefill_tokens=bucket.tokens,
        max_pages=bucket.pages,
        context_rows=64 * 1024,
    )
    return MLACommonMetadataBuilder(ladder=ladder, page=PAGE)


def indexer(batch: Batch, *, ratio: int = 1) -> DeepseekV32IndexerMetadataBuilder:
    rows = get_max_prefill_buffer_size(batch.max_len, ratio=ratio)
    ladder = IndexerLadder.default(
        max_requests=batch.requests,
        max_tokens=batch.bucket.tokens,
        max_keys=rows,
        max_chunks=batch.requests,
        next_n=1,
    )
    return DeepseekV32IndexerMetadataBuilder(
        ladder=ladder,
        next_n=1,
        use_flattening=False,
        page=PAGE,
        num_sms=SMS,
        max_prefill_buffer_size=rows,
        compress_ratio=ratio,
    )


def window(batch: Batch) -> DeepseekSparseSWAMetadataBuilder:
    tokens = batch.bucket.tokens
    ladder = SWALadder.default(max_requests=batch.requests, max_tokens=tokens, next_n=1)
    return DeepseekSparseSWAMetadataBuilder(
        ladder=ladder,
        next_n=1,
        window=128,
        page=PAGE,
        compress_ratios=(1, 4, 128),
        max_model_len=batch.max_len,
        max_batched_tokens=tokens,
        num_sms=SMS,
        heads=64,
    )


def programs(batch: Batch) -> dict[str, Program]:
    """What each model builds in a step; the parts that are derived later; the search's ways."""
    dense, sparse = mla(batch.bucket), indexer(batch)
    swa, compressed = window(batch), indexer(batch, ratio=4)

    def program(build, *builders, bucket=batch.bucket) -> Program:
        def decide():
            host = batch.host()
            decisions = tuple(b.decide(host) for b in builders)
            return *host.padded_arrays(bucket), decisions

        def run(starts, lens, num_reqs, decisions, table):
            common = build_common(starts, lens, table, num_reqs, bucket=bucket, page=PAGE)
            return build(common, *decisions)

        return Program(decide=decide, build=run, table=batch.tables[bucket])

    def model(*builders, bucket=batch.bucket) -> Program:
        def build(common, *decisions):
            parts = [b.build(common, d) for b, d in zip(builders, decisions, strict=True)]
            return common, parts

        return program(build, *builders, bucket=bucket)

    def one_chunk(builder) -> Program:
        return program(lambda c, d: builder.build(c, d).prefill.chunk(0), builder)

    def chunks(builder) -> Program:
        def build(common, decision):
            number = jnp.arange(decision.bucket.chunks, dtype=jnp.int32)
            return jax.vmap(builder.build(common, decision).prefill.chunk)(number)

        return program(build, builder)

    def c128a(common, decision):
        bucket = decision.bucket
        return build_c128a_topk_metadata(
            common.block_table_tensor,
            common.token_to_req(),
            common.positions,
            common.slot_mapping,
            jnp.asarray(decision.counts)[2],
            decode_tokens=bucket.decode_tokens,
            prefill_tokens=bucket.prefill_tokens,
            width=bucket.c128a_width,
            page=PAGE,
        )

    def search(method) -> Program:
        lanes = jnp.arange(batch.bucket.tokens, dtype=jnp.int32)
        find = partial(jnp.searchsorted, side="right", method=method)
        return program(lambda common: find(common.query_start_loc[1:], lanes))

    return {
        "v3": model(dense, bucket=batch.padded),
        "v32": model(dense, sparse, bucket=batch.padded),
        "v32_chunk": one_chunk(sparse),
        "v32_chunks": chunks(sparse),
        "v4": model(swa, compressed),
        "v4_chunk": one_chunk(compressed),
        "v4_chunks": chunks(compressed),
        "v4_c128a": program(c128a, swa),
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
    arguments = jax.device_put((program.packed(), program.table, np.int32(0)))
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
    table, packed = program.table, program.packed()
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
        "tokens": batch.bucket.tokens,
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
    arguments = jax.device_put((program.packed(), program.table))
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
