"""Prefill over cached context: expand the keys of every head, or stay in the latent?

With ``n`` new tokens on ``c`` cached ones, ``a = n c + n (n + 1) / 2`` unmasked pairs, and ``H``
heads, the two paths of ``model.mla`` cost::

    expanded   2 H (r (nope + v) (n + c) + (nope + rope + v) a)     up-projects all keys again
    absorbed   2 H (r (nope + v) n       + (2 r + rope) a)          reads the cache as it is

so the absorbed one wins for few queries on long contexts: below some 170 of them at equal rates.
The kernel of the expanded path takes whole tiles of queries, one at a time on a multiprocessor, so
few queries of few heads take as long as many (``tiled_flops``).
The rates are measured per kind of GPU (``python -m benchmarks.crossover``) and packaged; a device
without a record keeps to the expanded path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.cache import CacheFormat
from mla_jax.config import MLADims
from mla_jax.errors import UnsupportedError
from mla_jax.pallas.dense_prefill.tile_plan import ROWS
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem
from mla_jax.pallas.tuning import packaged
from mla_jax.types import cdiv

__all__ = ["PathRate", "PrefillCrossover", "absorbed_flops", "expanded_flops", "tiled_flops"]


def expanded_flops(
    dims: MLADims, queries: Sequence[int], contexts: Sequence[int]
) -> tuple[float, float]:
    """FLOPs of the up-projection, and of attention, over all requests."""
    keys = sum(queries) + sum(contexts)
    up = 2.0 * dims.heads * dims.rank * (dims.nope + dims.v) * keys
    return up, 2.0 * dims.heads * (dims.qk + dims.v) * _pairs(queries, contexts)


def tiled_flops(
    dims: MLADims, queries: Sequence[int], contexts: Sequence[int], *, multiprocessors: int
) -> float:
    """FLOPs of expanded attention with what idles: the busiest multiprocessor's share for all.

    A tile has 128 queries of a head and ends with the keys of its last one. Many tiles share out
    evenly; of few, the longest alone takes ``2 (nope + rope + v) 128 (c + n)``.
    """
    keys, longest = 0, 0
    for n, c in zip(queries, contexts, strict=True):
        whole, rest = divmod(n, ROWS)
        keys += whole * c + ROWS * whole * (whole + 1) // 2 + (c + n if rest else 0)
        longest = max(longest, c + n)
    busiest = max(dims.heads * keys, multiprocessors * longest)
    return 2.0 * (dims.qk + dims.v) * ROWS * busiest


def absorbed_flops(
    dims: MLADims, queries: Sequence[int], contexts: Sequence[int]
) -> tuple[float, float]:
    """FLOPs of absorbing queries and values, and of attention, over all requests."""
    absorb = 2.0 * dims.heads * dims.rank * (dims.nope + dims.v) * sum(queries)
    return absorb, 2.0 * dims.heads * (2 * dims.rank + dims.rope) * _pairs(queries, contexts)


def _pairs(queries: Sequence[int], contexts: Sequence[int]) -> float:
    both = zip(queries, contexts, strict=True)
    return sum(n * c + n * (n + 1) / 2 for n, c in both)


@dataclass(frozen=True, kw_only=True)
class PathRate:
    """``us = fixed_us + flops / tflops / 1e6`` of one layer."""

    tflops: float
    fixed_us: float

    def us(self, flops: float) -> float:
        return self.fixed_us + flops / self.tflops / 1e6


@dataclass(frozen=True, kw_only=True)
class PrefillCrossover:
    """What both paths take for a model on a device. Host arithmetic; no arrays."""

    dims: MLADims
    run: int  # queries of one run of the absorbed path
    multiprocessors: int
    expanded: PathRate  # attention (``tiled_flops``), merges and gathers
    absorbed: PathRate  # all of it
    projection_tflops: float
    measured: str  # device, versions, date, method

    @classmethod
    def of(cls, dims: MLADims, device: DeviceInfo) -> "PrefillCrossover | None":
        """From the packaged record with the nearest number of heads; None if there is none.

        Records hold for the widths of DeepSeek V2 to R1 only.
        """
        record = packaged("prefill_crossover", device.kind)
        if record is None or (dims.rank, dims.nope, dims.rope, dims.v) != (512, 128, 64, 128):
            return None
        rates = min(record["rates"], key=lambda r: abs(math.log(r["heads"] / dims.heads)))
        return cls(
            dims=dims,
            run=rates["run"],
            multiprocessors=record["multiprocessors"],
            expanded=PathRate(**rates["expanded"]),
            absorbed=PathRate(**rates["absorbed"]),
            projection_tflops=rates["projection_tflops"],
            measured=f"{record['device']}, {rates['heads']} heads; {record['measured']}",
        )

    @classmethod
    def for_cache(
        cls,
        dims: MLADims,
        *,
        dtype: DTypeLike,
        format: CacheFormat,
        page: int,
        backend: str | None = None,
    ) -> "PrefillCrossover | None":
        """For the current device; None also where a kernel does not take the runs.

        The reference decodes a run at a fraction of the measured rate, so it is never chosen.
        """
        device = DeviceInfo.current()
        found = cls.of(dims, device)
        if found is None:
            return None
        name = jnp.dtype(dtype).name
        problem = Problem.of(
            "mla_decode",
            dtype=name,
            out=name,
            heads=dims.heads,
            cache=format.name,
            rank=dims.rank,
            rope=dims.rope,
            page=page,
            max_query_len=found.run,
        )
        try:
            chosen = ops.REGISTRY.choose(problem, device, backend)
        except UnsupportedError:
            return None
        return None if chosen.name == "xla" else found

    def expanded_us(self, queries: Sequence[int], contexts: Sequence[int]) -> float:
        """Up-projection and attention of one layer, microseconds."""
        up, _ = expanded_flops(self.dims, queries, contexts)
        attention = tiled_flops(self.dims, queries, contexts, multiprocessors=self.multiprocessors)
        return up / self.projection_tflops / 1e6 + self.expanded.us(attention)

    def absorbed_us(self, queries: Sequence[int], contexts: Sequence[int]) -> float:
        """Attention over pages of one layer, microseconds."""
        return self.absorbed.us(sum(absorbed_flops(self.dims, queries, contexts)))

    def absorb(self, queries: Sequence[int], contexts: Sequence[int]) -> int:
        """The run length if a step's prefills are faster over their pages, else 0."""
        if not any(contexts):
            return 0
        faster = self.absorbed_us(queries, contexts) < self.expanded_us(queries, contexts)
        return self.run if faster else 0

    def most_queries(self, context: int) -> int:
        """The largest number of queries of one request that is absorbed on such a context."""
        low, high = 0, 1
        while self.absorb([high], [context]):
            low, high = high, 2 * high
        while high - low > 1:
            middle = cdiv(low + high, 2)
            low, high = (middle, high) if self.absorb([middle], [context]) else (low, middle)
        return low

    def explain(self, queries: Sequence[int], contexts: Sequence[int]) -> str:
        """Both times, the choice, where the crossover lies, and where the rates come from."""
        run = self.absorb(queries, contexts)
        longest = max(contexts, default=0)
        chosen = f"absorbed, runs of {run}" if run else "expanded"
        return "\n".join(
            [
                f"prefill of {sum(queries)} tokens on {sum(contexts)} cached ones, "
                f"{self.dims.heads} heads, per layer",
                f"  expanded: {self.expanded_us(queries, contexts):.0f} us",
                f"  absorbed: {self.absorbed_us(queries, contexts):.0f} us",
                f"runs {chosen}; one request on {longest} cached tokens is absorbed up to "
                f"{self.most_queries(longest)} queries",
                f"rates: {self.measured}",
            ]
        )
