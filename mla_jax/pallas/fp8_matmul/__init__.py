"""Products with e4m3 weights in scaled blocks: a layer's, and the routed experts'."""

from mla_jax.pallas.fp8_matmul import mosaic, ref, triton, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend("matmul_fp8", "triton", triton.matmul_fp8, triton.FEW_ROWS),
    Backend("matmul_fp8", "xla", xla.matmul_fp8),
    Backend("matmul_fp8", "mosaic", mosaic.matmul_fp8, mosaic.REQUIREMENT),
    Backend("routed_experts_fp8", "triton", triton.routed_experts_fp8, triton.REQUIREMENT),
    Backend("routed_experts_fp8", "xla", xla.routed_experts_fp8),
    Backend("routed_experts_fp8", "mosaic", mosaic.routed_experts_fp8, mosaic.EXPERTS),
)

__all__ = ["BACKENDS", "ref"]
