"""Sums over devices of one host, of few rows: each device reads what the others have."""

from mla_jax.pallas.all_reduce import ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

MOSAIC = Requirement(
    sm=OneOf(90),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "hidden": Within(low=1024, high=8192, multiple=1024),
        "devices": Within(low=2, high=16),
        "bytes": Within(high=16 << 20),
        "processes": OneOf(1),
    },
)
"""``bytes`` are those that a device reads of others. NCCL, which XLA calls, sends each row less
often: a sum of more bytes is faster so."""

BACKENDS = (
    Backend("all_reduce", "mosaic", "mla_jax.pallas.all_reduce.mosaic:all_reduce", MOSAIC),
    Backend("all_reduce", "xla", ref.all_reduce),
)
