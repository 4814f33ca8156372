"""Hyper-connections: what a sub-block reads of the parallel streams, and how they are mixed."""

from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.pallas.streams import ref

TRITON = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float32"),
        "streams": OneOf(2, 4, 8),
        "hidden": Within(high=16384),
    },
    packages=("triton",),
)

BACKENDS = (
    Backend("mix_streams", "triton", "mla_jax.pallas.streams.triton:mix_streams", TRITON),
    Backend("mix_streams", "xla", ref.mix_streams),
)
