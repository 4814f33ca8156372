"""The router: float32 scores of every expert, and the best of them for each token."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.router import ref, triton

BACKENDS = (
    Backend("route_tokens", "triton", triton.route_tokens, triton.REQUIREMENT),
    Backend("route_tokens", "xla", ref.route_tokens),
)
