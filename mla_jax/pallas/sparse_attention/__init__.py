"""Attention of each token over its own list of rows: in the cache, or gathered."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.sparse_attention import mosaic, triton, xla

BACKENDS = (
    Backend.tunable("mla_sparse_decode", mosaic, mosaic.sparse_decode, mosaic.DECODE),
    Backend("mla_sparse_decode", "triton", triton.sparse_decode, triton.REQUIREMENT),
    Backend("mla_sparse_decode", "xla", xla.sparse_decode),
    Backend.tunable("mla_sparse_prefill", mosaic, mosaic.sparse_prefill, mosaic.PREFILL),
    Backend("mla_sparse_prefill", "xla", xla.sparse_prefill),
)
