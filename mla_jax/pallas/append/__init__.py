"""A step's new rows in one launch: the latent normalised, keys and queries rotated, rows stored."""

from mla_jax.pallas.append import ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(
        op="append_latent", name="triton", run=triton.append_latent, requirement=triton.REQUIREMENT
    ),
    Backend(op="append_latent", name="xla", run=ref.append_latent),
)
