"""Combine attention states."""

from mla_jax.pallas.merge import ref
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(op="merge_attn_states", name="xla", run=ref.merge_attn_states),
    Backend(op="apply_sinks", name="xla", run=ref.apply_sinks),
)
