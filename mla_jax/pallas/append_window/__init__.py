"""V4's new rows: norm and rotation of queries and of the one row of a token, cache write."""

from mla_jax.pallas.append_window import ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="append_window", name="triton", run=triton.append_window, requirement=triton.REQUIREMENT
    ),
    Backend(op="append_window", name="xla", run=ref.append_window),
)
