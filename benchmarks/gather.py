"""Cache traffic: our gather and write against a plain copy of as many bytes, XLA, and torch."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from benchmarks.graphed import Graphed
from benchmarks.timing import Isolated, back_to_back_us, isolated_us
from mla_jax.cache import FORMATS, CacheFormat
from mla_jax.pallas.cache_io import mosaic, ref

__all__ = ["CASES", "METHOD", "Case", "run"]

METHOD = (
    "us: summed kernel time of an isolated call (kineto), span_us: start of its first kernel to "
    "end of its last, slope_us: slope of wall time over the number of calls (ours in one jit, "
    "torch as graph replays); medians, all sides interleaved in one process on the same data; "
    "bytes are read and written once each; copy: torch's device-to-device copy that moves as many "
    "bytes; peer: torch index_select of whole pages (fp8: then a cast and a product), or "
    "concatenate (fp8: divide, clamp, cast) and index_copy_; 8 requests, shuffled pages of 64, "
    "random-normal data; gbs and copy_percent are of span_us"
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
        """Calls of one program when back to back."""
        return max(4, min(32, 1024 // self.megabytes))


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
        f"{row['copy_percent']:.1f}% back to back {row['copy_percent_slope']:.1f}% | "
        f"peer {row['ratio_span']:.2f} {row['ratio_slope']:.2f}"
    )


WHO = ("ours", "copy", "peer", "xla")


def _keys(n: int) -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(5), n))


def _scale(case: Case) -> jax.Array:
    return jnp.float32(SCALE if case.stored.quantised else 1)


def _page_spec(case: Case) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((case.tokens // PAGE, PAGE, ROW), case.stored.dtype)


def _pages(case: Case) -> Callable[[], jax.Array]:
    """A program that draws the cache."""

    def draw():
        x = jax.random.normal(_keys(1)[0], _page_spec(case).shape, jnp.bfloat16)
        return x.astype(case.stored.dtype)

    return jax.jit(draw).lower().compile()


def _order(case: Case) -> np.ndarray:
    return np.random.default_rng(7).permutation(case.tokens // PAGE).astype(np.int32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.all(_bits(a) == _bits(b))


def _graph(call: Callable[[], object]) -> tuple[Callable[[], None], Callable[[int], None]]:
    """``once`` waits for a call; ``many(n)`` replays it ``n`` times and waits."""
    call()
    graphed = Graphed(call)
    return graphed.once, graphed.many


def _torch_copy(case: Case):
    src = torch.randint(0, 255, (case.bytes // 2,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    return _graph(lambda: dst.copy_(src))


def _compile_gather(case: Case) -> dict:
    fixed = {"rows": case.tokens, "dtype": jnp.bfloat16, "format": case.stored}
    ours = functools.partial(mosaic.gather_latent, **fixed)

    def chain(pages, scale, tables, first, starts):
        return [ours(pages, scale, t, first, starts) for t in tables]

    spec = jax.ShapeDtypeStruct
    table = spec((REQUESTS, case.tokens // PAGE // REQUESTS), jnp.int32)
    index = spec((REQUESTS,), jnp.int32), spec((REQUESTS + 1,), jnp.int32)
    head = _page_spec(case), spec((), jnp.float32)
    args = *head, table, *index
    return {
        "pages": _pages(case),
        "ours": jax.jit(ours).lower(*args).compile(),
        "xla": jax.jit(functools.partial(ref.gather_latent, **fixed)).lower(*args).compile(),
        "chain": jax.jit(chain).lower(*head, [table] * case.chain, *index).compile(),
    }


def _gather(case: Case, programs: dict) -> dict:
    pages, order = programs["pages"](), _order(case)
    table = jnp.asarray(order.reshape(REQUESTS, -1))
    first = jnp.zeros((REQUESTS,), jnp.int32)
    starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32) * (case.tokens // REQUESTS)
    args = pages, _scale(case), table, first, starts
    ours, xla = (functools.partial(programs[k], *args) for k in ("ours", "xla"))
    assert _same(ours(), xla()), f"{case.name}: wrong bits"
    tables = jax.block_until_ready([table + 0 for _ in range(case.chain)])
    ids = torch.from_dlpack(jnp.asarray(order)).long()
    stored = torch.from_dlpack(_bits(pages) if case.stored.quantised else pages)
    out = torch.empty((case.tokens // PAGE, PAGE, ROW), dtype=torch.bfloat16, device="cuda")

    def peer():
        if not case.stored.quantised:
            return torch.index_select(stored, 0, ids, out=out)
        rows = torch.index_select(stored, 0, ids).view(torch.float8_e4m3fn)
        return torch.mul(rows.to(torch.float32), SCALE, out=out)

    return {
        "ours": lambda: jax.block_until_ready(ours()),
        "xla": lambda: jax.block_until_ready(xla()),
        "chain": lambda: programs["chain"](*args[:2], tables, *args[3:]),
        "peer": _graph(peer),
    }


def _compile_write(case: Case) -> dict:
    ours = functools.partial(mosaic.write_latent, format=case.stored)

    def chain(pages, *args):
        for _ in range(case.chain):
            pages = ours(pages, *args)
        return pages

    spec = jax.ShapeDtypeStruct
    args = (
        _page_spec(case),
        spec((), jnp.float32),
        spec((case.tokens, RANK), jnp.bfloat16),
        spec((case.tokens, ROPE), jnp.bfloat16),
        spec((case.tokens,), jnp.int32),
    )
    fns = {
        "ours": ours,
        "xla": functools.partial(ref.write_latent, format=case.stored),
        "chain": chain,
    }
    compiled = {k: jax.jit(f, donate_argnums=0).lower(*args).compile() for k, f in fns.items()}
    return compiled | {"pages": _pages(case)}


def _write(case: Case, programs: dict) -> dict:
    keys = _keys(3)
    kv = jax.random.normal(keys[1], (case.tokens, RANK), jnp.bfloat16)
    kr = jax.random.normal(keys[2], (case.tokens, ROPE), jnp.bfloat16)
    slots = jnp.asarray((_order(case)[:, None] * PAGE + np.arange(PAGE)).ravel().astype(np.int32))
    args = _scale(case), kv, kr, slots
    caches = {k: programs[k](programs["pages"](), *args) for k in ("ours", "xla")}
    if not case.stored.quantised:  # XLA's quotients are not all rounded to nearest
        assert _same(caches["ours"], caches["xla"]), f"{case.name}: wrong bits"

    def call(name: str, program: str) -> jax.Array:
        caches[name] = programs[program](caches[name], *args)
        return caches[name]

    cache = programs["pages"]()
    cache = torch.from_dlpack(_bits(cache) if case.stored.quantised else cache).view(-1, ROW)
    latent, rope, index = (torch.from_dlpack(x) for x in (kv, kr, slots))
    index = index.long()
    divisor = torch.full((), SCALE, device="cuda")  # a number would become a product

    def peer():
        rows = torch.cat([latent, rope], dim=1)
        if case.stored.quantised:
            rows = (rows.float() / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
            rows = rows.view(torch.uint8)
        return cache.index_copy_(0, index, rows)

    run_peer = _graph(peer)
    if case.stored.quantised:
        ours, theirs = (jnp.from_dlpack(x) for x in (_bits(caches["ours"]), cache))
        assert jnp.array_equal(ours.reshape(-1, ROW), theirs), f"{case.name}: wrong bits"
    return {
        "ours": lambda: jax.block_until_ready(call("ours", "ours")),
        "xla": lambda: jax.block_until_ready(call("xla", "xla")),
        "chain": lambda: call("ours", "chain"),
        "peer": run_peer,
    }


OPS = {"gather": (_compile_gather, _gather), "write": (_compile_write, _write)}


def _row(case: Case, runs: dict) -> dict:
    copy, peer = _torch_copy(case), runs["peer"]
    once = {"ours": runs["ours"], "copy": copy[0], "peer": peer[0]}
    isolated: dict[str, Isolated] = isolated_us(once)
    isolated |= isolated_us({"xla": runs["xla"]}, rounds=1)

    def chain(n):
        jax.block_until_ready([runs["chain"]() for _ in range(n)][-1])

    many = {
        "ours": chain,
        "copy": lambda n: copy[1](n * case.chain),
        "peer": lambda n: peer[1](n * case.chain),
    }
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
        "copy_percent_slope": 100 * slopes["copy"] / slopes["ours"],
        "kernels": {who: isolated[who].kernels for who in WHO},
    }
