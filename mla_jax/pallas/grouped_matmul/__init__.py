"""The experts' products: rows gathered by index, SwiGLU inside, nothing dense."""

from mla_jax.pallas.grouped_matmul import mosaic, triton, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend.tunable("routed_experts", mosaic, mosaic.routed_experts, mosaic.REQUIREMENT),
    Backend.tunable("routed_experts", triton, triton.routed_experts, triton.REQUIREMENT),
    Backend("routed_experts", "xla", xla.routed_experts),
)
