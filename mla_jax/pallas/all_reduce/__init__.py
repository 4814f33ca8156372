"""Few rows of several devices of one host: each writes its own into the memory of all."""

from mla_jax.pallas.all_reduce import ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

MOSAIC = Requirement(
    sm=OneOf(90),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "hidden": Within(low=1024, high=8192, multiple=1024),
        "devices": Within(low=2, high=16),
        "rows_of_all": Within(high=512),
        "peers": OneOf(True),
    },
)
"""NCCL, which XLA calls, sends each row less often: more rows are faster so."""

BACKENDS = (
    Backend("all_reduce", "mosaic", "mla_jax.pallas.all_reduce.mosaic:all_reduce", MOSAIC),
    Backend("all_reduce", "xla", ref.all_reduce),
)
