"""A step's new rows in one launch: the latent normalised, keys and queries rotated, rows stored."""

from mla_jax.pallas.append import ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

TRITON = Requirement(
    sm=Within(low=89),  # e4m3 is converted from there on
    features={
        "dtype": OneOf("bfloat16", "float16", "float32"),
        "cache": OneOf("bf16", "fp16", "fp32", "fp8_e4m3"),
        "rank": Within(high=4096),
        "nope": Within(),
        "rope": Within(low=2, multiple=2),
    },
    packages=("triton",),
)

BACKENDS = (
    Backend("append_latent", "triton", "mla_jax.pallas.append.triton:append_latent", TRITON),
    Backend("append_latent", "xla", ref.append_latent),
)
