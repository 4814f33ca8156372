"""The experts' products: rows gathered by index, SwiGLU inside, nothing dense."""

from mla_jax.pallas.grouped_matmul import triton, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="routed_experts",
        name="triton",
        run=triton.routed_experts,
        requirement=triton.REQUIREMENT,
        tuning=triton.Tuning,
        tune=triton.tune,
    ),
    Backend(op="routed_experts", name="xla", run=xla.routed_experts),
)
