"""Few rows of several devices of one host: each writes its own into the memory of all."""

from mla_jax.pallas.collectives import ref
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

GATHER = Requirement(
    sm=OneOf(90),
    features={
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "devices": Within(low=2, high=16),
        "rows_of_all": Within(high=512),  # of 16 kB
        "peers": OneOf(True),
    },
)

BACKENDS = (
    Backend("all_gather", "mosaic", "mla_jax.pallas.collectives.mosaic:all_gather", GATHER),
    Backend("all_gather", "xla", ref.all_gather),
    Backend("all_reduce", "mosaic", "mla_jax.pallas.collectives.mosaic:all_reduce", MOSAIC),
    Backend("all_reduce", "xla", ref.all_reduce),
)
