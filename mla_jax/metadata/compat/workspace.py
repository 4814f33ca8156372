"""Rows and bytes of the workspace that cached context is gathered into, before allocation."""

from dataclasses import dataclass
from math import lcm

from mla_jax.config import MLADims
from mla_jax.errors import MetadataError
from mla_jax.metadata.common import check_sizes
from mla_jax.metadata.context_parallel import WHOLE, ContextShard
from mla_jax.types import round_up

__all__ = [
    "PrefillMemory",
    "chunked_prefill_workspace_size",
    "estimate_prefill_memory",
    "first_generation_workspace_size",
]

MAX_ROWS = 64 * 1024
"""Up-projected to 128 heads of 128 + 128 elements, these are 4 GiB of bfloat16."""

FIRST_GENERATION_MAX_ROWS = 128 * 1024


def _wanted(max_model_len: int, max_num_seqs: int, page: int) -> int:
    """Eight contexts of full length, or four pages of every request."""
    check_sizes(max_model_len=max_model_len, max_num_seqs=max_num_seqs, page=page)
    return max(8 * max_model_len, 4 * max_num_seqs * page)


def chunked_prefill_workspace_size(
    *,
    max_model_len: int,
    max_num_seqs: int,
    page: int,
    shard: ContextShard = WHOLE,
    topk: int | None = None,
) -> int:
    """Rows for ``pack_chunks``: at most ``MAX_ROWS``, at least one aligned unit, aligned.

    ``topk``: a sparse model never reads more than that many rows per request.
    """
    align = page if shard.ranks == 1 else lcm(page, shard.ranks * shard.interleave)
    rows = min(_wanted(max_model_len, max_num_seqs, page), MAX_ROWS)
    if topk is not None:
        rows = min(rows, max_num_seqs * topk)
    return round_up(max(rows, align), align)


def first_generation_workspace_size(*, max_model_len: int, max_num_seqs: int, page: int) -> int:
    """Rows for ``plan_equal_chunks``.

    Raises:
        MetadataError: a page of every request does not fit.
    """
    rows = min(_wanted(max_model_len, max_num_seqs, page), FIRST_GENERATION_MAX_ROWS)
    if rows < max_num_seqs * page:
        raise MetadataError(
            "context workspace rows",
            rows,
            f"at least max_num_seqs * page = {max_num_seqs * page}",
            "Lower max_num_seqs or the page.",
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class PrefillMemory:
    """Bytes that the worst chunk of cached context needs at once."""

    workspace: int  # gathered latent rows
    projected: int  # nope keys and values of all heads, as the projection leaves them
    keys: int  # keys with their rotary part, of all heads; only where a kernel wants them so

    @property
    def total(self) -> int:
        return self.workspace + self.projected + self.keys


def estimate_prefill_memory(
    rows: int, dims: MLADims, *, itemsize: int = 2, shard: ContextShard = WHOLE
) -> PrefillMemory:
    """What a profile run would reserve: ``rows`` full, nothing allocated.

    Under context parallelism a rank also holds its own ``rows / ranks`` before the exchange.
    """
    gathered = rows + (rows // shard.ranks if shard.ranks > 1 else 0)
    return PrefillMemory(
        workspace=gathered * dims.row * itemsize,
        projected=rows * dims.heads * (dims.nope + dims.v) * itemsize,
        keys=rows * dims.heads * dims.qk * itemsize,
    )
