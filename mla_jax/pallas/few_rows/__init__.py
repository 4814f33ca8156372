"""Products of few rows with the norm before and the gate or the residual behind, in one launch."""

from mla_jax.pallas.few_rows import ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend("project_rows", "triton", triton.project_rows, triton.REQUIREMENT),
    Backend("project_rows", "xla", ref.project_rows),
)
