"""Few rows of several devices of one host: each writes its own into the memory of all."""

from mla_jax.pallas.all_reduce import ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within
from mla_jax.peers import MOST_DEVICES, ROW_BYTES, SLOTTED

MOSAIC = Requirement(
    sm=OneOf(90),
    features={
        "dtype": OneOf("bfloat16", "float16"),
        "hidden": Within(low=1024, high=ROW_BYTES // 2, multiple=1024),
        "devices": Within(low=2, high=MOST_DEVICES),
        "rows_of_all": Within(high=SLOTTED),
        "peers": OneOf(True),
    },
)
"""The kernel sends each row to every device. NCCL, which XLA calls, sends it fewer times, and is
faster with more rows."""

BACKENDS = (
    Backend("all_reduce", "mosaic", "mla_jax.pallas.all_reduce.mosaic:all_reduce", MOSAIC),
    Backend("all_reduce", "xla", ref.all_reduce),
)
