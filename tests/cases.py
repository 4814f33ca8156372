"""Inputs with the dimensions of real models and few tokens, and everything unused poisoned."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax.cache import FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.errors import UnsupportedError
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.types import cdiv

V3 = MLADims(heads=128, rank=512, nope=128, rope=64, v=128, q_rank=1536)
V2_LITE = MLADims(heads=16, rank=512, nope=128, rope=64, v=128, q_rank=None)
GLM = MLADims(heads=20, rank=512, nope=192, rope=64, v=256, q_rank=768)
TINY = MLADims(heads=3, rank=16, nope=8, rope=4, v=6, q_rank=None)

GARBAGE_PAGE = 2147480000
"""What unread entries of a page table hold."""


def starts(lens) -> np.ndarray:
    """Exclusive sum, int32, one longer than ``lens``."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def run(op, *args, backend, **kwargs):
    """Call a jitted operation; skip with the registry's reason where the backend refuses it."""
    try:
        return _jitted(op, ("backend", *kwargs))(*args, backend=backend, **kwargs)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


@functools.cache
def _jitted(op, static):
    return jax.jit(op, static_argnames=static)


def draw(rng, *shape, dtype="float32", std=1.0):
    """Normal numbers already rounded to ``dtype``."""
    x = rng.normal(size=shape) * std
    return x.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def paged(rng, lens, *, dims, page, format="bf16", scale=1.0, spare=3, width=None):
    """``(cache, page_table, rows)``: sequences of these lengths over shuffled pages.

    ``rows[r]`` is what the cache stores of request ``r``, as float64 ``[len, row]``. Every row
    and page that belongs to no position is NaN, every table entry behind a length is garbage.
    """
    fmt = FORMATS[format]
    stored = np.dtype(getattr(ml_dtypes, fmt.dtype, fmt.dtype))
    need = [cdiv(int(n), page) for n in lens]
    width = width or max([1, *need])
    ids = rng.permutation(sum(need) + spare)
    pages = np.full((len(ids), page, dims.row), np.nan).astype(stored)
    table = np.full((len(lens), width), GARBAGE_PAGE, np.int32)
    rows, used = [], 0
    for r, n in enumerate(lens):
        table[r, : need[r]] = ids[used : used + need[r]]
        used += need[r]
        x = (draw(rng, n, dims.row) / scale).astype(stored)
        for p in range(n):
            pages[table[r, p // page], p % page] = x[p]
        rows.append(x.astype(np.float64) * (np.float32(scale) if fmt.quantised else 1))
    cache = LatentCache(
        pages=jnp.asarray(pages),
        scale=jnp.float32(scale),
        rank=dims.rank,
        format=fmt,
    )
    return cache, jnp.asarray(table), rows


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Arguments of ``mla_decode``, and per request the numpy view of them."""

    args: tuple  # q_latent, q_rope, cache, meta
    scale: float
    dtype: str
    parts: list  # per request: q [n, heads, row], k [m, row], seen [n, m]
    dims: MLADims


def decode_case(
    rng, *, dims=TINY, seq_lens, query_lens=None, page=4, format="bf16", dtype="bfloat16",
    cache_scale=1.0, pad_tokens=2, pad_requests=1, max_query_len=None,
) -> Decode:  # fmt: skip
    """Ragged queries over poisoned pages, with padded tokens (NaN) and padded requests."""
    query_lens = [1] * len(seq_lens) if query_lens is None else list(query_lens)
    seq_lens, query_lens = [*seq_lens, *[0] * pad_requests], [*query_lens, *[0] * pad_requests]
    cache, table, rows = paged(
        rng, seq_lens, dims=dims, page=page, format=format, scale=cache_scale
    )
    qs = starts(query_lens)
    q = draw(rng, qs[-1] + pad_tokens, dims.heads, dims.row, dtype=dtype)
    q[qs[-1] :] = np.nan
    parts = []
    for r, (n, m) in enumerate(zip(query_lens, seq_lens, strict=True)):
        seen = np.arange(m) < m - (n - 1 - np.arange(n))[:, None]
        parts.append((q[qs[r] : qs[r + 1]], rows[r], seen))
    meta = DecodeMetadata(
        max_query_len=max_query_len or max([1, *query_lens]),
        page_table=table,
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        query_starts=jnp.asarray(qs),
    )
    q = jnp.asarray(q)
    args = (q[..., : dims.rank], q[..., dims.rank :], cache, meta)
    return Decode(args=args, scale=dims.qk**-0.5, dtype=dtype, parts=parts, dims=dims)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Arguments of ``mla_prefill``, and per request the numpy view of them."""

    args: tuple  # q, kv, k_rope, meta
    scale: float
    dtype: str
    parts: list  # per request: q [n, heads, qk], k [m, heads, qk], v [m, heads, v], seen [n, m]
    dims: MLADims


def steep(case: Decode | Prefill, factor: float) -> Decode | Prefill:
    """Scores further apart: maxima rise by more and by less than a maximum may lag."""
    return replace(case, scale=factor * case.scale)


def prefill_case(
    rng, *, dims=TINY, query_lens, key_lens=None, causal=True, dtype="bfloat16", pad=3
) -> Prefill:
    """Ragged queries and keys with ``pad`` rows of NaN behind each."""
    key_lens = query_lens if key_lens is None else key_lens
    qs, ks = starts(query_lens), starts(key_lens)
    q = draw(rng, qs[-1] + pad, dims.heads, dims.qk, dtype=dtype)
    kv = draw(rng, ks[-1] + pad, dims.heads, dims.nope + dims.v, dtype=dtype)
    k_rope = draw(rng, ks[-1] + pad, dims.rope, dtype=dtype)
    q[qs[-1] :], kv[ks[-1] :], k_rope[ks[-1] :] = np.nan, np.nan, np.nan
    parts = []
    for r, (n, m) in enumerate(zip(query_lens, key_lens, strict=True)):
        at = slice(ks[r], ks[r + 1])
        shared = np.broadcast_to(k_rope[at][:, None], (m, dims.heads, dims.rope))
        k = np.concatenate([kv[at][..., : dims.nope], shared], axis=-1)
        seen = np.arange(m) - m <= (np.arange(n) - n)[:, None] if causal else np.ones((n, m), bool)
        parts.append((q[qs[r] : qs[r + 1]], k, kv[at][..., dims.nope :], seen))
    meta = PrefillMetadata(query_starts=jnp.asarray(qs), key_starts=jnp.asarray(ks))
    args = (*map(jnp.asarray, (q, kv, k_rope)), meta)
    return Prefill(args=args, scale=dims.qk**-0.5, dtype=dtype, parts=parts, dims=dims)


def stacked(cache: LatentCache, layer: int, layers: int = 3) -> LatentCache:
    """A cache as one layer of a stack; every other layer, and its scale, is NaN."""

    def among(x):
        return jnp.full((layers, *x.shape), jnp.nan, x.dtype).at[layer].set(x)

    return replace(cache, pages=among(cache.pages), scale=among(cache.scale))
