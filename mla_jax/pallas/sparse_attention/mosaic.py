"""Backend ``mosaic`` of sparse decode and prefill: division of the work, kernel, merge."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas import tuning as tuning_table
from mla_jax.pallas.axes import RowQueries
from mla_jax.pallas.dense_decode import combine_sm90
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.pallas.sparse_attention import line_plan, mosaic_sm90, rows_sm90
from mla_jax.types import Array, AttnState, Float, Int, cdiv, round_up

__all__ = ["Tuning", "sparse_decode", "sparse_prefill", "tune"]

type Scopes = tuple[tuple[LatentCache | RecordCache, Int[Array, "tokens _"], Array | None], ...]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What may change the speed, and only through the cuts the bits, of a result."""

    early_launch: bool  # the merge is launched while the main kernel ends
    workers: int  # thread blocks in all: as many as there are multiprocessors

    def __post_init__(self):
        tuning_table.at_least_one("mla_sparse_decode", workers=self.workers)


def tune(problem: Problem, device: DeviceInfo) -> Tuned:
    """One thread block for each multiprocessor. Nothing was measured."""
    del problem
    value = Tuning(early_launch=True, workers=device.sms)
    return Tuned(value=value, source=f"heuristic: nothing was measured on {device.kind}")


def sparse_decode(
    q: RowQueries, scopes: Scopes, *, scale: float, value: int, out_dtype: DTypeLike,
    tuning: Tuning, sinks: Float[Array, "heads"] | None = None, interpret: object = None,
) -> AttnState:  # fmt: skip
    """``xla.sparse_decode`` at the dtype of the queries, accumulating in float32.

    Keys of records are rounded to that dtype, and so are weights of values. ``interpret`` runs on
    a CPU.
    """
    del out_dtype, value  # that of the queries; all that the kernel knows
    kept = [scope for scope in scopes if scope[1].shape[1]]
    found = [_scope(cache, slots.shape[1]) for cache, slots, _ in kept]
    return _attend(
        q,
        tuple(slots for _, slots, _ in kept),
        tuple(pages for pages, _ in found),
        tuple(scope for _, scope in found),
        tuple(layer for *_, layer in kept),
        scale=scale,
        tuning=tuning,
        sinks=sinks,
        interpret=interpret,
    )


def sparse_prefill(
    q: RowQueries, rows: Float[Array, "rows row"], indices: Int[Array, "tokens keys"], *,
    scale: float, value: int, out_dtype: DTypeLike, tuning: Tuning,
    sinks: Float[Array, "heads"] | None = None, interpret: object = None,
) -> AttnState:  # fmt: skip
    """``xla.sparse_prefill`` likewise: gathered rows are a cache with one row in a page."""
    del out_dtype, value
    count, width = rows.shape
    scope = rows_sm90.Scope(
        format=f"{rows.dtype}",
        page=1,
        page_bytes=width * rows.dtype.itemsize,
        pages=count,
        layers=0,
        width=width,
        keys=indices.shape[1],
    )
    there = bool(count and scope.keys)
    return _attend(
        q,
        (indices,) if there else (),
        (rows,) if there else (),
        (scope,) if there else (),
        (None,),
        scale=scale,
        tuning=tuning,
        sinks=sinks,
        interpret=interpret,
    )


def _scope(cache: LatentCache | RecordCache, keys: int) -> tuple[Array, rows_sm90.Scope]:
    """The cache as the kernel sees it, all layers in one, and where its rows lie."""
    if isinstance(cache, RecordCache):
        pages, width = cache.pages, cache.format.row
        page_bytes = cache.format.page_bytes(cache.page)
    else:
        width = cache.pages.shape[-1]
        pages, page_bytes = cache.pages, cache.page * width * cache.format.itemsize
    scope = rows_sm90.Scope(
        format=cache.format.name,
        page=cache.page,
        page_bytes=page_bytes,
        pages=cache.num_pages,
        layers=cache.layers or 0,
        width=width,
        keys=keys,
    )
    return pages.reshape(-1, pages.shape[-1]), scope


def _attend(
    q: RowQueries, lists: tuple[Int[Array, "tokens _"], ...], pages: tuple[Array, ...],
    scopes: tuple[rows_sm90.Scope, ...], layers: tuple[Array | None, ...], *, scale: float,
    tuning: Tuning, sinks: Float[Array, "heads"] | None, interpret: object,
) -> AttnState:  # fmt: skip
    """Divide the work, run the kernel, merge what was split."""
    tokens, heads, width = q.shape
    if not (tokens and scopes):
        return AttnState(
            out=jnp.zeros((tokens, heads, mosaic_sm90.VALUE), q.dtype),
            lse=jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        )
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = q * jnp.asarray(jnp.sign(scale), q.dtype), abs(scale) or 1.0
    padded = round_up(heads, 8)
    workers = max(tuning.workers // cdiv(padded, mosaic_sm90.ROWS), 1)
    blocks = sum(scope.blocks for scope in scopes)
    line = line_plan.divide(tokens, blocks, workers=workers, heads=padded)
    early_launch = tuning.early_launch and interpret is None and line.split
    if sinks is not None:
        more = round_up(padded, mosaic_sm90.ROWS) - heads
        sinks = jnp.pad(sinks.astype(jnp.float32), (0, more))
    ends = (0, mosaic_sm90.VALUE, width)[: 2 + (width > mosaic_sm90.VALUE)]
    queries = tuple(  # as they were before ``ops`` joined them: slices first, and XLA sees that
        jnp.pad(q[..., a:b], ((0, 0), (0, padded - heads), (0, 0))).reshape(tokens * padded, b - a)
        for a, b in itertools.pairwise(ends)
    )
    out, lse, part, part_lse = mosaic_sm90.attend(
        queries,
        tuple(x.reshape(1) for x in layers if x is not None),
        (jnp.asarray(line.first_slots()),) if line.split else (),
        lists,
        pages,
        () if sinks is None else (sinks,),
        scopes=scopes,
        line=line,
        heads=padded,
        scale=scale,
        early_launch=early_launch,
        interpret=interpret,
    )
    if line.split:
        out, lse = combine_sm90.combine(
            out,
            lse,
            part.reshape(*part_lse.shape, mosaic_sm90.VALUE),
            part_lse,
            jnp.asarray(line.merges()),
            sinks,
            heads=padded,
            multiprocessors=tuning.workers,
            early_launch=early_launch,
            interpret=interpret,
        )
    return AttnState(
        out=out.reshape(tokens, padded, -1)[:, :heads], lse=lse.reshape(tokens, padded)[:, :heads]
    )
