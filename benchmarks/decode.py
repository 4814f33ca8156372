"""Dense decode: our kernel against FlashMLA and FA3 on the rows that everybody quotes."""

import dataclasses
import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.cache import FORMATS
from mla_jax.pallas.dense_decode import mosaic
from mla_jax.pallas.device import DeviceInfo

__all__ = [
    "CASES", "Case", "attend", "error_of", "find", "inputs", "plan_of", "random_arrays",
    "reference", "run", "tuning_of",
]  # fmt: skip

PAGE, RANK, ROPE = 64, 512, 64
ROW = RANK + ROPE
SCALE = 192**-0.5
FLOPS, BYTES = 800e12, 4.25e12  # ceilings of the floor: bf16 product, copy
CHAIN = 20  # calls of one program when back to back
HONEST = 0.93  # of the floor: a slope below was disturbed and is measured again
LAUNCHES = 200
CLOCKS = "us", "span_us", "slope_us", "step_us"
METHOD = (
    "us: summed kernel time of an isolated call (kineto), span_us: start of its first kernel to "
    "end of its last, slope_us: slope of wall time over 10 ms of calls behind 0.5 s of the "
    "same (ours 20 in one jit, the peer as graph replays), in all three the plan is given to "
    "both sides; step_us: such a slope with the plan made by every call of both sides; medians, "
    "all sides in turn, in one process, on the same arrays; peers: FlashMLA, and FA3's MLA decode "
    "with the faster of two bounds of splits; peer_us and so on: the faster peer by each clock; "
    "peer: the faster by span; a slope below 93 % of the floor is measured again, and suspect "
    "if it stays there; random-normal data, shuffled pages; tflops, gbs and floor_percent are of "
    "span_us; copy: torch's device-to-device copy that moves as many bytes, isolated likewise; "
    "launch_added_us: host time of a call from a warm jit less that of an empty one on the same "
    "arrays"
)


@dataclass(frozen=True)
class Case:
    """``batch`` requests of ``queries`` tokens; ``keys`` is a length, or 0 for ragged ones."""

    batch: int
    queries: int
    heads: int
    keys: int
    tuning: tuple[tuple[str, int], ...] = ()  # what differs from the library's own choice
    format: str = "bf16"  # of the cache; no peer reads another
    dtype: str = "bfloat16"  # of the queries

    @property
    def name(self) -> str:
        keys = self.keys or "ragged"
        changed = "".join(f"/{k}={int(v)}" for k, v in self.tuning)
        changed = changed.replace("/batch_invariant=1", "_invariant")
        kind = "" if self.format == "bf16" else f"_{self.format}_{self.dtype}"
        return f"b{self.batch}_q{self.queries}_h{self.heads}_k{keys}{kind}{changed}"

    @property
    def cache_scale(self) -> float:
        return 0.5 if FORMATS[self.format].quantised else 1.0

    @property
    def lens(self) -> list[int]:
        if self.keys:
            return [self.keys] * self.batch
        draw = random.Random(1)
        return [draw.randint(1, 16384) for _ in range(self.batch)]

    @property
    def flops(self) -> float:
        """Two products of every query row with every key; causal masks not subtracted."""
        return 2.0 * self.queries * self.heads * sum(self.lens) * (ROW + RANK)

    @property
    def bytes(self) -> float:
        """Each cached row once, queries and results once."""
        rows = self.batch * self.queries * self.heads
        stored = FORMATS[self.format].row_bytes(RANK, ROPE)
        return 1.0 * sum(self.lens) * stored + 2.0 * rows * (ROW + RANK)

    @property
    def floor_us(self) -> float:
        return max(self.flops / FLOPS, self.bytes / BYTES) * 1e6


CASES = (
    Case(128, 1, 128, 4096),
    Case(128, 2, 128, 4096),
    Case(128, 1, 128, 8192),
    Case(128, 2, 128, 8192),
    Case(32, 1, 128, 8192),
    Case(8, 1, 128, 32768),
    Case(1, 1, 128, 65536),
    Case(1, 2, 128, 65536),
    Case(128, 1, 64, 8192),
    Case(32, 1, 64, 8192),
    Case(128, 1, 16, 4096),
    Case(128, 1, 16, 8192),
    Case(128, 2, 16, 8192),
    Case(32, 1, 16, 8192),
    Case(8, 1, 16, 32768),
    Case(1, 1, 16, 65536),
    Case(128, 1, 128, 0),
    Case(128, 1, 16, 0),
)

EXTRA = (
    Case(128, 1, 20, 8192),
    Case(128, 1, 128, 8192, (("batch_invariant", True),)),
    Case(128, 1, 16, 8192, (("batch_invariant", True),)),
    Case(128, 1, 128, 0, (("batch_invariant", True),)),
    Case(128, 1, 16, 0, (("batch_invariant", True),)),
    *(
        Case(batch, 1, heads, keys, format="fp8_e4m3")
        for batch, keys, among in (
            (128, 8192, (16, 64, 128)),
            (32, 8192, (16,)),
            (1, 65536, (16, 128)),
        )
        for heads in among
    ),
)


def find(name: str) -> Case:
    """The case of a name, its tuning changed by what follows: ``case/field=value/...``."""
    name, *changes = name.split("/")
    case = next(c for c in (*CASES, *EXTRA) if c.name == name)
    pairs = (change.split("=") for change in changes)
    return dataclasses.replace(case, tuning=(*case.tuning, *((k, int(v)) for k, v in pairs)))


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, row by row; the device is used inside ``turn`` alone."""
    make_peers = {}
    if peers is not None:
        from benchmarks import fa3, flashmla

        make_peers = {"FlashMLA": flashmla.load(peers), "FA3": fa3.load_decode(peers)}
    for case, programs in [(c, _compile(c)) for c in map(find, chosen)]:
        with turn:
            row = _row(case, programs, make_peers)
            _release()
        print(line(row), flush=True)
        yield row


def _release() -> None:
    """Give back what the peers hold: other processes measure beside this one."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def line(row: dict) -> str:
    """One row of the table."""
    times = (row[f"{who}_{what}"] for who in ("ours", "peer") for what in CLOCKS)
    ratios = (row[k] for k in ("ratio", "ratio_span", "ratio_slope", "ratio_step"))
    return (
        f"{row['case']:26s} {' '.join(f'{x:6.1f}' for x in times)} | "
        f"{' '.join(f'{x:.2f}' for x in ratios)} | {row['tflops']:.0f} TFLOP/s "
        f"{row['gbs']:.0f} GB/s {row['floor_percent']:.0f}% err {row['error']:.1e} "
        f"plan {row['plan_us']:.1f} suspect {row['suspect']} launch {row['launch_added_us']} "
        f"{[[*found.values()] for found in row['kernels'].values()]}"
    )


def tuning_of(case: Case, workers: int | None = None) -> mosaic.Tuning:
    """The heuristic's, changed as the case says: measured choices must not choose themselves."""
    quantised = FORMATS[case.format].quantised
    workers = workers or DeviceInfo.current().sms
    found = mosaic.heuristic(case.heads, case.queries, quantised, workers=workers)
    changes = {k: type(getattr(found, k))(v) for k, v in case.tuning}
    return dataclasses.replace(found, **changes)


def attend(case: Case, q_latent, q_rope, pages, table, lens, starts, plan):
    return mosaic.dense_decode(
        q_latent, q_rope, pages, jnp.float32(case.cache_scale), table, lens, starts,
        max_query_len=case.queries, scale=SCALE, format=FORMATS[case.format],
        out_dtype=case.dtype, tuning=tuning_of(case), plan=plan,
    )  # fmt: skip


def plan_of(case: Case, lens, starts):
    return mosaic.make_plan(
        lens, starts, tokens=case.batch * case.queries, heads=case.heads,
        max_query_len=case.queries, page=PAGE, width=-(-max(case.lens) // PAGE),
        tuning=tuning_of(case),
    )  # fmt: skip


def _specs(case: Case) -> tuple:
    tokens, width = case.batch * case.queries, -(-max(case.lens) // PAGE)
    pages = sum(-(-n // PAGE) for n in case.lens)
    spec = jax.ShapeDtypeStruct
    return (
        spec((tokens, case.heads, RANK), case.dtype),
        spec((tokens, case.heads, ROPE), case.dtype),
        spec((pages, PAGE, ROW), FORMATS[case.format].dtype),
        spec((case.batch, width), jnp.int32),
        spec((case.batch,), jnp.int32),
        spec((case.batch + 1,), jnp.int32),
    )


def _compile(case: Case) -> dict:
    """The planner, one call, and a chain of calls on equal page tables; their lse alone."""
    specs = _specs(case)
    make_plan = jax.jit(functools.partial(plan_of, case))
    plan = jax.eval_shape(make_plan, *specs[4:])
    call = jax.jit(functools.partial(attend, case))

    def chain(q_latent, q_rope, pages, tables, lens, starts, plan):
        return [call(q_latent, q_rope, pages, t, lens, starts, plan).lse for t in tables]

    def step(q_latent, q_rope, pages, tables, lens, starts):
        each = zip(tables, lens, strict=True)
        return [call(q_latent, q_rope, pages, t, n, starts, None).lse for t, n in each]

    tables, lens = ([x] * CHAIN for x in specs[3:5])
    start = time.perf_counter()
    if case.batch == 1:  # its launch is timed: warm the jit, on an empty plan
        arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (*specs, plan))
        jax.block_until_ready(call(*arrays))
    once = call.lower(*specs, plan).compile()
    return {
        "compile_s": time.perf_counter() - start,
        "plan": make_plan.lower(*specs[4:]).compile(),
        "once": once,
        "jit": call,
        "step": jax.jit(step).lower(*specs[:3], tables, lens, specs[5]).compile(),
        "chain": jax.jit(chain).lower(*specs[:3], tables, *specs[4:], plan).compile(),
        "reference": jax.jit(functools.partial(reference, case))
        .lower(*_reference_specs(case))
        .compile(),
        "random": jax.jit(functools.partial(random_arrays, case)).lower().compile(),
    }


def random_arrays(case: Case) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(3))
    q_latent, _, pages, *_ = _specs(case)
    q = jax.random.normal(keys[0], (*q_latent.shape[:2], ROW), q_latent.dtype)
    return q, jax.random.normal(keys[1], pages.shape, jnp.bfloat16).astype(pages.dtype)


def inputs(case: Case, q: jax.Array, pages: jax.Array) -> tuple[jax.Array, tuple]:
    """The joined queries for the peer, and our arguments without the plan."""
    rng = np.random.default_rng(7)
    specs = _specs(case)
    counts = [-(-n // PAGE) for n in case.lens]
    order = rng.permutation(specs[2].shape[0]).astype(np.int32)
    table, k = np.zeros(specs[3].shape, np.int32), 0
    for i, n in enumerate(counts):
        table[i, :n], k = order[k : k + n], k + n
    lens = jnp.asarray(case.lens, jnp.int32)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * case.queries
    args = q[..., :RANK], q[..., RANK:], pages, jnp.asarray(table), lens, starts
    return q, jax.block_until_ready(args)


def _reference_specs(case: Case) -> tuple:
    _, _, pages, table, lens, _ = _specs(case)
    spec = jax.ShapeDtypeStruct
    q = spec((case.queries, case.heads, ROW), case.dtype)
    return q, pages, spec(table.shape[1:], table.dtype), spec((), lens.dtype)


def reference(case: Case, q, pages, ids, n):
    """One request in float32: q [queries, heads, row]."""
    rows = FORMATS[case.format].decode(pages[ids].reshape(-1, ROW), jnp.float32(case.cache_scale))
    s = SCALE * jnp.einsum("qhd,kd->qhk", q.astype(jnp.float32), rows, precision="highest")
    seen = n - q.shape[0] + 1 + jnp.arange(q.shape[0])
    s = jnp.where(jnp.arange(rows.shape[0]) < seen[:, None, None], s, -jnp.inf)
    out = jnp.einsum("qhk,kd->qhd", jax.nn.softmax(s), rows[:, :RANK], precision="highest")
    return out, jax.nn.logsumexp(s, axis=-1)


def error_of(case: Case, reference, q, args, state) -> float:
    """Worst relative error of a few requests; raises if it is no rounding error."""
    worst = 0.0
    for r in sorted({0, case.batch // 2, case.batch - 1, int(np.argmax(case.lens))}):
        t = slice(r * case.queries, (r + 1) * case.queries)
        out, lse = reference(q[t], args[2], args[3][r], args[4][r])
        got = state.out[t].astype(jnp.float32)
        worst = max(worst, float(jnp.linalg.norm(got - out) / jnp.linalg.norm(out)))
        assert float(jnp.max(jnp.abs(state.lse[t] - lse))) < 1e-3, f"{case.name}: lse of {r}"
    assert worst < 6e-3, f"{case.name}: relative error {worst}"
    return worst


def _agree(case: Case, name: str, ours: jax.Array, theirs) -> None:
    """A peer that computes something else is none."""
    import torch

    a, b = torch.from_dlpack(ours).float(), theirs.flatten(0, 1).float()
    error = float((a - b).norm() / b.norm())
    assert error < 1e-2, f"{case.name}: {name} differs by {error}"


def _launch_us(call: Callable, args: tuple) -> tuple[float, float]:
    """Host time of a call from a warm jit, which does not wait, and what an empty call saves."""
    empty = jax.jit(lambda *args: args[-1] + 0, keep_unused=True)
    flat = jax.tree.leaves(args)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(LAUNCHES):
        for found, made in zip(times, (lambda: call(*args), lambda: empty(*flat)), strict=True):
            start = time.perf_counter()
            result = made()
            found.append(time.perf_counter() - start)
            jax.block_until_ready(result)
    whole, least = (1e6 * statistics.median(found) for found in times)
    return whole, whole - least


def _row(case: Case, programs: dict, make_peers: dict[str, Callable]) -> dict:
    # Imported here, because who only reads the cases need not have torch.
    from benchmarks.graphed import copies
    from benchmarks.timing import back_to_back_us, isolated_us

    q, args = inputs(case, *programs["random"]())
    plan = programs["plan"](*args[4:])
    state = programs["once"](*args, plan)
    error = error_of(case, programs["reference"], q, args, state)
    tables, lens = jax.block_until_ready([[x + 0 for _ in range(CHAIN)] for x in args[3:5]])

    def chain(n):
        made = [programs["chain"](*args[:3], tables, *args[4:], plan) for _ in range(n)]
        jax.block_until_ready(made)

    def step(n):
        made = [programs["step"](*args[:3], tables, lens, args[5]) for _ in range(n)]
        jax.block_until_ready(made)

    once = {"ours": lambda: jax.block_until_ready(programs["once"](*args, plan))}
    many, stepped = {"ours": chain}, {"ours": step}
    shape = (case.batch, case.queries, case.heads, ROW)
    peers = {
        name: make(q.reshape(shape), *args[2:5], SCALE)
        for name, make in make_peers.items()
        if case.format == "bf16"
    }
    for name, peer in peers.items():
        _agree(case, name, state.out, peer.out)
        once[name], many[name] = peer.once, lambda n, peer=peer: peer.many(n * CHAIN)
        stepped[name] = lambda n, peer=peer: peer.stepped.many(n * CHAIN)
    launch, added = _launch_us(programs["jit"], (*args, plan)) if case.batch == 1 else (None, None)
    isolated = isolated_us(once | {"copy": copies(int(case.bytes)).once})
    planner = {"plan": lambda: jax.block_until_ready(programs["plan"](*args[4:]))}
    isolated |= isolated_us(planner, rounds=1)
    least = HONEST * case.floor_us
    slopes, steps = (
        back_to_back_us(runs, dict.fromkeys(runs, CHAIN), least_us=least)
        for runs in (many, stepped)
    )
    ours = isolated["ours"]
    each = {
        name: {
            "us": isolated[name].sum,
            "span_us": isolated[name].span,
            "slope_us": slopes[name],
            "step_us": steps[name],
        }
        for name in peers
    }
    theirs = {k: min((x[k] for x in each.values()), default=math.nan) for k in CLOCKS}
    return {
        "case": case.name,
        "ours_us": ours.sum,
        "ours_span_us": ours.span,
        "ours_slope_us": slopes["ours"],
        "ours_step_us": steps["ours"],
        "plan_us": isolated["plan"].sum,
        "peer": min(each, key=lambda name: each[name]["span_us"], default=None),
        "peers": each,
        **{f"peer_{k}": us for k, us in theirs.items()},
        "ratio": theirs["us"] / ours.sum,
        "ratio_span": theirs["span_us"] / ours.span,
        "ratio_slope": theirs["slope_us"] / slopes["ours"],
        "ratio_step": theirs["step_us"] / steps["ours"],
        "suspect": [k for x in (slopes, steps) for k, us in x.items() if us < least],
        "tflops": case.flops / ours.span / 1e6,
        "gbs": case.bytes / ours.span / 1e3,
        "floor_us": case.floor_us,
        "floor_percent": 100 * case.floor_us / ours.span,
        "copy_us": isolated["copy"].span,
        "copy_percent": 100 * isolated["copy"].span / ours.span,
        "error": error,
        "compile_s": programs["compile_s"],
        "launch_us": launch,
        "launch_added_us": added,
        "kernels": {name: isolated[name].kernels for name in many},
    }
