"""Combine attention states."""

from mla_jax.pallas.merge import ref
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend("merge_attn_states", "xla", ref.merge_attn_states),
    Backend("apply_sinks", "xla", ref.apply_sinks),
)
