"""Selection in Triton: scores of a chunk of keys into a workspace, then the best of each row.

    ranks    scores as integers of the same order, tensor cores        [rows, columns]
    best_of  the best of up to 8,192 candidates, all in registers      [rows, parts, k]

Few rows have all of their columns in one chunk: parts of a row are taken side by side, then lists
of parts are joined until one is left. Many rows have a chunk after the other, each taken together
with the best so far. A chunk has ``WORKSPACE`` elements, or one part for each row where these are
more, whatever the context's length. Ranks keep the order of scores exactly and places ascend, so
equal scores go to the lower position, and no chunk and no part changes a result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.registry import OneOf, Requirement, Within
from mla_jax.types import Array, Float, Int, cdiv, power_of_two, round_up

__all__ = ["DECODE", "PREFILL", "select", "select_decode", "select_prefill"]

DECODE = Requirement(
    sm=Within(low=89),  # products of e4m3
    features={
        "dtype+cache": OneOf("bfloat16+bf16", "float16+fp16", "float8_e4m3fn+index_key"),
        "dim": OneOf(64, 128),
        "queries": Within(high=8),
    },
    packages=("triton",),
)

PREFILL = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float8_e4m3fn"),
        "keys_dtype": OneOf("bfloat16", "float16"),
        "dim": OneOf(64, 128),
    },
    packages=("triton",),
)

WORKSPACE = 1 << 25
"""Elements of one chunk's ranks: 128 MiB."""

HEADS = 64
"""Of a product of scores."""

PAGED = 128, 4
"""Keys of a block, and blocks of a program, where keys lie in pages."""

GATHERED = 256, 32
"""Keys and queries of a program where keys are gathered."""

CANDIDATES = 8192
"""Of a program of ``best_of``, or four lists where these are more."""

STEP = 2048
"""Candidates that such a program stores at once."""

Lists = tuple[Array, Array]
"""Ranks and places, both ``[rows, lists * k]``."""

UNROLLED = 32
"""Chunks up to which the loop over them is none: each is launched, and ends at once behind the
longest row."""


def select_decode(
    q: Float[Array, "rows queries heads dim"],
    weights: Float[Array, "rows queries heads"],
    cache: LatentCache | RecordCache,
    page_table: Int[Array, "rows width"],
    lens: Int[Array, "rows queries"],
    *,
    k: int,
    layer: Int[Array, ""] | None = None,
) -> Int[Array, "rows queries {k}"]:
    """``xla.select_decode``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.indexer import kernels_triton as kernels

    rows, queries, heads, dim = q.shape
    width, records = page_table.shape[1], isinstance(cache, RecordCache)
    lens = jnp.clip(lens, 0, width * cache.page)
    number = jnp.zeros((), jnp.int32) if layer is None else layer

    def ranks(base: Array, columns: int) -> Array:
        return triton_lib.call(
            kernels.paged_ranks,
            q, weights, cache.pages, page_table, lens, number, base,
            out=jax.ShapeDtypeStruct((rows * queries, columns), jnp.int32),
            grid=rows * cdiv(columns, PAGED[0] * PAGED[1]),
            warps=4,
            stages=3,
            SIZES=(rows, queries, heads, dim, width, k),
            CACHE=(
                cache.layers or 1,
                cache.num_pages,
                cache.page,
                cache.pages.shape[-1] * (1 if records else cache.page),
            ),
            TILE=(PAGED[0], _heads(heads), PAGED[1], columns),
            RECORDS=records,
        )  # fmt: skip

    flat = lens.reshape(-1)
    chosen = select(ranks, jnp.zeros_like(flat), flat, width * cache.page, k=k)
    return chosen.reshape(rows, queries, k)


def select_prefill(
    q: Float[Array, "queries heads dim"],
    weights: Float[Array, "queries heads"],
    keys: Float[Array, "keys dim"],
    starts: Int[Array, "queries"],
    ends: Int[Array, "queries"],
    *,
    k: int,
    scales: Float[Array, "keys"] | None = None,
) -> Int[Array, "queries {k}"]:
    """``xla.select_prefill``."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.indexer import kernels_triton as kernels

    (queries, heads, dim), count = q.shape, keys.shape[0]
    starts, ends = (jnp.clip(x, 0, count) for x in (starts, ends))
    (step, some), scaled = GATHERED, scales is not None

    def ranks(base: Array, columns: int) -> Array:
        return triton_lib.call(
            kernels.gathered_ranks,
            q, weights, keys, scales if scaled else weights, starts, ends, base,
            out=jax.ShapeDtypeStruct((queries, columns), jnp.int32),
            grid=cdiv(queries, some) * cdiv(columns, step),
            warps=8,
            stages=3,
            SIZES=(queries, heads, dim, count, k),
            TILE=(step, _heads(heads), some, columns),
            SCALED=scaled,
        )  # fmt: skip

    return select(ranks, starts, ends, count, k=k)


def _heads(heads: int) -> int:
    """Of one product."""
    return min(HEADS, max(power_of_two(heads), 16))


def select(
    ranks: Callable[[Array, int], Array],
    starts: Int[Array, "rows"],
    ends: Int[Array, "rows"],
    longest: int,
    *,
    k: int,
) -> Int[Array, "rows {k}"]:
    """Places from ``starts`` on of the best; ``ranks(base, columns)`` is a chunk's workspace."""
    rows, at = starts.shape[0], jnp.arange(k, dtype=jnp.int32)
    if not rows or longest <= k:
        return jnp.where(at < (ends - starts)[:, None], at, -1)
    size = max(CANDIDATES, 4 * power_of_two(k))
    columns = max(WORKSPACE // rows // size, 1) * size
    whole, one = columns >= longest, columns == size
    if whole:
        columns = round_up(longest, GATHERED[0])
    elif one:
        columns -= round_up(k, 16)  # room for the best so far

    def chunk(i: Array | int, best: Lists | None) -> Lists:
        base = jnp.asarray(i, jnp.int32) * columns + jnp.zeros_like(starts, shape=())
        facts = {"bounds": (starts, ends, base), "k": k, "size": size}
        found = ranks(base, columns)
        if best is not None and one:
            return _best(best, found, **facts)
        lists = _best(None, found, **facts)
        if best is not None:
            lists = tuple(jnp.concatenate(pair, axis=1) for pair in zip(best, lists, strict=True))
        while lists[0].shape[1] > k:
            lists = _best(lists, None, **facts)
        return lists

    best, turns = chunk(0, None), cdiv(longest, columns)
    if turns <= UNROLLED:
        for i in range(1, turns):
            best = chunk(i, best)
    else:
        best = lax.fori_loop(1, cdiv(jnp.max(ends), columns), chunk, best)
    return best[1]


def _best(
    lists: Lists | None, chunk: Array | None, *, bounds: tuple[Array, ...], k: int, size: int
) -> Lists:
    """Lists of ``k``: of one list and a chunk, of parts of a chunk, or of a few lists each."""
    from mla_jax.pallas import triton_lib
    from mla_jax.pallas.topk import kernels_triton as kernels

    rows = bounds[0].shape[0]
    old = new = (0, 0)
    if chunk is not None:
        new = (min(size, chunk.shape[1]), chunk.shape[1])
    if lists is not None:
        entries = lists[0].shape[1]
        old = (k if chunk is not None else min(size // k * k, entries), entries)
    parts = cdiv(new[1], new[0]) if new[0] else cdiv(old[1], old[0])
    out = jax.ShapeDtypeStruct((rows, parts * k), jnp.int32)
    nothing = bounds[0]  # never read
    return triton_lib.call(
        kernels.best_of,
        *(lists or (nothing, nothing)), nothing if chunk is None else chunk, *bounds,
        out=(out, out),
        grid=rows * parts,
        warps=8,
        stages=2,
        aliases={0: 0, 1: 1} if lists is not None and chunk is not None else None,
        K=k,
        OLD=old,
        NEW=new,
        SIZE=power_of_two(old[0] + new[0]),
        STEP=STEP,
    )  # fmt: skip
