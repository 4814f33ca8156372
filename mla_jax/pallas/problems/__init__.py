"""From the arguments of an operation to its ``Problem``: what fits together, and what is asked.

One function per operation, with the operation's own arguments. It refuses what does not fit,
before any backend is asked, and reads shapes and dtypes only.
"""

from collections.abc import Callable

from mla_jax.pallas.problems.attention import (
    decode,
    merge,
    plan_decode,
    plan_prefill,
    prefill,
    sinks,
    sparse_decode,
    sparse_prefill,
)
from mla_jax.pallas.problems.caches import (
    append,
    append_window,
    copy,
    gather,
    gather_codes,
    gather_rows,
    pool_states,
    swap,
    write,
    write_rows,
)
from mla_jax.pallas.problems.experts import (
    all_reduce,
    matmul_float32,
    matmul_fp8,
    mix_streams,
    route,
    routed,
    routed_fp8,
)
from mla_jax.pallas.problems.selection import check_selection, logits, select_decode, select_prefill
from mla_jax.pallas.registry import Problem

__all__ = [
    "PROBLEMS",
    "all_reduce",
    "append",
    "append_window",
    "check_selection",
    "copy",
    "decode",
    "gather",
    "gather_codes",
    "gather_rows",
    "logits",
    "matmul_float32",
    "matmul_fp8",
    "merge",
    "mix_streams",
    "plan_decode",
    "plan_prefill",
    "pool_states",
    "prefill",
    "route",
    "routed",
    "routed_fp8",
    "select_decode",
    "select_prefill",
    "sinks",
    "sparse_decode",
    "sparse_prefill",
    "swap",
    "write",
    "write_rows",
]

PROBLEMS: dict[str, Callable[..., Problem]] = {
    "write_latent": write,
    "append_latent": append,
    "append_window": append_window,
    "pool_states": pool_states,
    "gather_latent": gather,
    "copy_blocks": copy,
    "swap_blocks": swap,
    "mla_decode": decode,
    "mla_prefill": prefill,
    "merge_attn_states": merge,
    "apply_sinks": sinks,
    "route_tokens": route,
    "matmul_float32": matmul_float32,
    "mix_streams": mix_streams,
    "all_reduce": all_reduce,
    "routed_experts": routed,
    "routed_experts_fp8": routed_fp8,
    "matmul_fp8": matmul_fp8,
    "write_rows": write_rows,
    "gather_rows": gather_rows,
    "gather_codes": gather_codes,
    "indexer_logits": logits,
    "select_topk_decode": select_decode,
    "select_topk_prefill": select_prefill,
    "mla_sparse_decode": sparse_decode,
    "mla_sparse_prefill": sparse_prefill,
}
