"""Cache traffic: records in, records out, pages moved; every registered backend."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.cache import ELEMENT_FORMATS, FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError
from mla_jax.ops import copy_blocks, gather_latent, swap_blocks, write_latent
from tests.cases import GARBAGE_PAGE, TINY, draw, paged, run, starts

OP = "write_latent"
FORMAT = pytest.mark.parametrize("format", ELEMENT_FORMATS)
WIDE = MLADims(heads=3, rank=64, nope=8, rope=64, v=6, q_rank=None)  # what kernels accept
SIZES = pytest.mark.parametrize(("dims", "page"), [(TINY, 4), (WIDE, 16)], ids=["tiny", "wide"])
DTYPE = {"fp16": "float16", "fp32": "float32"}  # of the rows that a format stores; else bfloat16


def alloc(dims=TINY, **kwargs):
    sizes = {"num_pages": 5, "page": 4, "rank": dims.rank, "rope": dims.rope}
    return LatentCache.alloc(**(sizes | kwargs))


def bits(x):
    """Raw bytes of each element, so that NaNs compare."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@FORMAT
@SIZES
def test_write_touches_its_slots_only(dims, page, format, backend, rng):
    """Slot -1 is skipped, surplus rows are ignored, and the last row of the cache survives."""
    cache = alloc(dims, page=page, format=format)
    dtype = DTYPE.get(format, "bfloat16")
    kv, kr = (jnp.asarray(draw(rng, 7, n, dtype=dtype)) for n in (dims.rank, dims.rope))
    n = 5 * page  # slots: the last two tokens are outside
    slots = jnp.array([-1, 5, -1, 18, n, 1000], jnp.int32)
    before = np.asarray(cache.pages)
    got = run(write_latent, cache, kv, kr, slots, backend=backend)
    want = before.reshape(n, -1).copy()
    stored = np.concatenate([kv, kr], axis=1).astype(before.dtype)
    want[5], want[18] = stored[1], stored[3]
    np.testing.assert_array_equal(bits(got.pages).reshape(n, -1), bits(want))


def test_plain_write_keeps_every_bit(backend):
    """All 2**16 bfloat16 patterns, NaNs included."""
    codes = np.arange(2**16, dtype=np.uint16).reshape(-1, 128).view(ml_dtypes.bfloat16)
    cache = alloc(num_pages=32, page=16, rank=64, rope=64, format="bf16")
    x = jnp.asarray(codes)
    slots = jnp.arange(512, dtype=jnp.int32)
    got = run(write_latent, cache, x[:, :64], x[:, 64:], slots, backend=backend)
    np.testing.assert_array_equal(bits(got.pages).reshape(-1, 128), codes.view(np.uint16))


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (500.0, 0x7E), (-1e30, 0xFE), (448.0, 0x7E), (447.0, 0x7E), (460.0, 0x7E), (17.0, 0x58),
        (19.0, 0x5A), (336.0, 0x7A), (33.0, 0x60), (2.0**-10, 0x00), (1.5 * 2**-9, 0x02),
        (np.inf, 0x7E), (17 + 2**-10, 0x59), (0.0, 0x00),
    ],
)  # fmt: skip
def test_fp8_rounds_to_nearest_even_and_saturates(value, byte, backend):
    cache = alloc(format="fp8_e4m3", num_pages=1, page=1)
    kv, kr = jnp.full((1, TINY.rank), value), jnp.full((1, TINY.rope), value)
    got = run(write_latent, cache, kv, kr, jnp.array([0], jnp.int32), backend=backend)
    assert set(bits(got.pages).ravel()) == {byte}


@FORMAT
@SIZES
def test_write_then_gather_round_trip(dims, page, format, backend, rng):
    cache = alloc(dims, page=page, format=format, scale=0.5 if format == "fp8_e4m3" else 1.0)
    dtype = DTYPE.get(format, "bfloat16")
    kv, kr = (jnp.asarray(draw(rng, 6, n, dtype=dtype)) for n in (dims.rank, dims.rope))
    table = jnp.array([[3, 1, GARBAGE_PAGE]], jnp.int32)
    slots = jnp.array([*(4 * page - 4 + np.arange(4)), page, page + 1], jnp.int32)
    cache = run(write_latent, cache, kv, kr, slots, backend=backend)
    one = jnp.array([page - 4], jnp.int32)
    ends = jnp.array([0, 6], jnp.int32)
    got = run(
        gather_latent, cache, table, one, ends, rows=8, dtype=jnp.dtype(dtype), backend=backend
    )
    got = np.asarray(got).astype(np.float32)
    x = np.concatenate([kv, kr], axis=1).astype(np.float32)
    scale = np.float32(cache.scale)
    want = (x / scale).astype(FORMATS[format].dtype).astype(np.float32) * scale
    np.testing.assert_array_equal(got[:6], want)
    assert not np.asarray(got[6:]).any()


@FORMAT
@SIZES
def test_gather_any_start(dims, page, format, backend, rng):
    """Unaligned starts, empty requests, padding rows zero, poisoned rest."""
    scale = 0.3 if format == "fp8_e4m3" else 1.0
    dtype = jnp.dtype(DTYPE.get(format, "bfloat16"))
    lens, first, take = [2 * page + 3, 0, 2 * page + 1, 4], [6, 0, 0, 3], [5, 0, page + 3, 1]
    cache, table, rows = paged(rng, lens, dims=dims, page=page, format=format, scale=scale)
    got = run(
        gather_latent, cache, table, jnp.asarray(first, jnp.int32), jnp.asarray(starts(take)),
        rows=page + 12, dtype=dtype, backend=backend,
    )  # fmt: skip
    want = [x[f : f + n] for x, f, n in zip(rows, first, take, strict=True)]
    want = np.concatenate([*want, np.zeros((3, dims.row))])
    np.testing.assert_array_equal(bits(got), bits(want.astype(np.float32).astype(dtype)))


@SIZES
def test_gather_outside_the_table_is_zero(dims, page, backend, rng):
    cache, table, rows = paged(rng, [2 * page], dims=dims, page=page)
    where = jnp.array([2 * page - 2], jnp.int32), jnp.array([0, 4], jnp.int32)
    got = run(gather_latent, cache, table, *where, rows=4, dtype=jnp.bfloat16, backend=backend)
    np.testing.assert_array_equal(np.asarray(got[:2]).astype(np.float64), rows[0][-2:])
    assert not np.asarray(got[2:]).any()


@pytest.mark.parametrize(("requests", "width", "rows"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_gather_nothing(requests, width, rows, backend):
    zeros = [jnp.zeros(s, jnp.int32) for s in ((requests, width), (requests,), (requests + 1,))]
    cache = alloc(WIDE, page=16)
    got = run(gather_latent, cache, *zeros, rows=rows, dtype=jnp.bfloat16, backend=backend)
    assert got.shape == (rows, WIDE.row) and not np.asarray(got).any()


@FORMAT
def test_copy_blocks_reads_before_it_writes(format, backend, rng):
    cache, _, _ = paged(rng, [20], dims=TINY, page=4, format=format, spare=0)
    pairs = jnp.array([[0, 1], [1, 2], [0, 3], [-1, 4], [2, -1]], jnp.int32)
    old = bits(cache.pages)
    got = bits(run(copy_blocks, cache, pairs, backend=backend).pages)
    np.testing.assert_array_equal(got, old[[0, 0, 1, 0, 4]])


@FORMAT
def test_swap_blocks_copies_one_way(format, backend, rng):
    src, _, _ = paged(rng, [8], dims=TINY, page=4, format=format, spare=1)
    dst, _, _ = paged(rng, [20], dims=TINY, page=4, format=format, spare=0)
    pairs = jnp.array([[1, 4], [0, 2], [-1, 0], [7, 1]], jnp.int32)
    got = bits(run(swap_blocks, src, dst, pairs, backend=backend).pages)
    want = bits(dst.pages).copy()
    want[4], want[2] = bits(src.pages)[1], bits(src.pages)[0]
    np.testing.assert_array_equal(got, want)
    none = run(copy_blocks, dst, jnp.zeros((0, 2), jnp.int32), backend=backend)
    np.testing.assert_array_equal(bits(none.pages), bits(dst.pages))


def test_a_stack_of_one_layer_is_no_cache_of_one_layer():
    sizes = {"num_pages": 2, "page": 4, "rank": 2, "rope": 0}
    one, stack = LatentCache.alloc(**sizes), LatentCache.alloc(**sizes, layers=1)
    pairs = jnp.array([[1, 0]], jnp.int32)
    for src, dst, layer in ((one, stack, 0), (stack, one, None)):
        with pytest.raises(ArgumentError, match="swap_blocks: src"):
            swap_blocks(src, dst, pairs, layer=layer)


@given(seed=st.integers(0, 2**16), page=st.sampled_from([1, 3, 4]))
def test_gather_splits_anywhere(seed, page):
    """Gathering a range in two pieces, cut at any position, equals gathering it whole."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 13, size=3)
    cut = [int(rng.integers(0, n + 1)) for n in lens]
    spare = 40 - sum(-(-int(n) // page) for n in lens)  # one shape, one program
    cache, table, _ = paged(rng, lens, dims=TINY, page=page, format="fp32", width=13, spare=spare)

    def gather(first, take):
        first, take = jnp.asarray(first, jnp.int32), jnp.asarray(starts(take))
        args = cache, table, first, take
        return run(gather_latent, *args, rows=40, dtype=jnp.float32, backend=None)

    whole, a, b = gather([0] * 3, lens), gather([0] * 3, cut), gather(cut, lens - cut)
    at, at_a, at_b = starts(lens), starts(cut), starts(lens - cut)
    for r in range(3):
        joined = np.concatenate([a[at_a[r] : at_a[r + 1]], b[at_b[r] : at_b[r + 1]]])
        np.testing.assert_array_equal(whole[at[r] : at[r + 1]], joined)


@pytest.mark.slow
def test_offsets_past_two_to_the_31(backend):
    """The last rows of an fp8 cache of more than 2**31 elements (2.1 GB)."""
    cache = alloc(num_pages=(2**31 // (64 * 576)) + 2, page=64, rank=512, rope=64,
                  format="fp8_e4m3")  # fmt: skip
    assert cache.pages.size > 2**31
    last = cache.num_slots - 1
    x = jnp.full((2, 576), 2.0, jnp.bfloat16)
    write = jax.jit(
        lambda c: write_latent(c, x[:, :512], x[:, 512:], jnp.array([last, -1], jnp.int32)),
        donate_argnums=0,
    )
    cache = write(cache)
    table = jnp.array([[cache.num_pages - 1]], jnp.int32)
    where = jnp.array([62], jnp.int32), jnp.array([0, 2], jnp.int32)
    got = run(gather_latent, cache, table, *where, rows=2, dtype=jnp.bfloat16, backend=backend)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.repeat([[0.0], [2.0]], 576, axis=1)
    )
