"""Expanded heads over a ragged batch, causal or full."""

from mla_jax.pallas.dense_prefill import ref
from mla_jax.pallas.registry import Backend

BACKENDS = (Backend(op="dense_prefill", name="xla", run=ref.dense_prefill),)
