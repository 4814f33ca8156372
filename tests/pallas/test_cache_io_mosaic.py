"""Backend ``mosaic`` of cache traffic: interpreted, compiled for an H200, and on a GPU.

The shared suite in ``test_cache_io.py`` runs it on a GPU too, on the cases it accepts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.ops import explain, gather_latent, write_latent
from mla_jax.pallas.cache_io import mosaic, units_sm90, write_sm90
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.mosaic_lib import SHARED_MEMORY, shared_bytes
from tests import aot
from tests.cases import V3, draw, paged, starts

H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)
SMALL = MLADims(heads=1, rank=64, nope=8, rope=64, v=8, q_rank=None)
DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "bfloat16"}
FORMAT = pytest.mark.parametrize("format", DTYPE)


def bits(x):
    """Raw bytes, so that NaNs compare."""
    return np.asarray(x).view(np.uint8)


def gather_case(
    rng, lens, first, take, *, rows, lead=0, dims=V3, page=64, format="bf16", scale=0.3
):
    """Arguments of ``gather_latent`` and its rows; ``lead`` rows before the first are nobody's."""
    scale = scale if FORMATS[format].quantised else 1.0
    cache, table, parts = paged(rng, lens, dims=dims, page=page, format=format, scale=scale)
    dtype = jnp.dtype(DTYPE[format])
    ends = starts(take) + np.int32(lead)
    want = np.zeros((max(rows, ends[-1]), dims.row), dtype)
    for r, (f, n) in enumerate(zip(first, take, strict=True)):
        got = parts[r][f : f + n].astype(np.float32).astype(dtype)  # behind the table: zeros
        want[ends[r] : ends[r] + len(got)] = got
    args = cache, table, jnp.asarray(first, jnp.int32), jnp.asarray(ends)
    return args, {"rows": rows, "dtype": dtype}, want[:rows]


def gather(args, kwargs, **more):
    cache, *index = args
    return mosaic.gather_latent(
        cache.pages, cache.scale, *index, format=cache.format, **kwargs, **more
    )


def write_case(rng, slots, *, surplus=3, num_pages=6, dims=V3, page=64, format="bf16", scale=0.3):
    """Arguments of ``write_latent``, the cache full of NaN, and the pages it should give."""
    fmt, dtype = FORMATS[format], DTYPE[format]
    scale = scale if fmt.quantised else 1.0
    pages = np.full((num_pages, page, dims.row), np.nan).astype(jnp.dtype(fmt.dtype))
    cache = LatentCache(
        pages=jnp.asarray(pages), scale=jnp.float32(scale), rank=dims.rank, format=fmt
    )
    x = draw(rng, len(slots) + surplus, dims.row, dtype=dtype)
    x[-surplus:] = np.nan
    stored = (
        x if not fmt.quantised else np.clip(x.astype(np.float32) / np.float32(scale), -448, 448)
    )
    want = pages.reshape(-1, dims.row)
    for s, row in zip(slots, stored.astype(pages.dtype), strict=False):
        if 0 <= s < len(want):
            want[s] = row
    data = jnp.asarray(x[:, : dims.rank]), jnp.asarray(x[:, dims.rank :])
    return (cache, *data, jnp.asarray(slots, jnp.int32)), pages


def write(args, **more):
    cache, *data = args
    return mosaic.write_latent(cache.pages, cache.scale, *data, format=cache.format, **more)


GATHERED = {
    "odd_starts": ([70, 0, 60, 33], [33, 0, 0, 32], [37, 0, 60, 1], {"rows": 112, "page": 32}),
    "fp8": ([30, 17], [5, 1], [25, 16], {"rows": 45, "page": 7, "format": "fp8_e4m3"}),
    "lead_and_tail": ([9, 40], [2, 7], [7, 33], {"rows": 75, "page": 64, "lead": 19}),
    "many_empty": ([1, 0] * 12, [0] * 24, [1, 0] * 12, {"rows": 16, "page": 16}),
    "behind_the_table": ([16], [9], [20], {"rows": 24, "page": 16}),
    "fp16_cut": ([130], [3], [127], {"rows": 100, "page": 128, "format": "fp16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GATHERED)
def test_interpreted_gather(name, rng):
    """Where every row lies, on a CPU, with race detection."""
    lens, first, take, more = GATHERED[name]
    args, kwargs, want = gather_case(rng, lens, first, take, dims=SMALL, **more)
    params = plgpu.InterpretGPUParams(detect_races=True)
    np.testing.assert_array_equal(bits(gather(args, kwargs, interpret=params)), bits(want))
    assert not get_races().races_found


WRITTEN = {
    "shuffled": {"format": "bf16", "slots": [*range(40, 60), -1, 5, 4, 95, -1, 96, 2**30, 7]},
    "one": {"format": "fp16", "slots": [17], "page": 3},
    "fp8": {"format": "fp8_e4m3", "scale": 0.5, "slots": [*range(60, 40, -1), -1, 96, 3]},
    "runs": {"format": "fp8_e4m3", "scale": 0.5, "slots": [*range(9, 33), 80, *range(89, 96)]},
    "none": {"format": "fp8_e4m3", "slots": [-1] * 9},
}  # a scale of 0.5, because the interpreter multiplies by the reciprocal


@pytest.mark.slow
@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("name", WRITTEN)
def test_interpreted_write(name, tile, rng):
    args, want = write_case(rng, dims=SMALL, **{"page": 16} | WRITTEN[name])
    params = plgpu.InterpretGPUParams(detect_races=True)
    tuning = mosaic.WriteTuning(tile=tile)
    got = write(args, tuning=tuning, interpret=params)
    np.testing.assert_array_equal(bits(got), bits(want))
    assert not get_races().races_found


@given(
    width=st.sampled_from([128, 192, 256, 320, 576, 640, 1088, 1152]),
    rows=st.integers(1, 40),
)
def test_every_unit_has_one_thread(width, rows):
    """All units once, those of a warp side by side; its rows fit its lanes."""
    block, thread = np.indices((units_sm90.blocks(rows, width), units_sm90.THREADS))
    spots = [units_sm90.spot(block, thread, i, width) for i in range(units_sm90.EACH)]
    row, unit = (np.stack(x, -1).reshape(-1, 32, units_sm90.EACH) for x in zip(*spots, strict=True))
    units = width // units_sm90.UNIT
    found = (row * units + unit).swapaxes(1, 2).ravel()
    np.testing.assert_array_equal(found, np.arange(len(found)))
    assert rows * units <= len(found) < rows * units + units_sm90.THREADS * units_sm90.EACH
    assert (unit < units).all()
    assert (row - row[:, :1, :1] < 32).all()


def test_no_number_of_a_spot_passes_32_bits():
    block = 2**30 - 1  # 4.4 terabytes of rows of 1152 elements
    each = units_sm90.EACH
    row, unit = units_sm90.spot(jnp.int32(block), jnp.int32(127), each - 1, 1152)
    assert (int(row), int(unit)) == divmod((block + 1) * 128 * each - 1, 144)


@pytest.mark.parametrize("requests", [1, 2, 31, 32, 33, 34, 65, 1088, 1200])
def test_the_search_finds_the_owner(requests, rng):
    ends = starts(rng.integers(0, 3, requests)) + np.int32(2)
    row = np.arange(ends[-1] + 2, dtype=np.int32)
    found = units_sm90.owner(jnp.asarray(ends), jnp.asarray(row))
    np.testing.assert_array_equal(found, np.searchsorted(ends[1:], row, side="right"))


@pytest.mark.parametrize("digits", [8, 11])  # of bfloat16 and float16
def test_one_correction_decides_every_tie(digits):
    """``write_sm90._quotient`` in float64, at the divisors that bring ``x / y`` next to a tie."""
    x = np.arange(2 ** (digits - 1), 2**digits, dtype=np.int64)[:, None, None]
    tie = np.arange(16, 32)[:, None]  # of e4m3: five digits, fewer among subnormal numbers
    y = (x << 24) // tie
    y = (y >> (np.int64(np.log2(y)) - 23)) + np.arange(-16, 17)
    x, y = (a.astype(np.float32) for a in np.broadcast_arrays(x, y))
    inverse = np.float32(1) / y
    q = (x * inverse).astype(np.float64)
    q += (x - q * y.astype(np.float64)).astype(np.float32) * inverse.astype(np.float64)
    np.testing.assert_array_equal(q.astype(np.float32), x / y)


@pytest.mark.parametrize("rank", [64, 512, 1024])
@pytest.mark.parametrize("rope", [64, 128])
@FORMAT
def test_shared_memory_of_a_write_fits(rank, rope, format):
    fmt, dtype = FORMATS[format], DTYPE[format]
    w = mosaic.write_tuning(tokens=10**6, quantised=fmt.quantised)
    out = write_sm90.scratch(
        (dtype, "float32" if fmt.quantised else dtype), fmt.dtype, tile=w.tile,
        widths=(rank, rope), quantised=fmt.quantised,
    )  # fmt: skip
    assert shared_bytes(out) <= SHARED_MEMORY


spec = jax.ShapeDtypeStruct
int32 = functools.partial(spec, dtype=jnp.int32)
CACHE_PAGES = 60_000  # 4.4 GB of bfloat16


def page_specs(format, page=64):
    dtype = jnp.dtype(FORMATS[format].dtype)
    return spec((CACHE_PAGES, page, 576), dtype), spec((), jnp.float32)


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize("page", [1, 16, 24, 128])
@FORMAT
def test_gather_compiles_for_sm90(format, page):
    fn = functools.partial(
        mosaic.gather_latent, rows=5000, dtype=DTYPE[format], format=FORMATS[format]
    )
    args = *page_specs(format, page), int32((200, 40)), int32((200,)), int32((201,))
    compiled, (report,) = aot.compile_sm90(fn, *args)
    assert report.spilled == 0, report.log
    assert report.registers <= 32, "less than 2048 threads of a multiprocessor"
    assert compiled.memory_analysis().temp_size_in_bytes < 10**6


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize("tokens", [1, 128, 5000])
@FORMAT
def test_write_compiles_for_sm90(format, tokens):
    """In place: the donated cache is the result, and nothing of its size is copied or made."""
    data = (spec((5000, n), jnp.dtype(DTYPE[format])) for n in (512, 64))
    pages, scale = page_specs(format)
    fn = functools.partial(mosaic.write_latent, format=FORMATS[format])
    args = pages, scale, *data, int32((tokens,))
    compiled, (report,) = aot.compile_sm90(fn, *args, donate=(0,))
    assert report.spilled == 0, report.log
    assert report.shared <= SHARED_MEMORY
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.size * pages.dtype.itemsize
    assert memory.temp_size_in_bytes < 10**6
    assert " copy(" not in compiled.as_text()


def test_explain_names_the_missing_capability():
    cache = jax.eval_shape(lambda: LatentCache.alloc(num_pages=8, page=24, rank=520, rope=64))
    rows = [spec((4, n), jnp.bfloat16) for n in (520, 64)]
    text = explain("write_latent", cache, *rows, int32((4,)), device=H200)
    assert "rank=520 not in [64, 1024] multiples of 64" in text
    index = int32((2, 4)), int32((2,)), int32((3,))
    text = explain("gather_latent", cache, *index, rows=9, dtype="float32", device=H200)
    assert "out+cache=float32+bf16 not in" in text


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 7, 16, 32, 48, 64, 128])
@FORMAT
def test_gather_on_device(format, page, rng):
    """One huge request among small and empty ones, any start, poison everywhere else."""
    lens = [5000, 0, 1, page - 1, page, page + 1, 777, *rng.integers(0, 300, 60)]
    first = [int(rng.integers(0, n + 1)) for n in lens]
    take = [int(rng.integers(0, n - f + 1)) for n, f in zip(lens, first, strict=True)]
    total = sum(take)
    for rows, lead in ((total, 0), (total + 1000, 37), (max(total // 2, 1), 5)):
        case = lens, first, take
        args, kwargs, want = gather_case(rng, *case, rows=rows, lead=lead, page=page, format=format)
        solve = functools.partial(gather_latent, *args, **kwargs, backend="mosaic")
        first_time = np.asarray(solve())
        np.testing.assert_array_equal(bits(first_time), bits(want))
        for _ in range(3):
            np.testing.assert_array_equal(bits(solve()), bits(first_time))


@pytest.mark.gpu
@FORMAT
def test_gather_of_many_requests(format, rng):
    """Three rounds of the search, over requests of which most are empty."""
    lens = [*(rng.integers(0, 9, 1200) * (rng.random(1200) < 0.4))]
    case = lens, [n // 2 for n in lens], [n - n // 2 for n in lens]
    rows = int(sum(case[2])) + 3
    args, kwargs, want = gather_case(rng, *case, rows=rows, page=16, format=format)
    np.testing.assert_array_equal(bits(gather(args, kwargs)), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "rope"), [(64, 64), (128, 64), (1024, 128)])
@FORMAT
def test_rows_of_any_width_on_device(rank, rope, format, rng):
    """Threads of a warp on two rows, of a block on many."""
    dims = MLADims(heads=1, rank=rank, nope=8, rope=rope, v=8, q_rank=None)
    lens = [90, 0, 3, 1, 1, 40]
    args, kwargs, want = gather_case(
        rng, lens, [0] * 6, lens, rows=150, lead=2, dims=dims, page=16, format=format
    )
    np.testing.assert_array_equal(bits(gather(args, kwargs)), bits(want))
    slots = rng.permutation(96)[:61]
    args, want = write_case(rng, slots, dims=dims, page=16, format=format)
    np.testing.assert_array_equal(bits(write(args)), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 128, 3000])
@FORMAT
def test_write_on_device(format, tokens, rng):
    slots = rng.permutation(100 * 64)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    args, want = write_case(rng, slots, num_pages=100, format=format)
    got = write_latent(*args, backend="mosaic")
    np.testing.assert_array_equal(bits(got.pages), bits(want))


RUNS = {
    "whole": range(64, 64 + 48),
    "across_pages": range(39, 39 + 64),
    "to_the_last_row": range(640 - 32, 640),
    "over_the_end": range(640 - 24, 640 + 8),
    "with_a_hole": [*range(100, 109), -1, *range(110, 132)],
    "from_before_the_start": [*range(-16, 0), *range(16)],
    "backwards": range(200, 100, -1),
    "odd_tail": range(300, 339),
}


@pytest.mark.gpu
@pytest.mark.parametrize("page", [5, 16, 80, 128])
@FORMAT
def test_runs_of_neighbours_on_device(format, page, rng):
    """Slots in a row, in tiles that are full and not; the rows beside them keep their poison."""
    step = jax.jit(functools.partial(write_latent, backend="mosaic"))
    for name, run in RUNS.items():
        gap = [-1] * (117 - len(run))  # one shape, whose last tile is not full
        for slots in ([*run, *gap], [*gap[1:], *run, -1], [*gap, *run]):
            case = {"num_pages": 640 // page, "page": page, "format": format}
            args, want = write_case(rng, slots, **case)
            np.testing.assert_array_equal(bits(step(*args).pages), bits(want), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_quotient_is_rounded_once(dtype, rng):
    """All 16-bit numbers divided by odd scales: the byte of the rounded float32 quotient."""
    codes = np.arange(2**16, dtype=np.uint16).reshape(-1, 576 // 9)
    x = jnp.asarray(np.tile(codes, (1, 9)).view(dtype))
    n = x.shape[0]
    step = jax.jit(functools.partial(write_latent, backend="mosaic"))
    ties = rng.integers(128, 256, 40) / (rng.integers(8, 16, 40) * 2 + 1)  # x / tie: next to a tie
    ties = ties.astype(np.float32).view(np.int32) + rng.integers(-2, 3, 40, dtype=np.int32)
    for scale in (0.3, 1 / 3, 1.1e-3, 7.77, 2.0**-70, 3e30, *ties.view(np.float32)):
        cache = LatentCache.alloc(num_pages=16, page=64, rank=512, rope=64, format="fp8_e4m3",
                                  scale=float(scale))  # fmt: skip
        args = cache, x[:, :512], x[:, 512:], jnp.arange(n, dtype=jnp.int32)
        got = np.asarray(step(*args).pages).reshape(n, 576)
        with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs too
            quotient = np.asarray(x).astype(np.float32) / np.float32(scale)
        want = np.clip(quotient, -448, 448).astype(got.dtype)
        number = ~np.isnan(quotient)
        np.testing.assert_array_equal(bits(got)[number], bits(want)[number])
        assert np.isnan(got.astype(np.float32))[~number].all()


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_pages_behind_four_gigabytes(format, rng):
    """More than 2**32 elements in fp8 and 2**31 in bf16; the buffer stays where it is."""
    limit = 2**32 if format == "fp8_e4m3" else 2**31
    num_pages = limit // (64 * 576) + 3
    cache = LatentCache.alloc(num_pages=num_pages, page=64, rank=512, rope=64, format=format)
    tokens = 200
    x = jnp.asarray(draw(rng, tokens, 576, dtype="bfloat16"))
    slots = num_pages * 64 - 1 - rng.permutation(tokens)
    step = jax.jit(functools.partial(write_latent, backend="mosaic"), donate_argnums=0)
    where = cache.pages.unsafe_buffer_pointer()
    cache = step(cache, x[:, :512], x[:, 512:], jnp.asarray(slots, jnp.int32))
    assert cache.pages.unsafe_buffer_pointer() == where
    assert not np.asarray(cache.pages[:3]).astype(np.float32).any()
    pages = np.arange(num_pages - 4, num_pages)
    got = gather_latent(
        cache, jnp.asarray(pages[None], jnp.int32), jnp.array([0], jnp.int32),
        jnp.array([0, 256], jnp.int32), rows=256, dtype=jnp.bfloat16, backend="mosaic",
    )  # fmt: skip
    want = np.zeros((256, 576), np.float32)
    stored = np.asarray(x).astype(FORMATS[format].dtype).astype(np.float32)
    want[slots - (num_pages - 4) * 64] = stored
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want)


@pytest.mark.gpu
def test_a_kept_cache_is_not_changed(rng):
    """Without donation XLA copies: the old cache keeps its bits."""
    args, want = write_case(rng, rng.permutation(300))
    before = bits(args[0].pages).copy()
    got = jax.jit(functools.partial(write_latent, backend="mosaic"))(*args)
    np.testing.assert_array_equal(bits(args[0].pages), before)
    np.testing.assert_array_equal(bits(got.pages), bits(want))


@pytest.mark.gpu
@FORMAT
def test_little_of_everything(format, rng):
    """Small enough for ``tools/sanitize.sh``; every path of both kernels."""
    lens, first, take = [70, 0, 60, 33], [33, 0, 0, 32], [37, 0, 60, 1]
    more = {"rows": 130, "lead": 5, "page": 32, "format": format}
    args, kwargs, want = gather_case(rng, lens, first, take, **more)
    np.testing.assert_array_equal(bits(gather(args, kwargs)), bits(want))
    slots = [*range(9, 41), -1, 5, 4, *range(63, 50, -1), 64, 2**30]
    args, want = write_case(rng, slots, num_pages=2, page=32, format=format)
    np.testing.assert_array_equal(bits(write(args)), bits(want))
