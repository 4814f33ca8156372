"""Sparse decode beside FlashMLA's, on the same arrays: 656-byte and bf16 caches of V3.2."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.flashmla import library
from benchmarks.timing import Isolated, isolated_us
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.ops import mla_sparse_decode, write_rows
from mla_jax.pallas.sparse_attention import xla

__all__ = ["CASES", "METHOD", "Case", "run"]

RANK, ROPE, PAGE, TOPK = 512, 64, 64, 2048
SCALE = (RANK + ROPE) ** -0.5
BYTES_PER_S, FLOPS_PER_S = 4.25e12, 800e12
CHECKED = 4  # tokens
ALLOWED = 0.02
METHOD = (
    f"{TOPK} distinct slots of each token, shuffled, among the pages of its own request; us: "
    "summed kernel time of an isolated call (kineto), span_us: start of its first kernel to end "
    "of its last; medians, both sides in turn, in one process, on the same arrays; peer: "
    "FlashMLA's sparse decode, planned once; error: |out - float32| / |float32| of the same "
    "stored values; floor: the larger of gathered bytes / 4.25 TB/s and FLOPs / 800 TFLOP/s"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``requests`` with ``queries`` tokens each."""

    requests: int
    queries: int
    heads: int
    form: str

    @property
    def name(self) -> str:
        return f"b{self.requests}_q{self.queries}_h{self.heads}_{self.form}"

    @property
    def tokens(self) -> int:
        return self.requests * self.queries

    @property
    def floor_us(self) -> float:
        """No kernel with these rates is faster."""
        row = 656 if self.form == "ds_mla" else 2 * (RANK + ROPE)
        read = self.tokens * TOPK * row
        flops = 2 * self.tokens * TOPK * self.heads * (2 * RANK + ROPE)
        return 1e6 * max(read / BYTES_PER_S, flops / FLOPS_PER_S)


CASES = tuple(
    Case(requests=b, queries=q, heads=h, form=form)
    for form, rows in (
        ("ds_mla", ((128, 1, 128), (128, 2, 128), (32, 1, 128), (128, 1, 64), (1, 2, 128))),
        ("bf16", ((128, 1, 128), (32, 1, 128), (128, 1, 16), (1, 1, 128))),
    )
    for b, q, h in rows
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases; compiles outside of ``turn``, measures inside."""
    for case in (c for c in CASES if c.name in chosen):
        q, cache, slots = _drawn(case)
        ours = jax.jit(
            lambda q, cache, slots: mla_sparse_decode(
                q[..., :RANK], q[..., RANK:], cache, slots, scale=SCALE
            )
        )
        compiled = ours.lower(q, cache, slots).compile()
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda f=compiled, a=(q, cache, slots): jax.block_until_ready(f(*a))
        }
        with turn:
            error = _error(q, cache, slots, compiled(q, cache, slots).out)
            assert error < ALLOWED, f"{case.name}: error {error:.4f}"
            if peers is not None and case.form == "ds_mla":
                sides["peer"] = _flashmla(peers, case, q, cache, slots)
            found = isolated_us(sides)
        row = {"case": case.name, "error": error, "floor_us": case.floor_us}
        yield row | _times(found)


def _times(found: dict[str, Isolated]) -> dict[str, Any]:
    ours = found["ours"]
    row: dict[str, Any] = {"us": ours.sum, "span_us": ours.span, "kernels": ours.kernels}
    if peer := found.get("peer"):
        row |= {"peer_us": peer.sum, "peer_span_us": peer.span}
        row |= {"ratio": peer.sum / ours.sum, "ratio_span": peer.span / ours.span}
    print({k: v for k, v in row.items() if k != "kernels"}, flush=True)
    return row


def _drawn(case: Case) -> tuple[jax.Array, LatentCache | RecordCache, jax.Array]:
    longest = 8192 if case.requests > 32 else 32768
    pages = case.requests * longest // PAGE
    facts = {"num_pages": pages, "page": PAGE, "format": case.form}
    cache = (
        RecordCache.alloc(**facts)
        if case.form == "ds_mla"
        else LatentCache.alloc(**facts, rank=RANK, rope=ROPE)
    )
    key = jax.random.key(0)
    each = pages * PAGE // 8

    @jax.jit
    def fill(cache, key, i):
        x = jax.random.normal(key, (each, RANK + ROPE), jnp.bfloat16) / 4
        slots = i * each + jnp.arange(each, dtype=jnp.int32)
        return write_rows(cache, (x[:, :RANK], x[:, RANK:]), slots)

    for i in range(8):
        cache = fill(cache, jax.random.fold_in(key, i), i)
    rng = np.random.default_rng(0)
    slots = np.stack(
        [
            rng.permutation(longest)[:TOPK] + (t // case.queries) * longest
            for t in range(case.tokens)
        ]
    ).astype(np.int32)
    q = jax.random.normal(key, (case.tokens, case.heads, RANK + ROPE), jnp.bfloat16)
    return q, cache, jnp.asarray(slots)


def _error(q, cache, slots, out) -> float:
    some = slice(0, CHECKED)
    want = xla.sparse_decode(
        q[some], ((cache, slots[some], None),), scale=SCALE, value=RANK, out_dtype=jnp.float32
    ).out
    got = out[some].astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def _flashmla(peers: Path, case: Case, q, cache, slots) -> Callable[[], None]:
    import torch

    torch.ops.load_library(str(library(peers)))
    decode = torch.ops._flashmla_C.sparse_decode_fwd
    b, s = case.requests, case.queries
    query = torch.from_dlpack(q).view(b, s, case.heads, RANK + ROPE)
    pages = torch.from_dlpack(cache.pages).view(-1, PAGE, 1, 656)
    index = torch.from_dlpack(slots).view(b, s, TOPK)
    none = (None,) * 5
    _, _, *plan = decode(query, pages, index, None, None, *none, RANK, SCALE, None, False)

    def call() -> None:
        more = (None, None, *plan, None, None, None)
        decode(query, pages, index, *more, RANK, SCALE, None, False)
        torch.cuda.synchronize()

    return call
