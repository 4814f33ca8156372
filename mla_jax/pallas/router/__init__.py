"""The router: float32 scores of every expert, and the best of them for each token."""

from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.pallas.router import ref

ROUTE = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float32"),
        "experts": Within(high=1024),
        "topk": Within(high=64),
    },
    packages=("triton",),
)

PRODUCT = Requirement(
    sm=Within(low=80),
    features={"dtype": OneOf("bfloat16", "float16", "float32"), "out": Within(high=1024)},
    packages=("triton",),
)

BACKENDS = (
    Backend("route_tokens", "triton", "mla_jax.pallas.router.triton:route_tokens", ROUTE),
    Backend("route_tokens", "xla", ref.route_tokens),
    Backend("matmul_float32", "triton", "mla_jax.pallas.router.triton:matmul_float32", PRODUCT),
    Backend("matmul_float32", "xla", ref.router_logits),
)
