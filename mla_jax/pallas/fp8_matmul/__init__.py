"""Products with e4m3 weights in scaled blocks: a layer's, and the routed experts'."""

from mla_jax.pallas.fp8_matmul import ref, xla
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.types import SCALE_BLOCK

MANY, MANY_EACH = 512, 64
"""Rows, and rows of an expert on average, from which on e4m3 rows are faster on Hopper."""

FEW_ROWS = Requirement(
    sm=Within(low=89),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "into": Within(low=SCALE_BLOCK, multiple=SCALE_BLOCK),
        "group_outputs": Within(low=0, multiple=64),
        "tokens": Within(high=64),
        "quantise_rows": OneOf(False),
    },
    packages=("triton",),
)
"""With more rows XLA's product of widened weights is faster."""

MANY_ROWS = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "into": Within(low=SCALE_BLOCK, multiple=SCALE_BLOCK),
        "out": Within(low=64, multiple=64),
        "groups": OneOf(1),
        "tokens": Within(low=MANY),
        "quantise_rows": OneOf(True),
    },
    packages=("triton",),
)

EXPERTS = Requirement(
    sm=Within(low=89),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "experts": Within(high=1024),
        "hidden": Within(low=SCALE_BLOCK, multiple=SCALE_BLOCK),
        "width": Within(low=SCALE_BLOCK, multiple=SCALE_BLOCK),
        "quantise_rows": OneOf(False),
    },
    packages=("triton",),
)

EXPERTS_OF_MANY_ROWS = Requirement(
    sm=OneOf(90),
    workers=True,
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "experts": Within(high=1024),
        "hidden": Within(low=256, multiple=256),
        "width": Within(low=SCALE_BLOCK, multiple=SCALE_BLOCK),
        "rows_each": Within(low=MANY_EACH),
        "quantise_rows": OneOf(True),
    },
    packages=("triton",),
)

_MOSAIC, _TRITON = "mla_jax.pallas.fp8_matmul.mosaic", "mla_jax.pallas.fp8_matmul.triton"

BACKENDS = (
    Backend("matmul_fp8", "mosaic", f"{_MOSAIC}:matmul_fp8", MANY_ROWS),
    Backend("matmul_fp8", "triton", f"{_TRITON}:matmul_fp8", FEW_ROWS),
    Backend("matmul_fp8", "xla", xla.matmul_fp8),
    Backend("routed_experts_fp8", "mosaic", f"{_MOSAIC}:routed_experts_fp8", EXPERTS_OF_MANY_ROWS),
    Backend("routed_experts_fp8", "triton", f"{_TRITON}:routed_experts_fp8", EXPERTS),
    Backend("routed_experts_fp8", "xla", xla.routed_experts_fp8),
)

__all__ = ["BACKENDS", "MANY", "MANY_EACH", "ref"]
