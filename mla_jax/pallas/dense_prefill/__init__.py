"""Expanded heads over a ragged batch, causal or full.

``mosaic`` stands behind ``xla`` and runs only when asked for by name: after its last change it
was interpreted and compiled, but not run on a device (docs/kernels/dense_prefill.md).
"""

from mla_jax.pallas.dense_prefill import mosaic, ref
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(op="dense_prefill", name="xla", run=ref.dense_prefill),
    Backend(
        op="dense_prefill",
        name="mosaic",
        run=mosaic.dense_prefill,
        requirement=mosaic.REQUIREMENT,
        tuning=mosaic.Tuning,
    ),
)
