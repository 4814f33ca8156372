"""V4's new rows: norm and rotation of queries and of the one row of a token, cache write."""

from mla_jax.pallas.append_window import ref
from mla_jax.pallas.cache_io.row_layout import ROWS
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

TRITON = Requirement(
    sm=Within(low=80),
    features={
        "dtype": OneOf("bfloat16", "float16", "float32"),
        "cache": ROWS,
        "dim": Within(low=2, high=4096, multiple=2),
    },
    packages=("triton",),
)

BACKENDS = (
    Backend("append_window", "triton", "mla_jax.pallas.append_window.triton:append_window", TRITON),
    Backend("append_window", "xla", ref.append_window),
)
