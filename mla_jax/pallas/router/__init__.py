"""The router: float32 scores of every expert, and the best of them for each token."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.router import ref, triton

BACKENDS = (
    Backend(
        op="route_tokens", name="triton", run=triton.route_tokens, requirement=triton.REQUIREMENT
    ),
    Backend(op="route_tokens", name="xla", run=ref.route_tokens),
)
