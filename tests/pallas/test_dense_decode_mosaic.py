"""Backend ``mosaic`` of dense decode: interpreted, compiled for an H200, and on a GPU.

The shared suite in ``test_dense_decode.py`` runs it on a GPU too, on the cases it accepts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import FORMATS, LatentCache
from mla_jax.errors import ArgumentError
from mla_jax.metadata.mla import DecodeMetadata
from mla_jax.ops import explain, mla_decode
from mla_jax.pallas.dense_decode import buffers_sm90, few_sm90, mosaic
from mla_jax.pallas.dense_decode.sizes_sm90 import Sizes
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.mosaic_lib import SHARED_MEMORY, shared_bytes
from tests import aot
from tests.cases import GLM, V2_LITE, V3, decode_case, steep
from tests.compare import judge, same_bits

OP = "mla_decode"
H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)


heuristic = functools.partial(mosaic.heuristic, workers=H200.sms)


def judge_decode(state, case, **allowed):
    judge(state, case, [(q, k, k[:, :512], seen) for q, k, seen in case.parts], **allowed)


def attend(case, tuning=None, interpret=None):
    q_latent, q_rope, cache, meta = case.args
    tokens, heads, _ = q_latent.shape
    tuning = tuning or heuristic(heads, meta.max_query_len, cache.format.quantised)
    plan = mosaic.make_plan(
        meta.seq_lens, meta.query_starts, tokens=tokens, heads=heads,
        max_query_len=meta.max_query_len, page=cache.page, width=meta.page_table.shape[1],
        tuning=tuning,
    )  # fmt: skip
    return mosaic.attend(
        q_latent, q_rope, cache.pages, cache.scale, meta.page_table, plan, scale=case.scale,
        format=cache.format, tuning=tuning, interpret=interpret,
    )  # fmt: skip


INTERPRETED = {
    "pieces_and_padding": {"seq_lens": [70, 1, 0, 130], "page": 64},
    "ragged_queries": {"seq_lens": [70, 3, 1], "query_lens": [2, 3, 1], "page": 32},
    "one_block_each": {"seq_lens": [3, 1, 2, 60, 1], "page": 16},
    "around_the_ring": {"seq_lens": [450, 40], "page": 128},
}
FP8 = {"format": "fp8_e4m3", "cache_scale": 0.37}
INTERPRETED |= {f"{name}_fp8": case | FP8 for name, case in INTERPRETED.items()}
INTERPRETED["one_block_each_fp8"] |= {"dtype": "float16"}
INTERPRETED["rising_maxima"] = {"seq_lens": [450], "page": 64}


@pytest.mark.slow
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_with_race_detection(name, defer, rng, capsys):
    """Control flow, barriers and races on a CPU; not asynchrony of products, nor registers."""
    dims = dataclasses.replace(V2_LITE, heads=8)
    case = decode_case(rng, dims=dims, **INTERPRETED[name])
    case = steep(case, 6.0) if name == "rising_maxima" else case
    found = heuristic(8, case.args[3].max_query_len)
    tuning = dataclasses.replace(found, workers=2, defer=defer, prefetch=defer, few=False)
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    judge_decode(attend(case, tuning, params), case)
    assert not get_races().races_found  # of the last kernel, the merge
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True])
def test_interpreted_batch_invariant(few, rng):
    """Pieces of a worker in the order of their size, not of their keys."""
    dims = dataclasses.replace(V2_LITE, heads=8)
    case = decode_case(rng, dims=dims, seq_lens=[70, 1, 0, 200], page=64)
    changes = {"workers": 2, "batch_invariant": True, "chunk": 2, "few": few}
    tuning = dataclasses.replace(heuristic(8, 1), **changes)
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    judge_decode(attend(case, tuning, params), case)
    assert not get_races().races_found


INTERPRETED_FEW = {
    "pieces_and_padding": {"seq_lens": [70, 1, 0, 130], "page": 64},
    "ragged_queries": {"seq_lens": [70, 3, 1], "query_lens": [2, 2, 1], "page": 32},
    "one_block_each": {"seq_lens": [3, 1, 2, 60, 1], "page": 16, "dtype": "float16"},
    "around_the_ring": {"seq_lens": [450, 40], "page": 128},
    "rising_maxima": {"seq_lens": [450], "page": 64},
}
FP16 = {"dtype": "float16", "format": "fp16"}
INTERPRETED_FEW |= {f"{name}_fp8": case | FP8 for name, case in INTERPRETED_FEW.items()}
INTERPRETED_FEW["one_block_each"] |= FP16
INTERPRETED_FEW["ragged_queries_fp8"] |= {"query_lens": [2, 3, 1]}
more = {"seq_lens": [70, 0, 130], "query_lens": [4, 1, 3], "page": 16}
INTERPRETED_FEW["one_buffer_of_queries_fp8"] = more | FP8
INTERPRETED_FEW["one_buffer_of_queries"] = more | {"query_lens": [2, 1, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED_FEW)
def test_few_rows_interpreted_with_race_detection(name, rng, capsys):
    """Queries as columns: a third of the heads are padding."""
    spec = INTERPRETED_FEW[name]
    quantised = FORMATS[spec.get("format", "bf16")].quantised
    case = decode_case(rng, dims=dataclasses.replace(V2_LITE, heads=5), **spec)
    case = steep(case, 6.0) if name.startswith("rising_maxima") else case
    found = heuristic(5, case.args[3].max_query_len, quantised)
    assert found.few
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    judge_decode(attend(case, dataclasses.replace(found, workers=2), params), case)
    assert not get_races().races_found
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("heads", "quantised"), [(8, False), (16, False), (8, True), (16, True), (32, True)]
)
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_shared_memory_of_few_rows_fits(heads, quantised, page, dtype):
    sizes = Sizes(heads=heads, queries=1, page=page, workers=1)
    scratch = few_sm90.scratch(dtype, sizes, quantised)
    assert shared_bytes(scratch) + few_sm90.REDUCTION <= SHARED_MEMORY


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("quantised", [False, True])
def test_shared_memory_fits(copies, dtype, quantised):
    scratch = buffers_sm90.scratch(dtype, copies, simulate=False, quantised=quantised)
    assert shared_bytes(scratch) <= SHARED_MEMORY


def specs(heads, queries, page, dtype, format, batch=4, width=32, layers=()):
    spec = jax.ShapeDtypeStruct
    tokens = batch * queries
    return (
        spec((tokens, heads, 512), dtype),
        spec((tokens, heads, 64), dtype),
        spec((*layers, 64, page, 576), format.dtype),
        spec(layers, jnp.float32),
        spec((batch, width), jnp.int32),
        spec((batch,), jnp.int32),
        spec((batch + 1,), jnp.int32),
    )


COMPILED = [  # heads, queries, page, dtype, format
    (16, 1, 64, "bfloat16", "bf16"),
    (128, 1, 64, "bfloat16", "bf16"),
    (20, 4, 16, "bfloat16", "bf16"),
    (64, 2, 128, "float16", "fp16"),
    (8, 2, 16, "float16", "fp16"),
    (32, 1, 64, "bfloat16", "bf16"),
    (16, 1, 64, "float16", "fp8_e4m3"),
    (32, 1, 16, "bfloat16", "fp8_e4m3"),
    (128, 1, 128, "bfloat16", "fp8_e4m3"),
    (20, 4, 16, "bfloat16", "fp8_e4m3"),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize(
    ("heads", "queries", "page", "dtype", "format", "layers"),
    [
        *((*sizes, ()) for sizes in COMPILED),
        *((*sizes, (27,)) for sizes in COMPILED[1::4]),
    ],
)
def test_compiles_for_sm90(heads, queries, page, dtype, format, layers):
    """Products stay asynchronous, the register division holds, plan and merge spill nothing."""
    stored = FORMATS[format]
    found = heuristic(heads, queries, stored.quantised)
    more = {"max_query_len": queries, "scale": 0.1, "out_dtype": dtype, "tuning": found}
    fn = functools.partial(mosaic.dense_decode, format=stored, **more)
    args = specs(heads, queries, page, jnp.dtype(dtype), stored, layers=layers)
    number = [jax.ShapeDtypeStruct((), jnp.int32)] if layers else [None]
    _, reports = aot.compile_sm90(lambda i, *args: fn(*args, layer=i), *number, *args)
    kernels = {r.name.rsplit("_", 1)[0]: r for r in reports}
    few = found.few
    main = kernels["mla_dense_decode_few" if few else "mla_dense_decode"]
    merge = kernels["mla_dense_decode_combine"]
    assert not main.serialized, main.log
    assert not main.register_limits_ignored, main.log
    assert main.registers <= 128 if few else main.registers == 168
    assert main.shared <= SHARED_MEMORY
    assert main.spilled <= (0 if few else SPILLS[stored.quantised]), main.log
    assert merge.spilled == 0, merge.log
    assert kernels["mla_dense_decode_plan"].spilled == 0


SPILLS = {False: 240, True: 320}
"""Bytes of a thread, by whether the cache is quantised: scalars with the assembler of CUDA 13.0.
56 to 80 and 120 with pages of 64 or more, 232 and 304 with pages of 16."""


def test_explain_names_the_missing_capability():
    cache = jax.eval_shape(lambda: LatentCache.alloc(num_pages=8, page=64, rank=512, rope=64))
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    meta = DecodeMetadata(
        max_query_len=1, page_table=int32((2, 4)), seq_lens=int32((2,)), query_starts=int32((3,))
    )
    q = [jax.ShapeDtypeStruct((2, 16, n), jnp.float16) for n in (512, 64)]
    text = explain("mla_decode", *q, cache, meta, scale=1.0, device=H200)
    assert "dtype+out+cache=float16+float16+bf16 not in" in text
    q = [jax.ShapeDtypeStruct((2, 16, n), jnp.bfloat16) for n in (512, 64)]
    text = explain("mla_decode", *q, cache, meta, scale=1.0, device=H200)
    assert "runs mosaic\n  Tuning(" in text
    assert "heuristic: nothing near was measured on NVIDIA H200" in text


def test_heuristic_follows_the_rows_of_a_tile():
    assert heuristic(16, 4).defer
    assert not heuristic(16, 4, quantised=True).defer
    assert not heuristic(16, 4, quantised=True).few
    assert heuristic(16, 2, quantised=True).few
    assert heuristic(16, 1).few
    assert not heuristic(16, 2).few
    assert not heuristic(64, 1).prefetch
    assert not heuristic(128, 1, quantised=True).defer
    assert heuristic(20, 3).prefetch


@pytest.mark.parametrize(
    ("heads", "format", "most"), [(24, "bf16", "16 rows"), (40, "fp8_e4m3", "32 rows")]
)
def test_few_rows_refuse_what_they_cannot(heads, format, most, rng):
    dims = dataclasses.replace(V2_LITE, heads=heads)
    case = decode_case(rng, dims=dims, seq_lens=[3], page=16, format=format)
    tuning = dataclasses.replace(heuristic(heads, 1), few=True)
    with pytest.raises(ArgumentError, match=f"{most} at most"):
        attend(case, tuning)


ON_DEVICE = {
    "v3": {"dims": V3, "seq_lens": [65, 1, 0, 300, 4096, 1000, 64, 0, 130], "page": 64},
    "v2_lite": {"dims": V2_LITE, "seq_lens": [3000, 17, 0, 900], "page": 64},
    "glm": {"dims": GLM, "seq_lens": [3000, 17, 0, 900], "page": 128},
    "four_queries": {"dims": V3, "seq_lens": [4, 300, 3], "query_lens": [4, 2, 4], "page": 32},
    "fp16": {
        "dims": V2_LITE, "seq_lens": [500, 80], "page": 16, "format": "fp16", "dtype": "float16",
    },
    "one_long": {"dims": V2_LITE, "seq_lens": [30000], "page": 64, "pad_tokens": 0},
    "one_huge": {"dims": V2_LITE, "seq_lens": [40000, *range(1, 120)], "page": 64},
}  # fmt: skip
ON_DEVICE |= {
    f"{name}_fp8": ON_DEVICE[name] | FP8
    for name in ("v3", "glm", "four_queries", "fp16", "one_huge")
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_device(name, rng):
    case = decode_case(rng, **ON_DEVICE[name])
    solve = functools.partial(mla_decode, *case.args, scale=case.scale, backend="mosaic")
    first = solve()
    judge_decode(first, case)
    for _ in range(5):
        same_bits(first, solve())


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 24, 40, 64, 96, 128])
def test_heads_and_queries(heads, queries, rng):
    dims = dataclasses.replace(V3, heads=heads)
    lens, counts = [130, 0, 700, 4], [queries, 1, queries, max(queries - 1, 1)]
    case = decode_case(
        rng, dims=dims, seq_lens=lens, query_lens=counts, page=64, max_query_len=queries
    )
    judge_decode(attend(case), case)
    found = heuristic(heads, queries)
    if found.few:
        judge_decode(attend(case, dataclasses.replace(found, few=False)), case)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.01, 2.0, 6.0, 40.0])
@pytest.mark.parametrize(("heads", "format"), [(16, "bf16"), (128, "bf16"), (16, "fp8_e4m3")])
def test_maxima_that_rise_by_little_and_by_much(heads, format, factor, rng):
    """Tensor cores truncate each of the 36 additions of a score of 576 columns: a model of that
    on a CPU misses the largest lse, 319, by 2**-20.1 of it, rounding to nearest by 2**-22.4.
    """
    dims = dataclasses.replace(V3, heads=heads)
    case = decode_case(rng, dims=dims, seq_lens=[5000, 300], page=64, format=format)
    case = steep(case, factor)
    judge_decode(attend(case), case, lse_rounding=2.0**-20)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_both_schedules_over_fp8(heads, queries, rng):
    """A scale per tensor, every other unused row a negative NaN."""
    case = decode_case(
        rng, dims=dataclasses.replace(V3, heads=heads), seq_lens=[130, 0, 700, 4],
        query_lens=[queries, 1, queries, max(queries - 1, 1)], page=64, max_query_len=queries,
        format="fp8_e4m3", cache_scale=3.1, dtype="float16" if heads == 16 else "bfloat16",
    )  # fmt: skip
    q_latent, q_rope, cache, meta = case.args
    pages = jnp.where(jnp.isnan(cache.pages).at[:, ::2].set(False), -cache.pages, cache.pages)
    args = q_latent, q_rope, dataclasses.replace(cache, pages=pages), meta
    for defer in (False, True):
        tuning = dataclasses.replace(heuristic(heads, queries), defer=defer, prefetch=defer)
        judge_decode(attend(dataclasses.replace(case, args=args), tuning), case)


FEW = [
    (1, 1, 16, "bfloat16", "bf16"), (8, 1, 128, "float16", "fp16"), (8, 2, 16, "bfloat16", "bf16"),
    (8, 2, 32, "float16", "fp16"), (16, 1, 32, "bfloat16", "bf16"), (16, 1, 64, "bfloat16", "bf16"),
    (16, 1, 128, "float16", "fp16"), (12, 1, 16, "bfloat16", "bf16"),
    (1, 1, 16, "bfloat16", "fp8_e4m3"), (8, 1, 128, "float16", "fp8_e4m3"),
    (8, 3, 16, "bfloat16", "fp8_e4m3"), (8, 4, 32, "float16", "fp8_e4m3"),
    (16, 1, 32, "bfloat16", "fp8_e4m3"), (16, 1, 64, "float16", "fp8_e4m3"),
    (16, 2, 64, "bfloat16", "fp8_e4m3"), (20, 1, 16, "float16", "fp8_e4m3"),
    (24, 1, 128, "bfloat16", "fp8_e4m3"), (32, 1, 64, "bfloat16", "fp8_e4m3"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "queries", "page", "dtype", "format"), FEW)
def test_few_rows(heads, queries, page, dtype, format, rng):
    """Two workers or all of them: long pieces, many of one block, NaN of either sign."""
    lens = [700, 130, 0, 4, 64, *[5] * 9, 65, 1, 1000]
    counts = [max(queries - r % 3, 1) for r in range(len(lens))]
    case = decode_case(
        rng, dims=dataclasses.replace(V3, heads=heads), seq_lens=lens, query_lens=counts, page=page,
        max_query_len=queries, format=format, cache_scale=3.1 if FORMATS[format].quantised else 1.0,
        dtype=dtype,
    )  # fmt: skip
    q_latent, q_rope, cache, meta = case.args
    pages = jnp.where(jnp.isnan(cache.pages).at[:, ::2].set(False), -cache.pages, cache.pages)
    args = q_latent, q_rope, dataclasses.replace(cache, pages=pages), meta
    case = dataclasses.replace(case, args=args)
    found = heuristic(heads, queries, FORMATS[format].quantised)
    assert found.few
    for workers in (2, found.workers):
        tuning = dataclasses.replace(found, workers=workers)
        solve = jax.jit(lambda *args, t=tuning: attend(dataclasses.replace(case, args=args), t))
        first = solve(*args)
        judge_decode(first, case)
        for _ in range(20):
            same_bits(first, solve(*args))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "format"), [(16, "bf16"), (128, "bf16"), (16, "fp8_e4m3")])
def test_batch_invariance(heads, format, rng):
    """A request gives the same bits in batches of 1 to 64 requests, and in another shape."""
    dims = dataclasses.replace(V3, heads=heads)
    lens = [5000, 77, 3000, 640, 1, *rng.integers(1, 2000, 59)]
    case = decode_case(
        rng, dims=dims, seq_lens=lens, page=64, pad_tokens=0, pad_requests=0, format=format
    )
    found = heuristic(heads, 1, FORMATS[format].quantised)
    tuning = dataclasses.replace(found, batch_invariant=True, chunk=8)
    solve = jax.jit(lambda *args: attend(dataclasses.replace(case, args=args), tuning))
    q_latent, q_rope, cache, meta = case.args
    full = solve(*case.args)
    for live in range(1, 65):  # the rest is padding
        count = jnp.arange(65, dtype=jnp.int32)
        batch = dataclasses.replace(
            meta,
            seq_lens=jnp.where(count[:-1] < live, meta.seq_lens, 0),
            query_starts=jnp.minimum(count, live),
        )
        state = solve(q_latent, q_rope, cache, batch)
        np.testing.assert_array_equal(state.out[:live], full.out[:live])
        np.testing.assert_array_equal(state.lse[:live], full.lse[:live])
    at = np.array([2, 0, 4])
    few = dataclasses.replace(
        meta,
        page_table=meta.page_table[at],
        seq_lens=meta.seq_lens[at],
        query_starts=jnp.arange(4, dtype=jnp.int32),
    )
    state = solve(q_latent[at], q_rope[at], cache, few)
    np.testing.assert_array_equal(state.out, full.out[at])
    np.testing.assert_array_equal(state.lse, full.lse[at])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "heads", "elements"),
    [
        ("bf16", 16, 2**31),
        ("fp8_e4m3", 16, 2**31),
        ("fp8_e4m3", 16, 2**32),
        ("fp8_e4m3", 64, 2**32),
    ],
)
def test_page_ids_beyond_two_gigaelements(format, heads, elements, rng):
    """Rows that lie behind so many elements of the cache."""
    dims = dataclasses.replace(V2_LITE, heads=heads)
    case = decode_case(rng, dims=dims, seq_lens=[300, 70], page=64, format=format)
    q_latent, q_rope, cache, meta = case.args
    before = elements // (64 * 576) + 1

    @jax.jit  # in one program: the unused pages do not exist apart
    def behind_unused(pages):
        unused = jnp.full((before, *pages.shape[1:]), jnp.nan, pages.dtype)
        return jnp.concatenate([unused, pages])

    far = dataclasses.replace(cache, pages=behind_unused(cache.pages))
    table = jnp.where(meta.page_table < 10**6, meta.page_table + before, meta.page_table)
    args = (q_latent, q_rope, far, dataclasses.replace(meta, page_table=table))
    judge_decode(attend(dataclasses.replace(case, args=args)), case)
