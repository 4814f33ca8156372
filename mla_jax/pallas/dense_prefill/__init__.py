"""Expanded heads over a ragged batch, causal or full."""

from mla_jax.pallas.dense_prefill import xla
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

MOSAIC = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype+out": OneOf(
            "bfloat16+bfloat16", "bfloat16+float32", "float16+float16", "float16+float32"
        ),
        "nope": Within(low=64, high=192, multiple=64),
        "rope": OneOf(64),
        "v": Within(low=64, high=256, multiple=64),
    },
)

_KERNEL = "mla_jax.pallas.dense_prefill.mosaic:dense_prefill"

BACKENDS = (
    Backend("mla_prefill", "mosaic", _KERNEL, MOSAIC, tunable=True),
    Backend("mla_prefill", "xla", xla.dense_prefill),
)
