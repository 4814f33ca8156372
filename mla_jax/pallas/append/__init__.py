"""A step's new rows in one launch: the latent normalised, keys and queries rotated, rows stored."""

from mla_jax.pallas.append import ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend("append_latent", "triton", triton.append_latent, triton.REQUIREMENT),
    Backend("append_latent", "xla", ref.append_latent),
)
