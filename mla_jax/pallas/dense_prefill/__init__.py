"""Expanded heads over a ragged batch, causal or full."""

from mla_jax.pallas.dense_prefill import mosaic, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="mla_prefill",
        name="mosaic",
        run=mosaic.dense_prefill,
        requirement=mosaic.REQUIREMENT,
        tuning=mosaic.Tuning,
        tune=mosaic.tune,
        plan=mosaic.make_plan,
    ),
    Backend(op="mla_prefill", name="xla", run=xla.dense_prefill),
)
