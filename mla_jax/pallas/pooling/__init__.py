"""Compressed states of V4: values of a group's tokens, summed by a softmax of their gates."""

from mla_jax.pallas.pooling import ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="pool_states", name="triton", run=triton.pool_states, requirement=triton.REQUIREMENT
    ),
    Backend(op="pool_states", name="xla", run=ref.pool_states),
)
