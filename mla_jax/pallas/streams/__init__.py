"""Hyper-connections: what a sub-block reads of the parallel streams, and how they are mixed."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.streams import ref, triton

BACKENDS = (
    Backend("mix_streams", "triton", triton.mix_streams, triton.REQUIREMENT),
    Backend("mix_streams", "xla", ref.mix_streams),
)
