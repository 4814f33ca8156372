"""Sparse prefill over gathered bf16 rows beside FlashMLA's, on the same arrays."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.flashmla import library
from benchmarks.sparse_decode import CHECKED, CLOCK, RANK, ROPE, SCALE, TOPK, floor_us, measured
from mla_jax.ops import mla_sparse_prefill
from mla_jax.pallas.sparse_attention import xla

__all__ = ["CASES", "METHOD", "Case", "run"]

TOKENS = 4096
METHOD = (
    f"{TOKENS} tokens, {TOPK} distinct rows of each, shuffled; peer: FlashMLA's sparse prefill; "
    + CLOCK.replace("gathered bytes", "bytes of all rows that there are")
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``TOKENS`` tokens over ``rows`` gathered rows."""

    rows: int
    heads: int

    @property
    def name(self) -> str:
        return f"{TOKENS}x{self.rows}_h{self.heads}"


CASES = tuple(
    Case(rows=n, heads=h) for n, h in ((8192, 128), (32768, 128), (131072, 128), (32768, 64))
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases; compiles outside of ``turn``, measures inside."""
    ours = functools.partial(mla_sparse_prefill, scale=SCALE, backend="mosaic")
    for case in (c for c in CASES if c.name in chosen):
        q, rows, indices = _drawn(case)
        some = slice(0, CHECKED)
        facts = {"scale": SCALE, "value": RANK, "out_dtype": jnp.float32}
        want = xla.sparse_prefill(q[some], rows, indices[some], **facts).out
        given = q[..., :RANK], q[..., RANK:], rows, indices
        peer = functools.partial(_flashmla, peers, q, rows, indices) if peers else None
        flops = floor_us(TOKENS * TOPK, 0, case.heads, 2 * RANK + ROPE)
        yield {
            "case": case.name,
            "floor_us": max(flops, floor_us(case.rows, 2 * (RANK + ROPE), 0, 0)),
        } | measured(case.name, {"mosaic": ours}, given, want, peer, turn)


def _drawn(case: Case):
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (TOKENS, case.heads, RANK + ROPE), jnp.bfloat16)
    rows = jax.random.normal(keys[1], (case.rows, RANK + ROPE), jnp.bfloat16) / 4
    rng = np.random.default_rng(0)
    indices = np.stack([rng.permutation(case.rows)[:TOPK] for _ in range(TOKENS)])
    return q, rows, jnp.asarray(indices, jnp.int32)


def _flashmla(peers: Path, q, rows, indices) -> Callable[[], None]:
    import torch

    torch.ops.load_library(str(library(peers)))
    prefill = torch.ops._flashmla_C.sparse_prefill_fwd
    query, keys = torch.from_dlpack(q), torch.from_dlpack(rows).view(-1, 1, RANK + ROPE)
    index = torch.from_dlpack(indices).view(TOKENS, 1, TOPK)

    def call() -> None:
        prefill(query, keys, index, SCALE, RANK, None, None, None)
        torch.cuda.synchronize()

    return call
