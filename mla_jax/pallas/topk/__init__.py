"""Which positions each query looks at: the best of the indexer's scores."""

from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.pallas.topk import xla

_SIZES = {"dim": OneOf(128), "heads": OneOf(8, 16, 32, 64)}

MOSAIC_DECODE = Requirement(
    sm=OneOf(90),
    features={
        "dtype+cache": OneOf("float8_e4m3fn+index_key", "bfloat16+bf16", "float16+fp16"),
        **_SIZES,
        "queries": Within(high=4),
        "page": OneOf(64),
    },
)

MOSAIC_PREFILL = Requirement(
    sm=OneOf(90),
    features={"dtype": OneOf("float8_e4m3fn"), "keys_dtype": OneOf("float8_e4m3fn"), **_SIZES},
)

TRITON_DECODE = Requirement(
    sm=Within(low=89),  # products of e4m3
    features={
        "dtype+cache": OneOf("bfloat16+bf16", "float16+fp16", "float8_e4m3fn+index_key"),
        "dim": OneOf(64, 128),
        "queries": Within(high=8),
    },
    packages=("triton",),
)

TRITON_PREFILL = Requirement(
    sm=Within(low=89),
    features={
        "dtype": OneOf("bfloat16", "float16", "float8_e4m3fn"),
        "keys_dtype": OneOf("bfloat16", "float16", "float8_e4m3fn"),
        "dim": OneOf(64, 128),
    },
    packages=("triton",),
)

_MOSAIC, _TRITON = "mla_jax.pallas.topk.mosaic", "mla_jax.pallas.topk.triton"

BACKENDS = (
    Backend("select_topk_decode", "mosaic", f"{_MOSAIC}:select_decode", MOSAIC_DECODE),
    Backend("select_topk_prefill", "mosaic", f"{_MOSAIC}:select_prefill", MOSAIC_PREFILL),
    Backend("select_topk_decode", "triton", f"{_TRITON}:select_decode", TRITON_DECODE),
    Backend("select_topk_prefill", "triton", f"{_TRITON}:select_prefill", TRITON_PREFILL),
    Backend("select_topk_decode", "xla", xla.select_decode),
    Backend("select_topk_prefill", "xla", xla.select_prefill),
)
