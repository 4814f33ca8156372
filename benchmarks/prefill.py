"""Dense prefill: our kernel against FlashAttention-3, alone and with the keys it must be given."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Isolated, back_to_back_us, isolated_us
from mla_jax.pallas.dense_prefill import mosaic, xla
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.device import DeviceInfo

__all__ = ["CASES", "Case", "run"]

FLOPS, BYTES = 800e12, 4.25e12  # ceilings of the floor: bf16 product, copy
CHAIN = 8  # calls of one program when back to back
NONE = Isolated(sum=math.nan, span=math.nan, kernels={})


@dataclass(frozen=True)
class Case:
    """Requests of these queries; keys are as many, or ``keys`` each and all of them seen."""

    heads: int
    queries: tuple[int, ...]
    keys: int = 0
    nope: int = 128
    rope: int = 64
    v: int = 128

    @property
    def name(self) -> str:
        one = len(set(self.queries)) == 1
        queries = f"{len(self.queries)}x{self.queries[0]}" if one else "ragged"
        widths = "" if self.qk == 192 else f"_d{self.qk}"
        seen = f"_k{self.keys}_full" if self.keys else "_causal"
        return f"h{self.heads}{widths}_q{queries}{seen}"

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    @property
    def scale(self) -> float:
        return self.qk**-0.5

    @property
    def causal(self) -> bool:
        return not self.keys

    @property
    def key_lens(self) -> tuple[int, ...]:
        return tuple(self.keys or n for n in self.queries)

    @property
    def flops(self) -> float:
        """Two products of every query with every key that it sees."""
        pairs = sum(
            n * (n + 1) / 2 if self.causal else n * m
            for n, m in zip(self.queries, self.key_lens, strict=True)
        )
        return 2.0 * self.heads * pairs * (self.qk + self.v)

    @property
    def bytes(self) -> float:
        """Queries, results, keys and values of every head once."""
        keys = sum(self.key_lens)
        per_head = sum(self.queries) * (self.qk + self.v) + keys * (self.nope + self.v)
        return 2.0 * (self.heads * per_head + keys * self.rope)

    @property
    def floor_us(self) -> float:
        return max(self.flops / FLOPS, self.bytes / BYTES) * 1e6


CASES = (
    Case(128, (8192,)),
    Case(128, (2048,) * 4),
    Case(128, (512,) * 16),
    Case(128, (1000, 3000, 17, 4500)),
    Case(16, (8192,)),
    Case(16, (4096,) * 4),
    Case(128, (2048,), 16384),
    Case(16, (2048,), 32768),
    Case(20, (8192,), nope=192, v=256),
)

METHOD = (
    "plan given; us: summed kernel time of an isolated call (kineto), span_us: start of its "
    "first kernel to end of its last, slope_us: slope of wall time over 10 ms of calls or more "
    "behind 0.5 s of the same (ours 8 in one jit, the peer as graph replays); medians, both sides "
    "in turn, in one process, on the same arrays; random-normal data; peer: its kernels alone, "
    "keys and values ready; concat: the concatenation of its keys counted; tflops and "
    "floor_percent are of span_us"
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, row by row; the device is used inside ``turn`` alone."""
    make_peer = None
    if peers is not None:
        from benchmarks import fa3

        make_peer = fa3.load(peers)
    for case, programs in [(c, _compile(c)) for c in CASES if c.name in chosen]:
        with turn:
            args, plan, error = _check(case, programs)
            row = _row(case, programs, make_peer, args, plan) | {"error": error}
        print(line(row), flush=True)
        yield row


def line(row: dict) -> str:
    """One row of the table."""
    times = (
        row[f"{who}_{what}"]
        for who in ("ours", "peer", "concat")
        for what in ("us", "span_us", "slope_us")
    )
    ratios = (
        row[f"ratio{what}{end}"] for what in ("", "_concat") for end in ("", "_span", "_slope")
    )
    return (
        f"{row['case']:24s} {' '.join(f'{x:6.0f}' for x in times)} | "
        f"{' '.join(f'{x:.3f}' for x in ratios)} | {row['tflops']:.0f} TFLOP/s "
        f"{row['floor_percent']:.0f}% err {row['error']:.1e} plan {row['plan_us']:.0f} "
        f"{[*row['kernels'].get('ours', {}).values()]}"
    )


def tuning(case: Case) -> mosaic.Tuning:
    """What the backend would choose."""
    return mosaic.heuristic(
        sum(case.queries), sum(case.key_lens), case.heads, requests=len(case.queries),
        nope=case.nope, rope=case.rope, v=case.v, causal=case.causal, device=DeviceInfo.current(),
    )  # fmt: skip


def _attend(case: Case, q, kv, k_rope, query_starts, key_starts, plan):
    return mosaic.dense_prefill(
        q, kv, k_rope, query_starts, key_starts, scale=case.scale, causal=case.causal,
        out_dtype=q.dtype, tuning=tuning(case), plan=plan,
    )  # fmt: skip


def _plan(case: Case, query_starts, key_starts):
    return mosaic.make_plan(
        query_starts, key_starts, tokens=sum(case.queries), keys=sum(case.key_lens),
        causal=case.causal, tuning=tuning(case),
    )  # fmt: skip


def _specs(case: Case) -> tuple:
    tokens, keys, starts = sum(case.queries), sum(case.key_lens), len(case.queries) + 1
    spec = jax.ShapeDtypeStruct
    return (
        spec((tokens, case.heads, case.qk), jnp.bfloat16),
        spec((keys, case.heads, case.nope + case.v), jnp.bfloat16),
        spec((keys, case.rope), jnp.bfloat16),
        spec((starts,), jnp.int32),
        spec((starts,), jnp.int32),
    )


def _compile(case: Case) -> dict:
    """The planner, one call, and a chain of calls on equal plans; their lse alone."""
    specs = _specs(case)
    make_plan = jax.jit(functools.partial(_plan, case))
    plan = jax.eval_shape(make_plan, *specs[3:])
    attend = jax.jit(functools.partial(_attend, case))

    def chain(arrays, plans):
        return [attend(*arrays, plan).lse for plan in plans]

    def truth(q, kv, k_rope, query_starts, key_starts):
        return xla.dense_prefill(
            q, kv, k_rope, query_starts, key_starts,
            scale=case.scale, causal=case.causal, out_dtype=jnp.float32,
        )  # fmt: skip

    def random():
        keys = jax.random.split(jax.random.key(3), 3)
        return [
            jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, specs[:3], strict=True)
        ]

    few = [dataclasses.replace(case, heads=2), *_specs(dataclasses.replace(case, heads=2))]
    return {
        "plan": make_plan.lower(*specs[3:]).compile(),
        "once": attend.lower(*specs, plan).compile(),
        "chain": jax.jit(chain).lower(specs, [plan] * CHAIN).compile(),
        "truth": jax.jit(truth).lower(*few[1:]).compile(),
        "random": jax.jit(random).lower().compile(),
    }


def _error(case: Case, truth, args, state) -> float:
    """Relative error of two heads; raises if it is no rounding error."""
    at = np.array([0, case.heads - 1])
    want = truth(args[0][:, at], args[1][:, at], *args[2:])
    got = state.out[:, at].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want.out) / jnp.linalg.norm(want.out))
    assert float(jnp.max(jnp.abs(state.lse[:, at] - want.lse))) < 1e-3, f"{case.name}: lse"
    assert error < 6e-3, f"{case.name}: relative error {error}"
    return error


def _check(case: Case, programs: dict) -> tuple[tuple, tp.TilePlan, float]:
    """Arguments, their plan, and the error of the result."""
    starts = [
        jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)
        for lens in (case.queries, case.key_lens)
    ]
    args = jax.block_until_ready((*programs["random"](), *starts))
    plan = programs["plan"](*starts)
    return args, plan, _error(case, programs["truth"], args, programs["once"](*args, plan))


def _row(case: Case, programs: dict, make_peer, args: tuple, plan: tp.TilePlan) -> dict:
    plans = jax.block_until_ready([jax.tree.map(lambda x: x + 0, plan) for _ in range(CHAIN)])

    def chain(n):
        jax.block_until_ready([programs["chain"](args, plans) for _ in range(n)])

    once = {"ours": lambda: jax.block_until_ready(programs["once"](*args, plan))}
    many = {"ours": chain}
    if make_peer is not None:
        longest = max(case.queries), max(case.key_lens)
        for name in ("peer", "concat"):
            peer = make_peer(
                *args,
                longest=longest,
                scale=case.scale,
                causal=case.causal,
                concat=name == "concat",
            )
            once[name], many[name] = peer.once, lambda n, peer=peer: peer.many(n * CHAIN)
    isolated = isolated_us(once)
    planner = {"plan": lambda: jax.block_until_ready(programs["plan"](*args[3:]))}
    isolated |= isolated_us(planner, rounds=1)
    slopes = back_to_back_us(many, dict.fromkeys(many, CHAIN))
    ours, found = isolated["ours"], {}
    for name in ("ours", "peer", "concat"):
        times = isolated.get(name, NONE)
        sides = {"_us": times.sum, "_span_us": times.span, "_slope_us": slopes.get(name, math.nan)}
        found |= {name + key: x for key, x in sides.items()}
    for name, key in (("peer", "ratio"), ("concat", "ratio_concat")):
        for end in ("", "_span", "_slope"):
            found[key + end] = found[f"{name}{end}_us"] / found[f"ours{end}_us"]
    return {
        "case": case.name,
        **found,
        "plan_us": isolated["plan"].sum,
        "peer_name": "FlashAttention-3" if make_peer else None,
        "tflops": case.flops / ours.span / 1e6,
        "gbs": case.bytes / ours.span / 1e3,
        "floor_us": case.floor_us,
        "floor_percent": 100 * case.floor_us / ours.span,
        "kernels": {name: isolated[name].kernels for name in many},
    }
