"""Golden batches as our host and common metadata, padded to few sizes so that few programs run."""

import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import CommonAttentionHost, CommonAttentionMetadata

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


def host_of(given: dict) -> CommonAttentionHost:
    """``num_actual_tokens`` may count padding tokens behind the last request's."""
    starts, lens = given["query_start_loc"], given["seq_lens"]
    return CommonAttentionHost(
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=lens,
        seq_lens_cpu=lens,
        is_prefilling=None,
        encoder_seq_lens_cpu=None,
        num_reqs=len(lens),
        num_actual_tokens=given["num_actual_tokens"],
        max_query_len=int(np.diff(starts).max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
    )


def common_of(given: dict) -> CommonAttentionMetadata:
    """The step in a bucket larger than itself; slots as given."""
    requests = size_of(len(given["seq_lens"]))
    tokens = size_of(given["num_actual_tokens"])
    pages = size_of(given["block_table"].shape[1])
    none = jnp.zeros((tokens,), jnp.int32)
    return CommonAttentionMetadata(
        bucket=CommonBucket(requests=requests, tokens=tokens, pages=pages),
        causal=True,
        query_start_loc=padded(given["query_start_loc"], requests + 1, edge=True),
        seq_lens=padded(given["seq_lens"], requests),
        block_table_tensor=padded(given["block_table"], requests, columns=pages),
        slot_mapping=padded(given["slot_mapping"], tokens, fill=-1),
        positions=none,
        num_reqs=jnp.int32(len(given["seq_lens"])),
        num_actual_tokens=jnp.int32(given["query_start_loc"][-1]),
        max_query_len=jnp.int32(np.diff(given["query_start_loc"]).max(initial=0)),
        max_seq_len=jnp.int32(given["seq_lens"].max(initial=0)),
        dcp_local_seq_lens=None,
        encoder_seq_lens=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
    )
