"""Cache in, cache out: write, gather and move token records."""

from mla_jax.pallas.cache_io import mosaic, records, ref, triton
from mla_jax.pallas.registry import Backend

BACKENDS = (
    Backend(op="write_latent", name="mosaic", run=mosaic.write_latent, requirement=mosaic.WRITE),
    Backend(op="gather_latent", name="mosaic", run=mosaic.gather_latent, requirement=mosaic.GATHER),
    Backend(op="write_latent", name="xla", run=ref.write_latent),
    Backend(op="gather_latent", name="xla", run=ref.gather_latent),
    Backend(op="copy_blocks", name="xla", run=ref.copy_blocks),
    Backend(op="swap_blocks", name="xla", run=ref.swap_blocks),
    Backend(op="write_rows", name="triton", run=triton.write_records, requirement=triton.WRITE),
    Backend(op="write_rows", name="xla", run=records.write_records),
    Backend(op="gather_rows", name="triton", run=triton.gather_rows, requirement=triton.GATHER),
    Backend(op="gather_rows", name="xla", run=records.gather_rows),
    Backend(op="gather_codes", name="triton", run=triton.gather_codes, requirement=triton.CODES),
    Backend(op="gather_codes", name="xla", run=records.gather_codes),
)
