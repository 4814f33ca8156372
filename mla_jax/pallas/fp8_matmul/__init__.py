"""Products with e4m3 weights in scaled blocks: a layer's, and the routed experts'."""

from mla_jax.pallas.fp8_matmul import ref, triton, xla
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(op="matmul_fp8", name="triton", run=triton.matmul_fp8, requirement=triton.FEW_ROWS),
    Backend(op="matmul_fp8", name="xla", run=xla.matmul_fp8),
    Backend(
        op="routed_experts_fp8",
        name="triton",
        run=triton.routed_experts_fp8,
        requirement=triton.REQUIREMENT,
    ),
    Backend(op="routed_experts_fp8", name="xla", run=xla.routed_experts_fp8),
)

__all__ = ["BACKENDS", "ref"]
