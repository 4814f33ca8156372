"""The cache pytrees, and formats of one element dtype."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax.cache import ELEMENT_FORMATS, LatentCache, RecordCache
from mla_jax.errors import MetadataError

SIZES = {"num_pages": 3, "page": 4, "rank": 16, "rope": 4}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "fp4"}, "given 'fp4'; allowed: bf16, fp16, fp32, fp8_e4m3"),
        ({"format": "v4"}, "allowed: bf16, fp16, fp32, fp8_e4m3. RecordCache holds v4."),
        ({"num_pages": 2**29, "page": 8}, "below 2**31 slots"),
        ({"num_pages": 0}, "positive sizes"),
        ({"rope": -1}, "positive sizes"),
        ({"scale": 2.0}, "1 (nothing is scaled)"),
        ({"scale": 0.0, "format": "fp8_e4m3"}, "a finite number of at least 1.18e-38"),
        ({"scale": 1e-40, "format": "fp8_e4m3"}, "a finite number of at least 1.18e-38"),
        ({"scale": float("nan"), "format": "fp8_e4m3"}, "a finite number of at least"),
    ],
)
def test_alloc_refuses(change, text):
    with pytest.raises(MetadataError) as refusal:
        LatentCache.alloc(**(SIZES | change))
    assert text in str(refusal.value)


@pytest.mark.parametrize("format", ELEMENT_FORMATS)
def test_record_matches_memory(format):
    """Fields tile the record, and a record is one row of the allocated array."""
    cache = LatentCache.alloc(**SIZES, format=format)
    fmt = ELEMENT_FORMATS[format]
    fields = fmt.fields(16, 4)
    assert [f.name for f in fields] == ["kv_latent", "k_rope"]
    assert fields[0].offset == 0 and fields[1].offset == fields[0].end
    assert fields[1].end == fmt.row_bytes(16, 4) == cache.pages[0, 0].nbytes
    assert not np.asarray(cache.pages).any()
    assert (cache.page, cache.rope, cache.num_pages, cache.num_slots) == (4, 4, 3, 12)


@pytest.mark.parametrize(
    ("format", "size"), [("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8_e4m3", 576)]
)
def test_bytes_per_token(format, size):
    assert ELEMENT_FORMATS[format].row_bytes(512, 64) == size


def test_cache_is_a_pytree_of_two_arrays():
    cache = LatentCache.alloc(**SIZES)
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 2 and tree == jax.tree.structure(LatentCache.alloc(**SIZES))
    assert jax.jit(lambda c: c)(cache).format is cache.format
    assert jax.eval_shape(lambda: LatentCache.alloc(**SIZES)).pages.dtype == jnp.bfloat16


def test_fp8_divides_by_the_scale():
    """A true float32 division inside jit: multiplying by 1 / scale differs next to ties."""
    codes = np.arange(1, 0x7E, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    scale = np.float32(0.1)
    near = (ties * scale).view(np.int32)[:, None] + np.arange(-4, 4, dtype=np.int32)
    x = near.view(np.float32)
    got = jax.jit(ELEMENT_FORMATS["fp8_e4m3"].encode)(jnp.asarray(x), jnp.asarray(scale))
    want = (x / scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "fp4"}, "given 'fp4'; allowed: ds_mla, index_key, v4."),
        ({"format": "bf16"}, "LatentCache holds elements of one dtype."),
        ({"format": ELEMENT_FORMATS["fp8_e4m3"].record(16, 4)}, "LatentCache holds elements"),
        ({"num_pages": 0}, "positive sizes"),
        ({"layers": 0}, "positive sizes"),
        ({"num_pages": 2**29, "page": 8}, "below 2**31"),
        ({"num_pages": 2**20, "page": 64, "layers": 61}, "below 2**31"),
    ],
)
def test_alloc_of_records_refuses(change, text):
    with pytest.raises(MetadataError) as refusal:
        RecordCache.alloc(**({"num_pages": 3, "page": 4, "format": "v4"} | change))
    assert text in str(refusal.value)


@pytest.mark.parametrize(("layers", "lead"), [(None, ()), (2, (2,))])
def test_record_cache_is_a_pytree_of_one_array(layers, lead):
    cache = RecordCache.alloc(num_pages=3, page=4, format="v4", layers=layers)
    assert cache.pages.shape == (*lead, 3, 2880) and cache.pages.dtype == jnp.uint8
    assert not np.asarray(cache.pages).any()
    assert (cache.layers, cache.page, cache.num_pages, cache.num_slots) == (layers, 4, 3, 12)
    assert len(jax.tree.leaves(cache)) == 1
    assert jax.jit(lambda c: c)(cache).format is cache.format


@pytest.mark.parametrize("scale", [1e-50, 1e39])
def test_scales_that_float32_does_not_hold_are_refused(scale):
    with pytest.raises(
        MetadataError, match=r"a finite number of at least 1\.18e-38, in float32 too"
    ):
        LatentCache.alloc(num_pages=1, page=1, rank=2, rope=0, format="fp8_e4m3", scale=scale)
