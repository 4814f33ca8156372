"""Compressed states of V4: values of a group's tokens, summed by a softmax of their gates."""

from mla_jax.pallas.pooling import ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

TRITON = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("float32"),
        "ring": OneOf("fp32"),
        "caches": OneOf(
            "bf16", "fp16", "fp32", "v4", "bf16+bf16", "fp16+fp16", "fp32+fp32", "v4+index_key"
        ),
        "span": Within(high=256),
        "dim": Within(low=2, high=4096, multiple=2),
        "more_dim": Within(low=0, high=4096, multiple=2),  # of a second pool
    },
    packages=("triton",),
)

BACKENDS = (
    Backend("pool_states", "triton", "mla_jax.pallas.pooling.triton:pool_states", TRITON),
    Backend("pool_states", "xla", ref.pool_states),
)
