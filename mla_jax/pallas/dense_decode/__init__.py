"""Absorbed attention over pages, few queries per request."""

from mla_jax.pallas.dense_decode import xla
from mla_jax.pallas.dense_decode.sizes_sm90 import RANK, ROPE
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

MOSAIC = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype+out+cache": OneOf(
            "bfloat16+bfloat16+bf16",
            "float16+float16+fp16",
            "bfloat16+bfloat16+fp8_e4m3",
            "float16+float16+fp8_e4m3",
        ),
        "rank": OneOf(RANK),
        "rope": OneOf(ROPE),
        "page": OneOf(16, 32, 64, 128),
        "heads": Within(high=128),
        "max_query_len": Within(high=4),
    },
)

_KERNEL = "mla_jax.pallas.dense_decode.mosaic:dense_decode"

BACKENDS = (
    Backend("mla_decode", "mosaic", _KERNEL, MOSAIC, tunable=True),
    Backend("mla_decode", "xla", xla.dense_decode),
)
