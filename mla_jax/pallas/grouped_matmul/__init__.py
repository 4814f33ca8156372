"""The experts' products: rows gathered by index, SwiGLU inside, nothing dense."""

from mla_jax.pallas.grouped_matmul import xla
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

MOSAIC = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "experts": Within(high=1024),
        "hidden": Within(low=256, multiple=256),
        "width": Within(low=128, multiple=128),
        "rows_each": Within(low=192),
    },
    packages=("triton",),
)
"""With up to 167 rows an expert reading weights bounds a call (4.8 TB/s and 800 TFLOP/s)."""

TRITON = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "experts": Within(high=1024),
        "hidden": Within(low=64, multiple=64),
        "width": Within(low=64, multiple=64),
    },
    packages=("triton",),
)

_PACKAGE = "mla_jax.pallas.grouped_matmul"

BACKENDS = (
    Backend("routed_experts", "mosaic", f"{_PACKAGE}.mosaic:routed_experts", MOSAIC, tunable=True),
    Backend("routed_experts", "triton", f"{_PACKAGE}.triton:routed_experts", TRITON, tunable=True),
    Backend("routed_experts", "xla", xla.routed_experts),
)
