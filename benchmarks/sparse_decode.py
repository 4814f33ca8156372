"""Sparse decode beside FlashMLA's, on the same arrays: 656-byte and bf16 caches of V3.2.

``wrong`` of a row names backends whose result was: they have no figures there.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.flashmla import library
from benchmarks.timing import Isolated, isolated_us, once
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.ops import mla_sparse_decode, write_rows
from mla_jax.pallas.sparse_attention import xla

__all__ = ["CASES", "METHOD", "Case", "drawn_cache", "error_of", "floor_us", "measured", "run"]

RANK, ROPE, PAGE, TOPK = 512, 64, 64, 2048
SCALE = (RANK + ROPE) ** -0.5
BYTES_PER_S, FLOPS_PER_S = 4.25e12, 800e12
CHECKED = 4  # tokens
ALLOWED = 0.02
BACKENDS = "mosaic", "triton"
CLOCK = (
    "us: summed kernel time of an isolated call of backend mosaic (kineto), span_us: start of its "
    "first kernel to end of its last, triton_us: the same of triton; medians, all in turn, in one "
    "process, on the same arrays; error: |out - float32| / |float32| of the same stored values, "
    "four tokens; floor: the larger of gathered bytes / 4.25 TB/s and FLOPs / 800 TFLOP/s"
)
METHOD = (
    f"{TOPK} distinct slots of each token, shuffled, among the pages of its own request; ragged: 1 "
    "to as many of them, then -1; peer: FlashMLA's sparse decode, planned once, with 64 heads if "
    "there are fewer, or over bf16 rows, for which it has no decode, its sparse prefill; " + CLOCK
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``requests`` with ``queries`` tokens each."""

    requests: int
    queries: int
    heads: int
    form: str
    ragged: bool = False  # lists of 1 to TOPK slots

    @property
    def name(self) -> str:
        ragged = "_ragged" if self.ragged else ""
        return f"b{self.requests}_q{self.queries}_h{self.heads}_{self.form}{ragged}"

    @property
    def tokens(self) -> int:
        return self.requests * self.queries


CASES = (
    *(
        Case(requests=b, queries=q, heads=h, form=form)
        for form, rows in (
            ("ds_mla", ((128, 1, 128), (128, 2, 128), (32, 1, 128), (128, 1, 64), (1, 2, 128))),
            ("ds_mla", ((256, 1, 64), (8, 1, 128), (64, 4, 16))),
            ("bf16", ((128, 1, 128), (32, 1, 128), (128, 1, 16), (1, 1, 128))),
        )
        for b, q, h in rows
    ),
    Case(requests=128, queries=1, heads=128, form="ds_mla", ragged=True),
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases; compiles outside of ``turn``, measures inside."""
    for case in (c for c in CASES if c.name in chosen):
        q, cache, slots = _drawn(case)
        given = q[..., :RANK], q[..., RANK:], cache, slots  # apart, as a model has them
        calls = {
            name: functools.partial(mla_sparse_decode, scale=SCALE, backend=name)
            for name in BACKENDS
        }
        some = slice(0, CHECKED)
        want = xla.sparse_decode(
            q[some], ((cache, slots[some], None),), scale=SCALE, value=RANK, out_dtype=jnp.float32
        )
        peer = functools.partial(_flashmla, peers, case, q, cache, slots) if peers else None
        found = int(jnp.sum(slots >= 0))
        row = 656 if case.form == "ds_mla" else 2 * (RANK + ROPE)
        yield {
            "case": case.name,
            "floor_us": floor_us(found, row, case.heads, 2 * RANK + ROPE),
        } | measured(case.name, calls, given, want.out, peer, turn)


def floor_us(keys: int, row_bytes: int, heads: int, columns: int) -> float:
    """No kernel with these rates is faster: rows of all tokens, each read once by its token."""
    flops = 2 * keys * heads * columns
    return 1e6 * max(keys * row_bytes / BYTES_PER_S, flops / FLOPS_PER_S)


def measured(
    name: str,
    calls: dict[str, Callable[..., Any]],
    given: tuple[Any, ...],
    want: jax.Array,
    peer: Callable[[], Callable[[], None]] | None,
    turn: AbstractContextManager,
) -> dict[str, Any]:
    """Errors and times of our backends and of the peer; ``calls`` are compiled before the turn."""
    compiled = {k: jax.jit(call).lower(*given).compile() for k, call in calls.items()}
    with turn:
        errors = {k: error_of(run(*given).out, want) for k, run in compiled.items()}
        right = {k: run for k, run in compiled.items() if errors[k] < ALLOWED}
        sides: dict[str, Callable[[], Any]] = {
            k: functools.partial(once, run, given) for k, run in right.items()
        }
        if peer is not None:
            sides["peer"] = peer()
        found = isolated_us(sides)
    row: dict[str, Any] = {"error": errors["mosaic"]} if "mosaic" in right else {}
    row |= {"wrong": [k for k in compiled if k not in right]} if len(right) < len(compiled) else {}
    print({"case": name, "errors": errors}, flush=True)
    return row | _times(found)


def _times(found: dict[str, Isolated]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    peer = found.pop("peer", None)
    if peer:
        row |= {"peer_us": peer.sum, "peer_span_us": peer.span}
    for name, ours in found.items():
        head, tail = ("", "") if name == "mosaic" else (f"{name}_", f"_{name}")
        row |= {f"{head}us": ours.sum, f"{head}span_us": ours.span, f"{head}kernels": ours.kernels}
        if peer:
            row |= {f"ratio{tail}": peer.sum / ours.sum, f"ratio_span{tail}": peer.span / ours.span}
    print({k: v for k, v in row.items() if "kernels" not in k}, flush=True)
    return row


def drawn_cache(
    form: str, pages: int, page: int, widths: tuple[int, int], key: jax.Array
) -> LatentCache | RecordCache:
    """A cache full of normal numbers."""
    facts = {"num_pages": pages, "page": page, "format": form}
    cache = (
        LatentCache.alloc(**facts, rank=widths[0], rope=widths[1])
        if form == "bf16"
        else RecordCache.alloc(**facts)
    )
    each = pages * page // 8

    @jax.jit
    def fill(cache, key, i):
        x = jax.random.normal(key, (each, sum(widths)), jnp.bfloat16) / 4
        slots = i * each + jnp.arange(each, dtype=jnp.int32)
        return write_rows(cache, (x[:, : widths[0]], x[:, widths[0] :]), slots)

    for i in range(8):
        cache = fill(cache, jax.random.fold_in(key, i), i)
    return cache


def _drawn(case: Case) -> tuple[jax.Array, LatentCache | RecordCache, jax.Array]:
    longest = 8192 if case.requests > 32 else 32768
    key = jax.random.key(0)
    cache = drawn_cache(case.form, case.requests * longest // PAGE, PAGE, (RANK, ROPE), key)
    rng = np.random.default_rng(0)
    slots = np.stack(
        [
            rng.permutation(longest)[:TOPK] + (t // case.queries) * longest
            for t in range(case.tokens)
        ]
    ).astype(np.int32)
    if case.ragged:
        lengths = rng.integers(1, TOPK + 1, case.tokens)
        slots = np.where(np.arange(TOPK) < lengths[:, None], slots, -1)
    q = jax.random.normal(key, (case.tokens, case.heads, RANK + ROPE), jnp.bfloat16)
    return q, cache, jnp.asarray(slots)


def error_of(got: jax.Array, want: jax.Array) -> float:
    """Of the first tokens, which ``want`` has in float32."""
    got = got[: want.shape[0]].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


def _flashmla(peers: Path, case: Case, q, cache, slots) -> Callable[[], None]:
    import torch

    torch.ops.load_library(str(library(peers)))
    flashmla = torch.ops._flashmla_C
    b, s, heads = case.requests, case.queries, max(case.heads, 64)
    query = torch.nn.functional.pad(torch.from_dlpack(q), (0, 0, 0, heads - case.heads))
    index = torch.from_dlpack(slots)
    if case.form == "bf16":
        rows = torch.from_dlpack(cache.pages).view(-1, 1, RANK + ROPE)

        def prefill() -> None:
            flashmla.sparse_prefill_fwd(
                query, rows, index.view(b * s, 1, TOPK), SCALE, RANK, None, None, None
            )
            torch.cuda.synchronize()

        return prefill
    pages, none = torch.from_dlpack(cache.pages).view(-1, PAGE, 1, 656), (None,) * 3
    query, index = query.view(b, s, heads, RANK + ROPE), index.view(b, s, TOPK)
    decode = flashmla.sparse_decode_fwd
    first = (None,) * 4  # lengths, sinks, plan
    _, _, *plan = decode(query, pages, index, *first, *none, RANK, SCALE, None, False)

    def call() -> None:
        decode(query, pages, index, None, None, *plan, *none, RANK, SCALE, None, False)
        torch.cuda.synchronize()

    return call
