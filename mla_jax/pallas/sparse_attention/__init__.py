"""Attention of each token over its own list of rows: in the cache, or gathered."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.sparse_attention import mosaic, triton, xla

BACKENDS = (
    Backend(
        op="mla_sparse_decode",
        name="mosaic",
        run=mosaic.sparse_decode,
        requirement=mosaic.DECODE,
        tuning=mosaic.Tuning,
        tune=mosaic.tune,
    ),
    Backend(
        op="mla_sparse_decode",
        name="triton",
        run=triton.sparse_decode,
        requirement=triton.REQUIREMENT,
    ),
    Backend(op="mla_sparse_decode", name="xla", run=xla.sparse_decode),
    Backend(
        op="mla_sparse_prefill",
        name="mosaic",
        run=mosaic.sparse_prefill,
        requirement=mosaic.PREFILL,
        tuning=mosaic.Tuning,
        tune=mosaic.tune,
    ),
    Backend(op="mla_sparse_prefill", name="xla", run=xla.sparse_prefill),
)
