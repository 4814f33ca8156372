"""``python -m benchmarks.experts --out FILE``: routed experts, tuning by tuning.

Cases with so many rows that Mosaic takes them have tunings of both backends.

The heuristic's choice is checked before anything is timed, the fastest one before it is recorded:
against ``ref.py`` on up to 128 of the tokens, with NaN in the rows and weights of padding. All
compile side by side first, then each is timed alone; what has not compiled or was not reached
within ``--limit`` seconds is left out, and said so.
``--tune RESULTS`` writes the packaged tunings instead, from such a file.
``--beside FILE`` sets vLLM's times beside ours (``benchmarks.vllm_experts``); ``--first`` times the
heuristic's or packaged choice only.
"""

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.expert_cases import CASES, Model
from benchmarks.machine import clocks
from mla_jax import ops
from mla_jax.errors import ArgumentError
from mla_jax.pallas import problems
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul import mosaic, ref
from mla_jax.pallas.grouped_matmul.triton import Tuning, heuristic
from mla_jax.pallas.tuning import folder_name

DTYPE = jnp.bfloat16
BYTES_PER_S, FLOPS_PER_S = 4.8e12, 800e12
CALLS, RUNS = 50, 5
CHECKED = 128  # tokens, at most
ALLOWED = 0.01  # |got - ref| / |ref|, Frobenius; honest bfloat16 has 0.004
EXACT, NEAR = ("dtype", "experts", "topk", "hidden", "width"), ("tokens",)
TUNED = Path(__file__).parent.parent / "mla_jax" / "pallas" / "tuned"
METHOD = (
    f"a jitted loop of {CALLS} calls (fewer of 2 ms and more) whose rows depend on the call before "
    f"and whose experts move on by one, less an empty loop, median of {RUNS}; random-normal bf16, "
    "choices uniform without repetition; floor: the larger of the chosen experts' bytes / "
    "4.8 TB/s and FLOPs / 800 TFLOP/s"
)


type AnyTuning = Tuning | mosaic.Tuning


def taken(name: str) -> AnyTuning:
    """What a call without a tuning takes."""
    problem, device = problems.routed(*_specs(*CASES[name])), DeviceInfo.current()
    backend = ops.REGISTRY.choose(problem, device)
    assert backend.tune is not None, backend.name
    return backend.tune(problem, device).value


def backend_of(tuning: AnyTuning) -> str:
    return "mosaic" if isinstance(tuning, mosaic.Tuning) else "triton"


def candidates(name: str) -> list[AnyTuning]:
    """What a call takes first, then the others."""
    first = taken(name)
    if not isinstance(first, mosaic.Tuning):
        return [*triton_candidates(name)]
    changes = (
        dict(most=128, step=32, stages=4, cluster=1), dict(most=160, step=16, stages=3),
        dict(most=192, step=16, stages=3), dict(most=160, step=32, stages=3),
        dict(most=192, step=32, stages=3, cluster=1),
    )  # fmt: skip
    found = [first, *(replace(first, **change) for change in changes)]
    return list(dict.fromkeys([*found, *triton_candidates(name)[:1]]))


def triton_candidates(name: str) -> list[Tuning]:
    """The heuristic's choice first, then what differs from it in one kernel, or in the plan."""
    model, tokens = CASES[name]
    problem = problems.routed(*_specs(model, tokens))
    first = heuristic(problem, DeviceInfo.current())
    found = [first]
    for change in _changes(first, tokens * model.topk):
        try:
            found.append(replace(first, **change))
        except ArgumentError:
            continue  # no tuning at all, such as a tail longer than the tile
    fits = [t for t in found if not model.width % t.gate_columns and not model.width % t.down_depth]
    return list(dict.fromkeys(fits))


def _changes(first: Tuning, pairs: int) -> list[dict[str, Any]]:
    def gate(columns, depth, warps, stages):
        return dict(gate_columns=columns, gate_depth=depth, gate_warps=warps, gate_stages=stages)

    def down(columns, depth, warps, stages):
        return dict(down_columns=columns, down_depth=depth, down_warps=warps, down_stages=stages)

    if first.rows == 16:
        plan = {"planned": not first.planned} if pairs <= 256 else {"group": 1}
        return [
            gate(64, 64, 4, 5) | down(64, 64, 4, 6),
            gate(32, 128, 4, 4) | down(32, 128, 4, 5),
            gate(64, 128, 4, 3) | down(128, 64, 4, 5),
            plan,
            gate(128, 64, 4, 4) | down(128, 128, 4, 3),
            gate(64, 128, 8, 4) | down(64, 128, 8, 4),
            dict(rows=32, tail=32) | gate(64, 64, 4, 5),
        ]
    if first.rows < 128:
        return [
            gate(64, 64, 4, 3) | down(128, 64, 4, 3),
            dict(rows=16, tail=16),
            dict(rows=64, tail=64),
            gate(128, 64, 4, 3) | down(64, 64, 4, 5),
            gate(64, 128, 4, 3) | down(64, 128, 4, 4),
            gate(128, 64, 8, 3) | down(256, 64, 8, 3),
            dict(rows=128, tail=64) | gate(128, 64, 8, 3) | down(256, 64, 8, 3),
        ]
    return [
        gate(128, 64, 8, 3) | down(256, 64, 8, 4),
        dict(tail=128),
        dict(group=16),
        gate(64, 64, 4, 4) | down(128, 64, 4, 4),
        gate(64, 64, 8, 4) | down(128, 64, 8, 4),
        dict(rows=64, tail=64) | gate(128, 64, 4, 4) | down(256, 64, 4, 3),
        gate(128, 32, 8, 5) | down(256, 32, 8, 5),
    ]


def _specs(model: Model, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    m, s = model, jax.ShapeDtypeStruct
    into, back = (m.experts, m.hidden, m.width), (m.experts, m.width, m.hidden)
    choice = (tokens, m.topk)
    return (
        s((tokens, m.hidden), DTYPE), s(into, DTYPE), s(into, DTYPE), s(back, DTYPE),
        s(choice, jnp.float32), s(choice, jnp.int32),
    )  # fmt: skip


@cache
def draw_weights(model: Model) -> tuple[jax.Array, ...]:
    """Gate, up and down, expert by expert: no temporary as large as they are."""

    @partial(jax.jit, static_argnums=1)
    def one(key, shape):
        def expert(key):
            return jax.random.normal(key, shape[1:], DTYPE) * shape[1] ** -0.5

        return lax.map(lambda k: expert(k).astype(DTYPE), jax.random.split(key, shape[0]))

    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    return tuple(one(k, s.shape) for k, s in zip(keys, _specs(model, 1)[1:4], strict=True))


def draw_rows(model: Model, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(x, weights, experts)``."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, model.hidden)), DTYPE)
    weights = jnp.asarray(rng.dirichlet(np.ones(model.topk), size=tokens), jnp.float32)
    order = rng.random((tokens, model.experts)).argsort(axis=1)[:, : model.topk]
    return x, weights, jnp.asarray(order, jnp.int32)


def poisoned(x: jax.Array, weights: jax.Array, experts: jax.Array, count: int):
    """The same with padding: some tokens (of few: one choice), NaN wherever nothing may look."""
    tokens, topk = experts.shape
    nobody = np.zeros((tokens, topk), bool)
    if tokens < 8:
        nobody[-1, -1] = True
    else:
        nobody[-3:] = True
    rows = nobody.all(axis=1)
    bad = jnp.where(jnp.arange(tokens)[:, None] % 2 == 0, -1, count)
    return (
        jnp.where(rows[:, None], jnp.nan, x).astype(x.dtype),
        jnp.where(nobody, jnp.nan, weights),
        jnp.where(nobody, bad, experts),
    )


def floor_us(model: Model, experts: np.ndarray) -> float:
    one = 3 * model.hidden * model.width
    read = 2 * one * len(np.unique(experts)) / BYTES_PER_S
    return 1e6 * max(read, 2 * one * experts.size / FLOPS_PER_S)


def compile_once(name: str, tuning: AnyTuning) -> Any:
    """One call."""
    call = partial(ops.routed_experts, backend=backend_of(tuning), tuning=tuning)
    return jax.jit(call).lower(*_specs(*CASES[name])).compile()


def compile_loop(name: str, tuning: AnyTuning) -> Any:
    """A loop of calls."""
    call = partial(ops.routed_experts, backend=backend_of(tuning), tuning=tuning)
    x, gate, up, down, share, experts = _specs(*CASES[name])
    lowered = jax.jit(partial(chain, call, count_of(name))).lower(
        x, (gate, up, down), share, experts
    )
    return lowered.compile()


def chain(call, n: int, x, weights, share, experts):
    """``n`` calls, each on rows that the one before changed, and on the next experts."""
    count = weights[0].shape[0]

    def body(i, rows):
        y = call(rows, *weights, share, (experts + i) % count)
        return (x + 0.1 * y.astype(jnp.float32)).astype(x.dtype)

    return lax.fori_loop(0, n, body, x)


def empty(x, *_):
    return x


def count_of(name: str) -> int:
    model, tokens = CASES[name]
    return CALLS if model.experts * tokens < 1 << 18 else 10


def seconds(run, *args) -> float:
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@jax.jit
def reference(x, gate, up, down, weights, experts):
    """``ref.py`` on the first tokens and the last, padded to ``CHECKED`` with nobody's rows."""

    def pad(a, value):
        ends = jnp.concatenate([a[: CHECKED // 2], a[CHECKED // 2 :][-CHECKED // 2 :]])
        return jnp.pad(ends, ((0, CHECKED - len(ends)), (0, 0)), constant_values=value)

    rows = pad(x.astype(jnp.float32), 0)
    return ref.routed_experts(rows, gate, up, down, pad(weights, 0), pad(experts, -1))


def check(name: str, once) -> float:
    """Relative error; raises where padding is not zero, or the error is too large."""
    model, tokens = CASES[name]
    weights = draw_weights(model)
    x, share, experts = poisoned(*draw_rows(model, tokens), model.experts)
    got = once(x, *weights, share, experts)
    want = np.asarray(reference(x, *weights, share, experts), np.float64)
    got = np.asarray(got.astype(jnp.float32), np.float64)
    ends = np.concatenate([got[: CHECKED // 2], got[CHECKED // 2 :][-CHECKED // 2 :]])
    nobody = ~((np.asarray(experts) >= 0) & (np.asarray(experts) < model.experts)).any(axis=1)
    assert not got[nobody].any(), f"{name}: padding is not zero"
    error = float(np.linalg.norm(ends - want[: len(ends)]) / np.linalg.norm(want))
    assert error < ALLOWED, f"{name}: error {error:.4f}"
    return error


def measure(name: str, loop: Any) -> dict[str, float]:
    model, tokens = CASES[name]
    weights = draw_weights(model)
    x, share, experts = draw_rows(model, tokens)
    n = count_of(name)
    nothing = jax.jit(partial(chain, empty, n))
    args = (x, weights, share, experts)
    us = 1e6 * (seconds(loop, *args) - seconds(nothing, *args)) / n
    floor = floor_us(model, np.asarray(experts))
    return {"us": us, "floor_us": floor, "times_floor": us / floor}


class Bench:
    """Cases, their candidates, and the seconds that are left."""

    def __init__(
        self, tried: dict[str, list[AnyTuning]], limit: float, jobs: int, compile_share: float
    ):
        self.start, self.limit, self.compile_share = time.perf_counter(), limit, compile_share
        self.pool = ThreadPoolExecutor(jobs)
        self.tried = tried
        self.found: dict[str, list[dict]] = {name: [] for name in tried}
        self.notes: list[str] = []

    def run(self) -> list[dict]:
        """Compile all, time each; the rows of the cases."""
        first = {name: tried[0] for name, tried in self.tried.items()}
        once = {name: self.pool.submit(compile_once, name, t) for name, t in first.items()}
        most = max(map(len, self.tried.values()))
        turns = [(n, t[i]) for i in range(most) for n, t in self.tried.items() if i < len(t)]
        loops = {turn: self.pool.submit(compile_loop, *turn) for turn in turns}
        for model in dict.fromkeys(CASES[name][0] for name in first):
            jax.block_until_ready(draw_weights(model))
        ready = {turn: loop for turn in turns if (loop := self.wait(*turn, loops[turn]))}
        self.pool.shutdown(wait=True, cancel_futures=True)
        print(f"compiled {len(ready)} of {len(turns)} in {self.seconds():.0f} s", flush=True)
        errors = {name: check(name, future.result()) for name, future in once.items()}
        for turn, loop in ready.items():
            self.time(*turn, loop)
        rows = [self.row(name, errors[name]) for name, rows in self.found.items() if rows]
        print(*self.notes, f"{self.seconds():.0f} s in all", sep="\n", flush=True)
        return rows

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def text(self, name: str, tuning: AnyTuning) -> str:
        """What differs from the first."""
        first = self.tried[name][0]
        if backend_of(tuning) != backend_of(first):
            return str(tuning)
        new, old = dataclasses.asdict(tuning), dataclasses.asdict(first)
        return ", ".join(f"{k}={v}" for k, v in new.items() if v != old[k]) or "first"

    def note(self, name: str, tuning: AnyTuning, what: object) -> None:
        self.notes.append(f"{name}: {self.text(name, tuning)}: {str(what)[:300]}")

    def wait(self, name: str, tuning: AnyTuning, future: Future) -> Any:
        """The program, or None and a note."""
        try:
            return future.result(max(0.0, self.compile_share * self.limit - self.seconds()))
        except TimeoutError:
            future.cancel()
            self.note(name, tuning, "not compiled in time")
        except Exception as error:  # of one candidate: the others are measured
            self.note(name, tuning, error)

    def time(self, name: str, tuning: AnyTuning, loop: Any) -> None:
        if self.seconds() > 0.9 * self.limit:
            self.note(name, tuning, "not reached")
            return
        try:
            row = {"tuning": tuning, **measure(name, loop)}
        except Exception as error:  # such as too much shared memory
            self.note(name, tuning, error)
            return
        self.found[name].append(row)
        what = f"{name}: {self.text(name, tuning)}"
        print(f"{what}: {row['us']:.1f} us, {row['times_floor']:.2f} of the floor", flush=True)

    def row(self, name: str, error: float) -> dict:
        """The fastest candidate that is right, with the times of the others."""
        best, *others = sorted(self.found[name], key=lambda row: row["us"])
        if best["tuning"] != self.tried[name][0]:
            error = check(name, compile_once(name, best["tuning"]))
        return {
            "case": name,
            **{k: round(best[k], 2) for k in ("us", "floor_us", "times_floor")},
            "error": round(error, 4),
            "backend": backend_of(best["tuning"]),
            "tuning": dataclasses.asdict(best["tuning"]),
            "which": self.text(name, best["tuning"]),
            "others": {self.text(name, x["tuning"]): round(x["us"], 1) for x in others},
        }


def beside(path: Path, row: dict) -> dict:
    """The ratio to the faster of vLLM's configurations."""
    found = json.loads(path.read_text())["cases"].get(row["case"], {})
    times = {k: v for k, v in found.items() if not k.endswith("error")}
    if not times:
        return {}
    best = min(times, key=times.__getitem__)
    return {"peer_us": times[best], "peer": f"vLLM, {best}", "ratio": times[best] / row["us"]}


def write_tuned(path: Path) -> None:
    """``pallas/tuned/<device>/routed_experts.json`` from a file of results: Triton's tunings."""
    record = json.loads(path.read_text())
    to = TUNED / folder_name(record["device"]) / "routed_experts.json"
    records = []
    for row in record["rows"]:
        model, tokens = CASES[row["case"]]
        features = {"dtype": jnp.dtype(DTYPE).name, **dataclasses.asdict(model), "tokens": tokens}
        if row["others"] and row.get("backend", "triton") == "triton":
            kept = {k: row[k] for k in ("tuning", "us", "others")}
            records.append({"features": features, **kept})
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    measured = f"{record['device']}, {versions}, {record['date']}: calls in a loop, random-normal"
    table = {"measured": measured, "exact": EXACT, "near": NEAR, "records": records}
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(table, indent=1) + "\n")
    print(to)


def merged(before: dict, rows: list[dict]) -> list[dict]:
    """New rows, and those of the cases that have none, with the date of their run."""
    new = {row["case"]: row for row in rows}
    old = {row["case"]: {"date": before["date"]} | row for row in before["rows"]}
    return [(old | new)[name] for name in CASES if name in old or name in new]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.experts", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=110.0, help="seconds")
    parser.add_argument("--compile-share", type=float, default=0.6, help="of the limit, at most")
    parser.add_argument("--jobs", type=int, default=12, help="threads that compile")
    parser.add_argument("--tune", type=Path, help="results to write the packaged tunings from")
    parser.add_argument("--beside", type=Path, help="what benchmarks.vllm_experts has written")
    parser.add_argument("--first", action="store_true", help="only the choice that a user gets")
    parser.add_argument("--merge", type=Path, help="results that keep the cases not run now")
    given = parser.parse_args()
    if given.tune:
        write_tuned(given.tune)
        return
    tried = {n: [taken(n)] if given.first else candidates(n) for n in given.cases}
    rows = Bench(tried, given.limit, given.jobs, given.compile_share).run()
    if given.beside:
        rows = [row | beside(given.beside, row) for row in rows]
    record = {
        "device": jax.devices()[0].device_kind,
        "versions": {k: metadata.version(k) for k in ("jax", "triton")},
        "date": str(datetime.date.today()),
        "clocks": clocks(),
        "method": METHOD,
        "rows": rows,
    }
    print(f"{'case':>14} {'us':>9} {'floor':>9} {'floors':>6} {'error':>7}  tuning")
    for row in rows:
        print(
            f"{row['case']:>14} {row['us']:9.1f} {row['floor_us']:9.1f} {row['times_floor']:6.2f} "
            f"{row['error']:7.4f}  {row['which']}"
        )
    logs = [math.log(row["times_floor"]) for row in rows] or [math.nan]
    mean = math.exp(statistics.mean(logs))
    print(f"geometric mean, times the floor: {mean:.2f}")
    if given.merge:
        record["rows"] = merged(json.loads(given.merge.read_text()), rows)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
