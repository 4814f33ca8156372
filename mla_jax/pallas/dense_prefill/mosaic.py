"""Backend ``mosaic`` of dense prefill: schedule, kernel, layout.

The kernel is imported where it runs: Mosaic GPU takes more than a second to import.
"""

from dataclasses import asdict, dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.pallas.dense_prefill import schedule as sc
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, AttnState, Float, Int, cdiv

__all__ = ["REQUIREMENT", "Tuning", "dense_prefill", "heuristic", "make_schedule"]

REQUIREMENT = Requirement(
    sm=OneOf(90),
    features={
        "dtype+out": OneOf(
            "bfloat16+bfloat16", "bfloat16+float32", "float16+float16", "float16+float32"
        ),
        "nope": Within(low=64, high=192, multiple=64),
        "rope": OneOf(64),
        "v": Within(low=64, high=256, multiple=64),
    },
)

MULTIPROCESSORS = 132
"""Of an H100 SXM or H200: one thread block each."""

L2 = 10 << 20
"""Bytes of keys and values that tiles may share in the L2 cache, which has two halves of 25 MB."""

SHARED = 226 << 10
"""Bytes of shared memory for queries, keys and values; barriers and facts have the rest."""

REGISTERS = 176
"""Of the 240 of a thread for sums, scores and weights; the rest is for queries and scalars."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What may change the speed of a result; ``block`` and ``held`` also change its rounding."""

    heads_together: int  # heads whose tiles run side by side
    heads_last: int = 1  # of the last ones, as many at least
    block: int  # keys of one step
    held: int = 0  # chunks of 64 columns of the queries that stay in registers
    stages: int = 2  # blocks in shared memory
    dynamic: bool = True  # a thread block takes its next tile when it is free
    workers: int = MULTIPROCESSORS  # thread blocks

    def __post_init__(self):
        assert self.block % 64 == 0, "products need multiples of 64 keys"
        least = min(self.heads_together, self.heads_last, self.stages, self.workers)
        assert least >= 1, "at least one"
        assert self.stages in (1, 2, 4), "stages are a power of two; hardware barriers allow four"


def heuristic(
    tokens: int, keys: int, heads: int, *, requests: int, nope: int, rope: int, v: int,
    causal: bool,
) -> Tuning:  # fmt: skip
    """As many heads side by side as have their keys in the L2 cache; as many keys as fit.

    Where tiles differ, heads that run at the same time anyway are together, and the last ones are
    more, up to three tiles for each thread block or twice those keys: a thread block is late that
    begins a dear tile in the end. Where one request sees all keys, tiles are equal, and nothing
    needs to be drawn.

    Queries in registers relieve shared memory. They and the hardware barriers that come with
    them are faster in blocks of 64 keys and where all keys are seen, but slower in causal blocks
    of 128: that is measured only.
    """
    equal = not causal and requests == 1
    size = 2 * (nope + v) * keys  # bytes of a head
    tiles, together, last = cdiv(tokens, sc.ROWS), L2 // size, 1
    if not equal:
        together = max(together, MULTIPROCESSORS // tiles)
        last = min(cdiv(3 * MULTIPROCESSORS, tiles), max(2 * L2 // size, together, 1))
    block = next(n for n in (128, 64) if _fits(n, nope + rope, v))
    return Tuning(
        heads_together=min(max(together, 1), heads), heads_last=min(last, heads), block=block,
        held=0 if causal and block == 128 else min(2, (nope + rope) // 64 - 1),
        dynamic=not equal,
    )  # fmt: skip


def _fits(block: int, qk: int, v: int, stages: int = 2) -> bool:
    """Whether blocks of so many keys fit into shared memory, and their products into registers."""
    shared = 2 * (sc.ROWS * qk + stages * block * (qk + v))
    registers = v // 2 + block // 2 + block // 4  # sums, scores, weights of half a row
    return shared <= SHARED and registers <= REGISTERS


def make_schedule(
    query_starts: Int[Array, "starts"],
    key_starts: Int[Array, "starts"],
    *,
    tokens: int,
    keys: int,
    causal: bool,
    tuning: Tuning,
) -> sc.Schedule:
    """The tiles of one step; the same for all layers."""
    return sc.tiles(
        query_starts, key_starts, tokens=tokens, keys=keys,
        block=tuning.block, causal=causal,
    )  # fmt: skip


def dense_prefill(
    q: Float[Array, "tokens heads qk"],
    kv: Float[Array, "keys heads nope_v"],
    k_rope: Float[Array, "keys rope"],
    query_starts: Int[Array, "starts"],
    key_starts: Int[Array, "starts"],
    *,
    scale: float,
    causal: bool,
    out_dtype: DTypeLike,
    tuning: Tuning | None = None,
    schedule: sc.Schedule | None = None,
    interpret: object = None,
) -> AttnState:
    """``ref.dense_prefill`` at the dtype of the queries, accumulating in float32.

    The weights of the values are rounded to that dtype. A value that is not finite spoils the
    queries of its request that share a tile with one that sees it. ``schedule`` is
    ``make_schedule`` of the same lengths and tuning, if it is at hand; ``interpret`` runs on a
    CPU.
    """
    from mla_jax.pallas.dense_prefill import buffers_sm90, mosaic_sm90

    tokens, heads, qk = q.shape
    keys, _, nope_v = kv.shape
    nope = qk - k_rope.shape[1]
    v = nope_v - nope
    if not (tokens and keys and query_starts.shape[0] > 1):
        return AttnState(
            out=jnp.zeros((tokens, heads, v), out_dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    tuning = tuning or heuristic(
        tokens, keys, heads, requests=query_starts.shape[0] - 1,
        nope=nope, rope=k_rope.shape[1], v=v, causal=causal,
    )  # fmt: skip
    if schedule is None:
        schedule = make_schedule(
            query_starts, key_starts, tokens=tokens, keys=keys, causal=causal, tuning=tuning
        )
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = q * jnp.asarray(jnp.sign(scale), q.dtype), abs(scale) or 1.0
    out, lse = mosaic_sm90.attend(
        _rows(q, sc.ROWS),
        _rows(kv, tuning.block),
        _rows(k_rope, tuning.block),
        schedule,
        sizes=buffers_sm90.Sizes(nope=nope, rope=k_rope.shape[1], v=v, **asdict(tuning)),
        scale=scale,
        causal=causal,
        out_dtype=out_dtype,
        interpret=interpret,
    )  # fmt: skip
    return AttnState(out=out[:tokens], lse=lse[:tokens])


def _rows(x: Float[Array, "rows *rest"], least: int) -> Float[Array, "more *rest"]:
    """At least one tile of rows: a copy has a static size."""
    return jnp.pad(x, ((0, max(least - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))
