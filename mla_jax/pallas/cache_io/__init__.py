"""Cache in, cache out: write, gather and move token records."""

from mla_jax.pallas.cache_io import records, ref
from mla_jax.pallas.registry import Backend, OneOf, Requirement, Within

_DTYPES = OneOf("bfloat16+bf16", "float16+fp16", "bfloat16+fp8_e4m3", "float16+fp8_e4m3")
_WIDTHS = {
    "rank": Within(low=64, high=1024, multiple=64),
    "rope": Within(low=64, high=128, multiple=64),
}
GATHER = Requirement(sm=OneOf(90), features={"out+cache": _DTYPES, **_WIDTHS})
WRITE = Requirement(sm=OneOf(90), features={"dtype+cache": _DTYPES, **_WIDTHS})

_ELEMENTS = "bf16", "fp16", "fp32", "fp8_e4m3"
_RECORDS = "ds_mla", "v4", "index_key"
_TRITON = {"sm": Within(low=80), "packages": ("triton",)}
WRITE_ROWS = Requirement(features={"cache": OneOf(*_RECORDS)}, **_TRITON)
GATHER_ROWS = Requirement(features={"cache": OneOf(*_RECORDS, *_ELEMENTS)}, **_TRITON)
GATHER_CODES = Requirement(features={"cache": OneOf("index_key")}, **_TRITON)

BACKENDS = (
    Backend("write_latent", "mosaic", "mla_jax.pallas.cache_io.mosaic:write_latent", WRITE),
    Backend("gather_latent", "mosaic", "mla_jax.pallas.cache_io.mosaic:gather_latent", GATHER),
    Backend("write_latent", "xla", ref.write_latent),
    Backend("gather_latent", "xla", ref.gather_latent),
    Backend("copy_blocks", "xla", ref.copy_blocks),
    Backend("swap_blocks", "xla", ref.swap_blocks),
    Backend("write_rows", "triton", "mla_jax.pallas.cache_io.triton:write_records", WRITE_ROWS),
    Backend("write_rows", "xla", records.write_records),
    Backend("gather_rows", "triton", "mla_jax.pallas.cache_io.triton:gather_rows", GATHER_ROWS),
    Backend("gather_rows", "xla", records.gather_rows),
    Backend("gather_codes", "triton", "mla_jax.pallas.cache_io.triton:gather_codes", GATHER_CODES),
    Backend("gather_codes", "xla", records.gather_codes),
)
