"""Cache traffic: our gather and write against a plain copy of as many bytes, XLA, and torch."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from benchmarks.graphed import InTurn, copies
from benchmarks.timing import Isolated, back_to_back_us, isolated_us
from mla_jax.cache import FORMATS, CacheFormat
from mla_jax.pallas.cache_io import mosaic, ref

__all__ = ["CASES", "METHOD", "Case", "run"]

METHOD = (
    "us: summed kernel time of an isolated call (kineto), span_us: start of its first kernel to "
    "end of its last, slope_us: slope of wall time over 10 ms of calls behind 0.5 s of the "
    "same (ours in one jit, torch as graph replays); medians, all sides in turn, in one process, "
    "on the same data, of which "
    "there are several sets that all calls take in turn, so that none is found in the L2 cache "
    "(1 GB of stored rows in all, 256 MB where each has 8); bytes are read and written once each; "
    "copy: torch's device-to-device copy that moves as many bytes; peer: torch index_select of "
    "whole pages (fp8: then a cast and a product), or concatenate (fp8: divide, clamp, cast) and "
    "index_copy_; 8 requests, pages of 64, shuffled (ordered: one after the other), random-normal "
    "data; gbs and copy_percent are of span_us"
)

PAGE, RANK, ROPE = 64, 512, 64
ROW = RANK + ROPE
REQUESTS = 8
SCALE = 0.37  # of a quantised cache


@dataclass(frozen=True)
class Case:
    """``megabytes`` of stored rows, out of the cache or into it."""

    op: str
    format: str
    megabytes: int

    @property
    def name(self) -> str:
        return f"{self.op}_{self.format.split('_')[0]}_{self.megabytes}mb"

    @property
    def stored(self) -> CacheFormat:
        return FORMATS[self.format]

    @property
    def tokens(self) -> int:
        """A whole number of pages for every request."""
        step = PAGE * REQUESTS
        return (self.megabytes * 10**6 // (ROW * self.stored.itemsize)) // step * step

    @property
    def bytes(self) -> int:
        """Stored rows on one side, bfloat16 rows on the other."""
        return self.tokens * ROW * (self.stored.itemsize + 2)

    @property
    def chain(self) -> int:
        """Sets of data, taken in turn: none is found in the L2 cache again."""
        return max(6, min(32, 1024 // self.megabytes))  # five make a CUDA graph


CASES = tuple(
    Case(op, format, megabytes)
    for megabytes in (64, 256, 8)  # what is asked for first
    for op in ("gather", "write")
    for format in ("bf16", "fp8_e4m3")
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases, row by row; the device is timed inside ``turn`` alone."""
    del peers  # torch is the peer
    for case, programs in [(c, OPS[c.op][0](c)) for c in CASES if c.name in chosen]:
        with turn:
            row = _row(case, OPS[case.op][1](case, programs))
        print(line(row), flush=True)
        yield row


def line(row: dict) -> str:
    """One row of the table."""
    times = (f"{row[f'{who}_{k}us']:7.1f}" for k in ("", "span_", "slope_") for who in WHO)
    return (
        f"{row['case']:18s} {' '.join(times)} | {row['gbs']:.0f} GB/s, of copy "
        f"{row['copy_percent']:.1f}% in order {row['copy_percent_ordered']:.1f}% "
        f"back to back {row['copy_percent_slope']:.1f}% | "
        f"peer {row['ratio_span']:.2f} {row['ratio_slope']:.2f}"
    )


WHO = ("ours", "copy", "peer", "xla")


def _key(i: int) -> jax.Array:
    """Of a set of data."""
    return jax.random.fold_in(jax.random.key(5), i)


def _scale(case: Case) -> jax.Array:
    return jnp.float32(SCALE if case.stored.quantised else 1)


def _page_spec(case: Case) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((case.tokens // PAGE, PAGE, ROW), case.stored.dtype)


def _pages(case: Case) -> Callable[[jax.Array], jax.Array]:
    """A program that draws a cache."""

    def draw(key):
        x = jax.random.normal(key, _page_spec(case).shape, jnp.bfloat16)
        return x.astype(case.stored.dtype)

    return jax.jit(draw).lower(_key(0)).compile()


def _order(case: Case, i: int) -> np.ndarray:
    """Of the pages of a set of data."""
    return np.random.default_rng((7, i)).permutation(case.tokens // PAGE).astype(np.int32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.all(_bits(a) == _bits(b))


def _compile_gather(case: Case) -> dict:
    fixed = {"rows": case.tokens, "dtype": jnp.bfloat16, "format": case.stored}
    ours = functools.partial(mosaic.gather_latent, **fixed)

    def chain(caches, scale, tables, first, starts):
        return [ours(c, scale, t, first, starts) for c, t in zip(caches, tables, strict=True)]

    spec = jax.ShapeDtypeStruct
    table = spec((REQUESTS, case.tokens // PAGE // REQUESTS), jnp.int32)
    index = spec((REQUESTS,), jnp.int32), spec((REQUESTS + 1,), jnp.int32)
    pages, scale, n = _page_spec(case), spec((), jnp.float32), case.chain
    args = pages, scale, table, *index
    return {
        "pages": _pages(case),
        "ours": jax.jit(ours).lower(*args).compile(),
        "xla": jax.jit(functools.partial(ref.gather_latent, **fixed)).lower(*args).compile(),
        "chain": jax.jit(chain).lower([pages] * n, scale, [table] * n, *index).compile(),
    }


def _gather(case: Case, programs: dict) -> dict:
    sets = range(case.chain)
    pages, order = [programs["pages"](_key(i)) for i in sets], [_order(case, i) for i in sets]
    tables = [jnp.asarray(o.reshape(REQUESTS, -1)) for o in order]
    in_order = [jnp.sort(t.ravel()).reshape(t.shape) for t in tables]
    first = jnp.zeros((REQUESTS,), jnp.int32)
    starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32) * (case.tokens // REQUESTS)
    scale, turn = _scale(case), itertools.cycle(sets)
    held: deque[jax.Array] = deque(maxlen=case.chain)  # results go to as many places

    def call(program: str, tables: list[jax.Array] = tables) -> None:
        i = next(turn)
        result = programs[program](pages[i], scale, tables[i], first, starts)
        held.append(result.block_until_ready())

    call("ours")
    wanted = programs["xla"](pages[0], scale, tables[0], first, starts)
    assert _same(held[0], wanted), f"{case.name}: wrong bits"
    del wanted
    ids = [torch.from_numpy(o).long().cuda() for o in order]
    stored = [torch.from_dlpack(_bits(x) if case.stored.quantised else x) for x in pages]
    shape = (case.tokens // PAGE, PAGE, ROW)
    out = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in sets]

    def peer(i: int):
        if not case.stored.quantised:
            return torch.index_select(stored[i], 0, ids[i], out=out[i])
        rows = torch.index_select(stored[i], 0, ids[i]).view(torch.float8_e4m3fn)
        return torch.mul(rows.to(torch.float32), SCALE, out=out[i])

    return {
        "ours": lambda: call("ours"),
        "ordered": lambda: call("ours", in_order),
        "xla": lambda: call("xla"),
        "chain": lambda: programs["chain"](pages, scale, tables, first, starts),
        "peer": InTurn(peer, case.chain),
    }


def _compile_write(case: Case) -> dict:
    ours = functools.partial(mosaic.write_latent, format=case.stored)

    def chain(caches, scale, latents, ropes, slots):
        rows = zip(caches, latents, ropes, slots, strict=True)
        return [ours(c, scale, *each) for c, *each in rows]

    spec = jax.ShapeDtypeStruct
    pages, scale, n = _page_spec(case), spec((), jnp.float32), case.chain
    rows = (
        spec((case.tokens, RANK), jnp.bfloat16),
        spec((case.tokens, ROPE), jnp.bfloat16),
        spec((case.tokens,), jnp.int32),
    )

    def compiled(f, *args):
        return jax.jit(f, donate_argnums=0).lower(*args).compile()

    return {
        "pages": _pages(case),
        "ours": compiled(ours, pages, scale, *rows),
        "xla": compiled(
            functools.partial(ref.write_latent, format=case.stored), pages, scale, *rows
        ),
        "chain": compiled(chain, [pages] * n, scale, *([r] * n for r in rows)),
    }


def _write(case: Case, programs: dict) -> dict:
    sets, scale = range(case.chain), _scale(case)
    keys = [jax.random.split(_key(i)) for i in sets]
    latents = [jax.random.normal(k[0], (case.tokens, RANK), jnp.bfloat16) for k in keys]
    ropes = [jax.random.normal(k[1], (case.tokens, ROPE), jnp.bfloat16) for k in keys]
    slots = [
        jnp.asarray((_order(case, i)[:, None] * PAGE + np.arange(PAGE)).ravel().astype(np.int32))
        for i in sets
    ]
    in_order = [jnp.sort(x) for x in slots]
    caches = [programs["pages"](_key(i)) for i in sets]
    turn = itertools.cycle(sets)

    def call(program: str, slots: list[jax.Array] = slots) -> None:
        i = next(turn)
        caches[i] = programs[program](caches[i], scale, latents[i], ropes[i], slots[i])
        caches[i].block_until_ready()

    def chain() -> jax.Array:
        caches[:] = programs["chain"](caches, scale, latents, ropes, slots)
        return caches[-1]

    call("ours")
    if not case.stored.quantised:  # XLA's quotients are not all rounded to nearest
        wanted = programs["xla"](programs["pages"](_key(0)), scale, latents[0], ropes[0], slots[0])
        assert _same(caches[0], wanted), f"{case.name}: wrong bits"
        del wanted
    theirs = [programs["pages"](_key(i)) for i in sets]
    theirs = [torch.from_dlpack(_bits(x) if case.stored.quantised else x) for x in theirs]
    theirs = [x.view(-1, ROW) for x in theirs]
    latent, rope, index = ([torch.from_dlpack(x) for x in y] for y in (latents, ropes, slots))
    index = [x.long() for x in index]
    divisor = torch.full((), SCALE, device="cuda")  # a number would become a product

    def peer(i: int):
        rows = torch.cat([latent[i], rope[i]], dim=1)
        if case.stored.quantised:
            rows = (rows.float() / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
            rows = rows.view(torch.uint8)
        return theirs[i].index_copy_(0, index[i], rows)

    in_turn = InTurn(peer, case.chain)
    if case.stored.quantised:
        ours = _bits(caches[0]).reshape(-1, ROW)
        assert jnp.array_equal(ours, jnp.from_dlpack(theirs[0])), f"{case.name}: wrong bits"
    return {
        "ours": lambda: call("ours"),
        "ordered": lambda: call("ours", in_order),
        "xla": lambda: call("xla"),
        "chain": chain,
        "peer": in_turn,
    }


OPS = {"gather": (_compile_gather, _gather), "write": (_compile_write, _write)}


def _row(case: Case, runs: dict) -> dict:
    copy, peer = copies(case.bytes, case.chain), runs["peer"]
    once = {name: runs[name] for name in ("ours", "ordered")}
    once |= {"copy": copy.once, "peer": peer.once}
    isolated: dict[str, Isolated] = isolated_us(once)
    isolated |= isolated_us({"xla": runs["xla"]}, rounds=1)

    def chain(n):
        last: deque = deque(maxlen=1)  # results of chains before it leave room
        last.extend(runs["chain"]() for _ in range(n))
        jax.block_until_ready(last[0])

    many = {"ours": chain, "copy": copy.many, "peer": peer.many}
    slopes = back_to_back_us(many, dict.fromkeys(many, case.chain)) | {"xla": math.nan}
    times = {}
    for who in WHO:
        times[f"{who}_us"] = isolated[who].sum
        times[f"{who}_span_us"] = isolated[who].span
        times[f"{who}_slope_us"] = slopes[who]
    ours = isolated["ours"]
    return {
        "case": case.name,
        **times,
        "peer": "torch",
        "ratio": isolated["peer"].sum / ours.sum,
        "ratio_span": isolated["peer"].span / ours.span,
        "ratio_slope": slopes["peer"] / slopes["ours"],
        "gbs": case.bytes / ours.span / 1e3,
        "copy_percent": 100 * isolated["copy"].span / ours.span,
        "ordered_span_us": isolated["ordered"].span,
        "copy_percent_ordered": 100 * isolated["copy"].span / isolated["ordered"].span,
        "copy_percent_slope": 100 * slopes["copy"] / slopes["ours"],
        "kernels": {who: isolated[who].kernels for who in WHO},
    }
