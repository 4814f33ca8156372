"""Absorbed attention over pages, few queries per request."""

from mla_jax.pallas.dense_decode import mosaic, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="mla_decode",
        name="mosaic",
        run=mosaic.dense_decode,
        requirement=mosaic.REQUIREMENT,
        tuning=mosaic.Tuning,
        tune=mosaic.tune,
        plan=mosaic.make_plan,
    ),
    Backend(op="mla_decode", name="xla", run=xla.dense_decode),
)
