"""Sparse attention on every device: the rows of a few tokens at a time are gathered.

The workspace is that of ``WORKSPACE`` gathered elements, or of one token's rows where these are
more, whatever the number of tokens.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.axes import RowQueries
from mla_jax.pallas.cache_io.records import gather_rows
from mla_jax.pallas.merge.ref import apply_sinks
from mla_jax.pallas.sparse_attention.ref import attend
from mla_jax.types import Array, AttnState, Bool, Float, Int, cdiv

__all__ = ["WORKSPACE", "sparse_decode", "sparse_prefill", "with_sinks"]

WORKSPACE = 1 << 24
"""Float32 elements of gathered rows: 64 MiB."""


def sparse_decode(
    q: RowQueries,
    scopes: tuple[tuple[LatentCache | RecordCache, Int[Array, "tokens _"], Array | None], ...], *,
    scale: float, value: int, out_dtype: DTypeLike, sinks: Float[Array, "heads"] | None = None,
) -> AttnState:  # fmt: skip
    """``ref.attend`` over the slots of every scope, ``(cache, slots, layer)``, in one softmax.

    A slot outside of its cache is no row. ``sinks`` as in ``merge.ref.apply_sinks``.
    """

    def read(slots: tuple[Array, ...]) -> tuple[Array, Array]:
        parts = [
            gather_rows(cache, at, dtype=jnp.float32, layer=layer)
            for (cache, _, layer), at in zip(scopes, slots, strict=True)
        ]
        inside = [
            (at >= 0) & (at < cache.num_slots)
            for (cache, *_), at in zip(scopes, slots, strict=True)
        ]
        return jnp.concatenate(parts, axis=-2), jnp.concatenate(inside, axis=-1)

    slots = tuple(slots for _, slots, _ in scopes)
    state = _attend(q, slots, read, scale=scale, value=value, out_dtype=out_dtype)
    return with_sinks(state, sinks)


def sparse_prefill(
    q: RowQueries, rows: Float[Array, "rows row"], indices: Int[Array, "tokens keys"], *,
    scale: float, value: int, out_dtype: DTypeLike, sinks: Float[Array, "heads"] | None = None,
) -> AttnState:  # fmt: skip
    """``ref.attend`` over gathered rows; an index outside of them is none."""
    count = rows.shape[0]
    indices = indices if count else indices[:, :0]  # nothing to read

    def read(indices: tuple[Array, ...]) -> tuple[Array, Array]:
        (at,) = indices
        inside = (at >= 0) & (at < count)
        found = rows.at[jnp.where(inside, at, count)].get(mode="fill", fill_value=0)
        return found, inside

    state = _attend(q, (indices,), read, scale=scale, value=value, out_dtype=out_dtype)
    return with_sinks(state, sinks)


def with_sinks(state: AttnState, sinks: Float[Array, "heads"] | None) -> AttnState:
    """``apply_sinks``, if there are any."""
    return state if sinks is None else apply_sinks(state, sinks)


def _attend(
    q: RowQueries, indices: tuple[Int[Array, "tokens _"], ...],
    read: Callable[[tuple[Array, ...]], tuple[Float[Array, "_ _ _"], Bool[Array, "_ _"]]], *,
    scale: float, value: int, out_dtype: DTypeLike,
) -> AttnState:  # fmt: skip
    """A few tokens at a time, whose rows ``read`` gives."""
    tokens, heads, row = q.shape
    keys = sum(at.shape[1] for at in indices)
    if not (tokens and keys):
        lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        return AttnState(out=jnp.zeros((tokens, heads, value), out_dtype), lse=lse)
    each = min(max(WORKSPACE // (keys * row), 1), tokens)

    def some(given: tuple[Array, tuple[Array, ...]]) -> AttnState:
        q, indices = given
        rows, seen = read(indices)
        state = attend(q, rows, seen, scale=scale, value=value)
        return AttnState(out=state.out.astype(out_dtype), lse=state.lse)

    if each == tokens:
        return some((q, indices))
    turns = cdiv(tokens, each)
    short = turns * each - tokens

    def cut(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, short), *[(0, 0)] * (x.ndim - 1)), constant_values=fill)
        return x.reshape(turns, each, *x.shape[1:])

    found = lax.map(some, (cut(q, 0), tuple(cut(at, -1) for at in indices)))
    out, lse = (x.reshape(turns * each, *x.shape[2:])[:tokens] for x in (found.out, found.lse))
    return AttnState(out=out, lse=lse)
