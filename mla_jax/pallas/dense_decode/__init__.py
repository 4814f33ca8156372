"""Absorbed attention over pages, few queries per request."""

from mla_jax.pallas.dense_decode import mosaic, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend.tunable("mla_decode", mosaic, mosaic.dense_decode, mosaic.REQUIREMENT),
    Backend("mla_decode", "xla", xla.dense_decode),
)
