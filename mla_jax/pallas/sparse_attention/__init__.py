"""Attention of each token over its own list of rows: in the cache, or gathered."""

from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.pallas.sparse_attention import xla

_WIDTHS = OneOf("512+64+512", "448+64+512")

MOSAIC_DECODE = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype+out+cache+extra_cache": OneOf(
            "bfloat16+bfloat16+bf16+None",
            "bfloat16+bfloat16+bf16+bf16",
            "float16+float16+fp16+None",
            "float16+float16+fp16+fp16",
            "bfloat16+bfloat16+ds_mla+None",
            "bfloat16+bfloat16+ds_mla+ds_mla",
            "bfloat16+bfloat16+v4+None",
            "bfloat16+bfloat16+v4+v4",
        ),
        "rank+rope+value": _WIDTHS,
        "heads": Within(high=128),
    },
)
"""``extra_cache=None``: one scope."""

TRITON_DECODE = Requirement(
    sm=Within(low=89),  # e4m3 is converted from there on
    features={
        "dtype+cache+extra_cache": OneOf(
            "bfloat16+bf16+None",
            "bfloat16+bf16+bf16",
            "float16+fp16+None",
            "float16+fp16+fp16",
            "bfloat16+ds_mla+None",
            "bfloat16+ds_mla+ds_mla",
            "bfloat16+v4+None",
            "bfloat16+v4+v4",
        ),
        "rank+rope+value": OneOf("128+64+128", "256+64+256", "512+64+512", "448+64+512"),
    },
    packages=("triton",),
)

MOSAIC_PREFILL = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype+out+rows_dtype": OneOf("bfloat16+bfloat16+bfloat16", "float16+float16+float16"),
        "rank+rope+value": _WIDTHS,
        "heads": Within(high=128),
    },
)

_MOSAIC = "mla_jax.pallas.sparse_attention.mosaic"
_TRITON = "mla_jax.pallas.sparse_attention.triton"

BACKENDS = (
    Backend("mla_sparse_decode", "mosaic", f"{_MOSAIC}:sparse_decode", MOSAIC_DECODE, tunable=True),
    Backend("mla_sparse_decode", "triton", f"{_TRITON}:sparse_decode", TRITON_DECODE),
    Backend("mla_sparse_decode", "xla", xla.sparse_decode),
    Backend(
        "mla_sparse_prefill", "mosaic", f"{_MOSAIC}:sparse_prefill", MOSAIC_PREFILL, tunable=True
    ),
    Backend("mla_sparse_prefill", "xla", xla.sparse_prefill),
)
