"""Golden batches as our host and common metadata, padded to few sizes so that few programs run."""

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import (
    CommonMetadata,
    GroupSpec,
    HostBatch,
    slot_mapping,
    token_positions,
    token_to_request,
)

SIZES = (8, 64, 512, 4096, 32768)


def size_of(n: int) -> int:
    """The smallest of a few sizes that holds ``n``."""
    return next(size for size in SIZES if size >= n)


def padded(array, rows: int, *, columns: int | None = None, edge: bool = False, fill: int = 0):
    """An int32 device array of ``rows`` rows (and ``columns`` columns), zeros behind."""
    array = np.asarray(array)
    widths = [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    if columns is not None:
        widths[1] = (0, columns - array.shape[1])
    how = {"mode": "edge"} if edge else {"constant_values": fill}
    dtype = bool if array.dtype == bool else np.int32
    return jnp.asarray(np.pad(array, widths, **how).astype(dtype))


def host_of(given: dict) -> HostBatch:
    """``num_actual_tokens`` may count padding tokens behind the last request's."""
    starts, lens = given["query_start_loc"], given["seq_lens"]
    return HostBatch(
        query_starts=starts,
        seq_lens=lens,
        exact=True,
        is_prefilling=None,
        num_requests=len(lens),
        num_tokens=given["num_actual_tokens"],
        max_query_len=int(np.diff(starts).max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
    )


def common_of(given: dict, group: GroupSpec) -> CommonMetadata:
    """The step in a bucket larger than itself; slots as given, or what they complete."""
    requests = size_of(len(given["seq_lens"]))
    tokens = size_of(given["num_actual_tokens"])
    pages = size_of(given["block_table"].shape[1])
    starts = padded(given["query_start_loc"], requests + 1, edge=True)
    lens = padded(given["seq_lens"], requests)
    table = padded(given["block_table"], requests, columns=pages)
    slots = padded(given["slot_mapping"], tokens, fill=-1)
    owner, positions, real = _derived(starts, lens, slots)
    if group.ratio > 1:
        slots = completed(
            table, owner, positions, real & (slots >= 0), page=group.page, ratio=group.ratio
        )
    return CommonMetadata(
        bucket=CommonBucket(requests=requests, tokens=tokens, pages=(pages,)),
        groups=(group,),
        query_starts=starts,
        seq_lens=lens,
        positions=positions,
        requests=owner,
        real=real,
        page_tables={group.name: table},
        slots={group.name: slots},
        num_requests=jnp.int32(len(given["seq_lens"])),
        num_tokens=jnp.int32(given["query_start_loc"][-1]),
        max_query_len=jnp.int32(np.diff(given["query_start_loc"]).max(initial=0)),
        max_seq_len=jnp.int32(given["seq_lens"].max(initial=0)),
    )


@jax.jit
def _derived(starts, lens, slots):
    owner, real = token_to_request(starts, slots.shape[0])
    return owner, token_positions(starts, lens, owner, real), real


completed = jax.jit(slot_mapping, static_argnames=("page", "ratio"))
