"""V4's decode beside FlashMLA's, on the same arrays: a window, and rows of a second cache."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.flashmla import library
from benchmarks.sparse_decode import CHECKED, CLOCK, drawn_cache, floor_us, measured
from mla_jax.cache import SparseScope
from mla_jax.ops import mla_sparse_decode
from mla_jax.pallas.sparse_attention import xla

__all__ = ["CASES", "METHOD", "Case", "run"]

NOPE, ROPE, ROW = 448, 64, 512
WINDOW, PAGE, RECORD = 128, 64, 584
SCALE = ROW**-0.5
COMPRESSED = 16384  # rows of a request
METHOD = (
    f"584-byte records; each token {WINDOW} slots of the window cache, pages of {PAGE}, and "
    "distinct slots of a second cache, shuffled, among the pages of its own request; sinks; peer: "
    "FlashMLA's sparse decode with a second cache and sinks, planned once; " + CLOCK
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``requests`` with one token each."""

    requests: int
    heads: int
    extra: int  # rows of the second cache
    page: int  # of the second cache

    @property
    def name(self) -> str:
        return f"b{self.requests}_h{self.heads}_{WINDOW}+{self.extra}_page{self.page}"


CASES = tuple(
    Case(requests=b, heads=h, extra=extra, page=page)
    for b in (128, 32, 1)
    for h in (64, 128)
    for extra in (512, 1024)
    for page in (64, 2)
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases; compiles outside of ``turn``, measures inside."""
    for case in (c for c in CASES if c.name in chosen):
        q, caches, lists, sinks = _drawn(case)

        def ours(q, caches, lists, sinks):
            extra = SparseScope(cache=caches[1], slots=lists[1], lengths=None, layer=None)
            return mla_sparse_decode(
                q[..., :NOPE], q[..., NOPE:], caches[0], lists[0],
                scale=SCALE, extra=extra, sinks=sinks, value=ROW, backend="mosaic",
            )  # fmt: skip

        some = slice(0, CHECKED)
        scopes = tuple((c, at[some], None) for c, at in zip(caches, lists, strict=True))
        facts = {"scale": SCALE, "value": ROW, "out_dtype": jnp.float32, "sinks": sinks}
        want = xla.sparse_decode(q[some], scopes, **facts).out
        peer = functools.partial(_flashmla, peers, case, q, caches, lists, sinks) if peers else None
        keys = case.requests * (WINDOW + case.extra)
        yield {
            "case": case.name,
            "floor_us": floor_us(keys, RECORD, case.heads, 2 * ROW),
        } | measured(case.name, {"mosaic": ours}, (q, caches, lists, sinks), want, peer, turn)


def _drawn(case: Case):
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    pages = case.requests * WINDOW // PAGE, case.requests * COMPRESSED // case.page
    caches = tuple(
        drawn_cache("v4", n, page, (NOPE, ROPE), key)
        for n, page, key in zip(pages, (PAGE, case.page), keys[:2], strict=True)
    )
    first = np.arange(case.requests)[:, None]
    window = first * WINDOW + np.arange(WINDOW)
    chosen = [rng.permutation(COMPRESSED)[: case.extra] for _ in range(case.requests)]
    lists = window, first * COMPRESSED + np.stack(chosen)
    q = jax.random.normal(keys[2], (case.requests, case.heads, ROW), jnp.bfloat16)
    sinks = jax.random.normal(keys[3], (case.heads,), jnp.float32)
    return q, caches, tuple(jnp.asarray(x, jnp.int32) for x in lists), sinks


def _flashmla(peers: Path, case: Case, q, caches, lists, sinks) -> Callable[[], None]:
    import torch

    torch.ops.load_library(str(library(peers)))
    decode = torch.ops._flashmla_C.sparse_decode_fwd
    query = torch.from_dlpack(q).view(case.requests, 1, case.heads, ROW)

    def paged(cache):
        pages = torch.from_dlpack(cache.pages)
        shape = cache.num_pages, cache.page, 1, RECORD
        return pages.as_strided(shape, (pages.stride(0), RECORD, RECORD, 1))

    (window, extra), (near, far) = (
        map(paged, caches),
        (torch.from_dlpack(x).view(case.requests, 1, -1) for x in lists),
    )
    sink, more = torch.from_dlpack(sinks), (extra, far, None)
    _, _, *plan = decode(
        query, window, near, None, sink, None, None, *more, ROW, SCALE, None, False
    )

    def call() -> None:
        decode(query, window, near, None, sink, *plan, *more, ROW, SCALE, None, False)
        torch.cuda.synchronize()

    return call
