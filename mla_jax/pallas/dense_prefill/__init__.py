"""Expanded heads over a ragged batch, causal or full."""

from mla_jax.pallas.dense_prefill import mosaic, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend.tunable("mla_prefill", mosaic, mosaic.dense_prefill, mosaic.REQUIREMENT),
    Backend("mla_prefill", "xla", xla.dense_prefill),
)
