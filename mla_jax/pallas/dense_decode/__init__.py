"""Absorbed attention over pages, few queries per request.

``mosaic`` stands behind ``xla`` and runs only when asked for by name: its newest form has been
interpreted and compiled, but not yet run on a device (docs/kernels/dense_decode.md).
"""

from mla_jax.pallas.dense_decode import mosaic, ref
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(op="dense_decode", name="xla", run=ref.dense_decode),
    Backend(
        op="dense_decode",
        name="mosaic",
        run=mosaic.dense_decode,
        requirement=mosaic.REQUIREMENT,
        tuning=mosaic.Tuning,
        tune=mosaic.tune,
        plan=mosaic.make_plan,
    ),
)
