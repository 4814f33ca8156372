"""What ``mla-jax explain`` prints: which backend runs an operation, and why not the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax import ops
from mla_jax.cache import ELEMENT_FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.model.prefill_crossover import PrefillCrossover
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import cdiv

__all__ = ["EXPLAINED", "Problem"]

type _Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CROSSOVER = "prefill_crossover"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes that an operation is asked about."""

    dims: MLADims
    requests: int
    tokens: int  # query tokens
    keys: int  # key tokens of a prefill
    page: int
    pages: int  # page-table width
    dtype: str
    cache_dtype: str  # a key of ELEMENT_FORMATS
    causal: bool

    def explain(self, op: str, *, backend: str | None = None) -> str:
        """Which backend would run ``op`` on this device.

        Raises:
            ArgumentError: an operation that is not of ``EXPLAINED``, or no backend of it.
        """
        if op == _CROSSOVER:
            return self._crossover()
        if op not in _ARGUMENTS:
            hint = "From Python, mla_jax.explain takes the arguments of any operation."
            raise ArgumentError("explain", op, ", ".join(EXPLAINED), hint)
        named = {b.name for b in ops.REGISTRY.backends if b.op == op}
        if backend is not None and backend not in named:
            raise ArgumentError("--backend", backend, f"of {op}: {', '.join(sorted(named))}")
        args, more = _ARGUMENTS[op](self)
        return ops.explain(op, *args, backend=backend, **more)

    def _crossover(self) -> str:
        device = DeviceInfo.current()
        found = PrefillCrossover.of(self.dims, device)
        if found is None:
            rates = f"no measured rates for {device.kind} and these widths"
            return f"{rates}: every prefill is expanded"
        return found.explain([self.tokens], [self.keys])

    def shape(self, *sizes: int, of: str | None = None) -> Any:
        """Sizes and dtype of an array, without memory; ``of``: another dtype than ``dtype``."""
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(of or self.dtype))

    def ints(self, *sizes: int) -> Any:
        """Sizes of an array of int32, without memory."""
        return self.shape(*sizes, of="int32")

    @property
    def cache(self) -> LatentCache:
        """Two pages."""
        form = ELEMENT_FORMATS[self.cache_dtype]
        width = self.dims.rank + self.dims.rope
        pages = self.shape(2, self.page, width, of=form.dtype)
        scale = self.shape(of="float32")
        return LatentCache(pages=pages, scale=scale, rank=self.dims.rank, format=form)

    @property
    def starts(self) -> Any:
        """Where each request begins."""
        return self.ints(self.requests + 1)

    @property
    def state(self) -> ops.AttnState:
        """Results of all tokens."""
        heads = self.dims.heads
        lse = self.shape(self.tokens, heads, of="float32")
        return ops.AttnState(out=self.shape(self.tokens, heads, self.dims.v), lse=lse)


def _write(p: Problem) -> _Arguments:
    latent, rope = p.shape(p.tokens, p.dims.rank), p.shape(p.tokens, p.dims.rope)
    return (p.cache, latent, rope, p.ints(p.tokens)), {}


def _gather(p: Problem) -> _Arguments:
    args = (p.cache, p.ints(p.requests, p.pages), p.ints(p.requests), p.starts)
    return args, {"rows": p.keys, "dtype": jnp.dtype(p.dtype)}


def _copy(p: Problem) -> _Arguments:
    return (p.cache, p.ints(p.pages, 2)), {}


def _swap(p: Problem) -> _Arguments:
    return (p.cache, p.cache, p.ints(p.pages, 2)), {}


def _decode(p: Problem) -> _Arguments:
    meta = DecodeMetadata(
        max_query_len=max(1, cdiv(p.tokens, max(p.requests, 1))),
        page_table=p.ints(p.requests, p.pages),
        seq_lens=p.ints(p.requests),
        query_starts=p.starts,
    )
    widths = (p.dims.rank, p.dims.rope)
    latent, rope = (p.shape(p.tokens, p.dims.heads, width) for width in widths)
    return (latent, rope, p.cache, meta), {"scale": 1.0}


def _prefill(p: Problem) -> _Arguments:
    d = p.dims
    args = (
        p.shape(p.tokens, d.heads, d.nope + d.rope),
        p.shape(p.keys, d.heads, d.nope + d.v),
        p.shape(p.keys, d.rope),
        PrefillMetadata(query_starts=p.starts, key_starts=p.starts),
    )
    return args, {"scale": 1.0, "causal": p.causal}


def _merge(p: Problem) -> _Arguments:
    return (p.state, p.state), {}


def _sinks(p: Problem) -> _Arguments:
    return (p.state, p.shape(p.dims.heads)), {}


_ARGUMENTS: dict[str, Callable[[Problem], _Arguments]] = {
    "mla_decode": _decode,
    "mla_prefill": _prefill,
    "merge_attn_states": _merge,
    "apply_sinks": _sinks,
    "write_latent": _write,
    "gather_latent": _gather,
    "copy_blocks": _copy,
    "swap_blocks": _swap,
}
EXPLAINED = (*_ARGUMENTS, _CROSSOVER)
