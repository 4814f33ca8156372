"""Backend ``mosaic`` of cache traffic: how it is tuned, the two kernels."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.errors import ArgumentError
from mla_jax.pallas.axes import CacheScale, Layer, Pages, PageTable, PerRequest, Slots, Starts
from mla_jax.pallas.cache_io import gather_sm90, write_sm90
from mla_jax.types import Array, Float

__all__ = ["WriteTuning", "gather_latent", "write_latent", "write_tuning"]


@dataclass(frozen=True, kw_only=True)
class WriteTuning:
    """What may change the speed of a write; no result depends on it."""

    tile: int  # tokens of a thread block, a multiple of 8

    def __post_init__(self):
        if self.tile < 8 or self.tile % 8:
            raise ArgumentError("write_latent: tile", self.tile, "multiples of 8, 8 or more")


def write_tuning(*, tokens: int, quantised: bool) -> WriteTuning:
    """Small tiles keep what is on its way close together; quantising many rows wants larger."""
    return WriteTuning(tile=16 if quantised and tokens > 2048 else 8)


def gather_latent(
    pages: Pages, scale: CacheScale, page_table: PageTable, first: PerRequest, row_starts: Starts,
    *, rows: int, dtype: DTypeLike, format: CacheFormat, layer: Layer = None,
    interpret: object = None,
) -> Float[Array, "{rows} row"]:  # fmt: skip
    """``ref.gather_latent``, bit for bit; ``interpret`` runs on a CPU."""
    del format  # dtypes say it all
    if not (rows and page_table.shape[0] and page_table.shape[1]):
        return jnp.zeros((rows, pages.shape[-1]), dtype)
    return gather_sm90.gather(
        pages,
        scale,
        page_table,
        first,
        row_starts,
        rows=rows,
        dtype=dtype,
        layer=layer,
        interpret=interpret,
    )


def write_latent(
    pages: Pages, scale: CacheScale, kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"], slots: Slots, *, format: CacheFormat, layer: Layer = None,
    tuning: WriteTuning | None = None, interpret: object = None,
) -> Pages:  # fmt: skip
    """``ref.write_latent``, bit for bit, in place; ``interpret`` runs on a CPU.

    Donate the cache to the jitted caller: the pages are then updated where they are, and
    nothing but the new rows moves. A caller that keeps the old cache gets a right result too,
    but XLA copies the whole cache first.
    """
    if not slots.shape[0]:
        return pages
    tuning = tuning or write_tuning(tokens=slots.shape[0], quantised=format.quantised)
    return write_sm90.write(
        pages,
        scale,
        kv_latent if format.quantised else kv_latent.astype(pages.dtype),
        k_rope if format.quantised else k_rope.astype(pages.dtype),
        slots,
        quantised=format.quantised,
        tile=tuning.tile,
        layer=layer,
        interpret=interpret,
    )
