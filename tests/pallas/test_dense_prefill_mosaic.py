"""Backend ``mosaic`` of dense prefill: interpreted, compiled for an H200, and on a GPU.

The shared suite in ``test_dense_prefill.py`` runs it on a GPU too, on the cases it accepts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.metadata.mla import PrefillMetadata
from mla_jax.ops import explain, mla_prefill
from mla_jax.pallas.dense_prefill import buffers_sm90, mosaic, ref
from mla_jax.pallas.dense_prefill import tile_plan as tp
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.mosaic_lib import SHARED_MEMORY, shared_bytes
from tests import aot
from tests.cases import GLM, V2_LITE, V3, prefill_case, starts, steep
from tests.compare import judge, same_bits

OP = "mla_prefill"
H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132)


heuristic = functools.partial(mosaic.heuristic, device=H200)


def of(dims, args, causal):
    """What the backend chooses for these arguments."""
    q, kv, *_, starts = *args[:3], getattr(args[3], "query_starts", args[3])
    return heuristic(
        q.shape[0], kv.shape[0], q.shape[1], requests=starts.shape[0] - 1, nope=dims.nope,
        rope=dims.rope, v=dims.v, causal=causal,
    )  # fmt: skip


def attend(case, *, causal=True, out_dtype=None, tuning=None, interpret=None):
    q, kv, k_rope, meta = case.args
    return mosaic.dense_prefill(
        q, kv, k_rope, meta.query_starts, meta.key_starts, scale=case.scale, causal=causal,
        out_dtype=out_dtype or q.dtype, tuning=tuning or of(case.dims, case.args, causal),
        interpret=interpret,
    )  # fmt: skip


INTERPRETED = {
    "ragged_and_padding": {"query_lens": [37, 150, 0, 1]},
    "other_keys": {"query_lens": [5, 70, 0, 61, 30], "key_lens": [133, 70, 9, 200, 10]},
    "full": {"query_lens": [40, 33], "key_lens": [20, 150], "causal": False},
    "rising_maxima": {"query_lens": [30], "key_lens": [500], "causal": False},
    "wide": {"dims": GLM, "query_lens": [5, 70, 0, 130], "key_lens": [133, 70, 9, 180]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_with_race_detection(name, rng):
    """Control flow, barriers and races on a CPU; not asynchrony of products, nor registers."""
    dims, causal = (INTERPRETED[name].get(k, x) for k, x in (("dims", V2_LITE), ("causal", True)))
    case = prefill_case(rng, **{**INTERPRETED[name], "dims": dataclasses.replace(dims, heads=1)})
    tuning = dataclasses.replace(
        heuristic(1, 1, 1, requests=1, nope=dims.nope, rope=dims.rope, v=dims.v, causal=causal),
        workers=2,
        dynamic=False,
    )
    case = steep(case, 6.0) if name == "rising_maxima" else case
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=4)
    state = attend(case, causal=causal, tuning=tuning, interpret=params)
    judge(state, case, case.parts)
    assert not get_races().races_found


def visible(plan, *, block, causal):
    """``{row: (first key, last key)}`` that the tiles of a plan give to each query."""
    found = {}
    with_keys, in_all = map(int, plan.counts)
    blocks = np.asarray(plan.tiles)[:in_all, tp.BLOCKS]
    assert (np.diff(blocks) <= 0).all() and (blocks[:with_keys] > 0).all()
    assert not blocks[with_keys:].any()
    for row, live, first, keys, offset, n, *_ in np.asarray(plan.tiles)[:in_all]:
        assert 0 < live <= tp.ROWS
        for i in range(live):
            seen = min(keys, i + int(offset) + 1) if causal else keys
            assert row + i not in found and seen <= n * block
            found[int(row + i)] = (int(first), max(int(seen), 0))
    return found


@pytest.mark.slow
@given(
    lens=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=5),
    pad=st.integers(0, 140),
    causal=st.booleans(),
)
def test_plan_covers_every_query_once(lens, pad, causal):
    queries, keys = zip(*lens, *[(0, 0)] * (5 - len(lens)), strict=True)
    qs, ks = starts(queries), starts(keys)
    # Few sizes, because shapes are compiled; none is a multiple of the block.
    tokens = next(n for n in (1, 127, 300, 901, 1700) if n >= qs[-1] + pad)
    sizes = {"tokens": tokens, "keys": 1501, "causal": causal}
    plan = tp.tiles(jnp.asarray(qs), jnp.asarray(ks), **sizes, block=128)
    begin, end = ref.key_spans(jnp.asarray(qs), jnp.asarray(ks), **sizes)
    found = visible(plan, block=128, causal=causal)
    assert sorted(found) == list(range(tokens))
    for t in range(int(qs[-1])):
        first, seen = found[t]
        assert seen == int(end[t] - begin[t]) and (first == int(begin[t]) or not seen)
    assert not any(found[t][1] for t in range(int(qs[-1]), tokens))


def specs(dims, dtype, tokens=1024):
    spec = jax.ShapeDtypeStruct
    return (
        spec((tokens, dims.heads, dims.qk), dtype),
        spec((tokens, dims.heads, dims.nope + dims.v), dtype),
        spec((tokens, dims.rope), dtype),
        spec((5,), jnp.int32),
        spec((5,), jnp.int32),
    )


SPILLS = 300
"""Bytes of a thread: scalars of the loader and of tile ends, none in the loop over blocks."""


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize(
    ("dims", "dtype", "out_dtype", "causal"),
    [
        (V2_LITE, "bfloat16", "bfloat16", True),
        (V2_LITE, "float16", "float16", True),
        (V2_LITE, "bfloat16", "float32", False),
        (GLM, "bfloat16", "bfloat16", True),
        (dataclasses.replace(GLM, nope=64, v=192), "bfloat16", "float32", False),
    ],
)
def test_compiles_for_sm90(dims, dtype, out_dtype, causal):
    """Products stay asynchronous, the register division holds, next to nothing spills."""
    args = specs(dims, jnp.dtype(dtype))
    more = {"out_dtype": jnp.dtype(out_dtype), "tuning": of(dims, args, causal)}
    fn = functools.partial(mosaic.dense_prefill, scale=0.1, causal=causal, **more)
    _, reports = aot.compile_sm90(fn, *args)
    (main,) = reports
    assert not main.serialized, main.log
    assert not main.register_limits_ignored, main.log
    assert main.registers == 168
    assert main.shared <= SHARED_MEMORY
    assert main.spilled <= SPILLS, main.log


def test_explain_names_the_missing_capability():
    meta = PrefillMetadata(
        query_starts=jnp.zeros((3,), jnp.int32), key_starts=jnp.zeros((3,), jnp.int32)
    )

    def text(dims, dtype, **kwargs):
        spec = jax.ShapeDtypeStruct
        q, kv = (spec((8, dims.heads, n), dtype) for n in (dims.qk, dims.nope + dims.v))
        args = q, kv, spec((8, dims.rope), dtype), meta
        return explain("mla_prefill", *args, scale=1.0, backend="mosaic", device=H200, **kwargs)

    assert "runs mosaic" in text(V3, jnp.bfloat16)
    assert "runs mosaic" in text(V2_LITE, jnp.float16, out_dtype=jnp.float32)
    assert "runs mosaic" in text(GLM, jnp.bfloat16)
    wider = dataclasses.replace(GLM, nope=256)
    assert "nope=256 not in [64, 192] multiples of 64" in text(wider, jnp.bfloat16)
    assert "dtype+out=float32+float32 not in" in text(V3, jnp.float32)


def test_heuristic_keeps_keys_in_the_cache():
    choose = functools.partial(heuristic, requests=2, nope=128, rope=64, v=128, causal=True)
    assert choose(8192, 8192, 128).heads_together == 2
    assert choose(100, 100, 16).heads_together == 16
    assert choose(10**6, 10**6, 16).heads_together == 1


def test_heuristic_draws_where_tiles_differ():
    choose = functools.partial(heuristic, 8192, 8192, 20, nope=192, rope=64, v=256)
    assert not choose(requests=1, causal=False).dynamic
    for tuning in (choose(requests=2, causal=False), choose(requests=1, causal=True)):
        assert tuning.dynamic and tuning.heads_together == 2 and tuning.heads_last == 2


def test_heuristic_ends_with_many_tiles():
    choose = functools.partial(heuristic, requests=1, nope=128, rope=64, v=128, causal=True)
    assert choose(4096, 4096, 16).heads_last == 10
    assert choose(2048, 2048, 16).heads_last == 16
    assert choose(10**6, 10**6, 16).heads_last == 1


@pytest.mark.parametrize("nope", [64, 128, 192])
@pytest.mark.parametrize("v", [64, 128, 192, 256])
def test_every_width_has_a_block_that_fits(nope, v):
    tuning = heuristic(1, 1, 1, requests=1, nope=nope, rope=64, v=v, causal=True)
    assert tuning.block == (128 if v <= 128 and nope + v <= 256 else 64)
    sizes = buffers_sm90.Sizes(nope=nope, rope=64, v=v, **dataclasses.asdict(tuning))
    buffers = buffers_sm90.scratch(sizes, jnp.bfloat16, jnp.bfloat16, simulate=False)
    assert shared_bytes(buffers) <= SHARED_MEMORY


ON_DEVICE = {
    "v3": {"dims": V3, "query_lens": [130, 0, 60, 1]},
    "v2_lite": {"dims": V2_LITE, "query_lens": [1000, 17, 0, 700], "pad": 300},
    "other_keys": {"dims": V2_LITE, "query_lens": [5, 700, 0, 61], "key_lens": [133, 700, 9, 900]},
    "few_keys": {"dims": V2_LITE, "query_lens": [300, 40], "key_lens": [100, 0]},
    "full": {"dims": V2_LITE, "query_lens": [40, 333, 9], "key_lens": [900, 190, 0],
             "causal": False},
    "fp16": {"dims": V2_LITE, "query_lens": [500, 80], "dtype": "float16"},
    "one_token": {"dims": V3, "query_lens": [1], "pad": 0},
    "glm": {"dims": GLM, "query_lens": [1000, 17, 0, 700], "pad": 300},
    "glm_other_keys": {"dims": GLM, "query_lens": [5, 700, 0, 61],
                       "key_lens": [133, 700, 9, 900], "dtype": "float16"},
    "glm_full": {"dims": GLM, "query_lens": [40, 333, 9], "key_lens": [900, 190, 0],
                 "causal": False},
    "narrow": {"dims": dataclasses.replace(V2_LITE, nope=64, v=192), "query_lens": [300, 77]},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_device(name, rng):
    case = prefill_case(rng, **ON_DEVICE[name])
    causal = ON_DEVICE[name].get("causal", True)
    solve = jax.jit(
        functools.partial(mla_prefill, scale=case.scale, causal=causal, backend="mosaic")
    )
    first = solve(*case.args)
    judge(first, case, case.parts)
    for _ in range(5):
        same_bits(first, solve(*case.args))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_ragged_against_the_reference(heads):
    """Thousands of tokens: no further from float32 than twice the same maths in bfloat16."""
    lens, pad = [1000, 3000, 17, 4500], 75
    begin = jnp.asarray(starts(lens))
    meta, n = PrefillMetadata(query_starts=begin, key_starts=begin), sum(lens)
    shapes = (n + pad, heads, 192), (n + pad, heads, 256), (n + pad, 64)
    keys = jax.random.split(jax.random.key(heads), 3)
    args = [
        jax.random.normal(k, s, jnp.bfloat16).at[n:].set(jnp.nan)
        for k, s in zip(keys, shapes, strict=True)
    ]
    state = mla_prefill(*args, meta, scale=192**-0.5, backend="mosaic")
    at = np.array([0, heads - 1])
    few = args[0][:, at], args[1][:, at], args[2], meta
    want = mla_prefill(*few, scale=192**-0.5, backend="xla", out_dtype=jnp.float32)
    got = state.out[:n, at].astype(jnp.float32)
    rounding = 2.0**-9 * float(jnp.abs(want.out).max())  # of the output alone
    assert float(jnp.abs(got - want.out[:n]).max()) < 4 * rounding
    np.testing.assert_allclose(state.lse[:n, at], want.lse[:n], atol=1e-4)
    assert not np.asarray(state.out[n:]).any() and np.isneginf(state.lse[n:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "lens", "causal"),
    [
        (V2_LITE, [512] * 16, True),
        (V2_LITE, [1, 17, 512, 130, 0, 700], True),
        (V2_LITE, [1, 17, 512, 130, 0, 700], False),
        (GLM, [1, 17, 512, 130, 0, 700], True),
    ],
)
def test_short_requests_again_and_again(dims, lens, causal, rng):
    """Thousands of calls end, with the same bits: tiles of few blocks are hardest on barriers."""
    case = prefill_case(rng, dims=dims, query_lens=lens, pad=0)
    q, kv, k_rope, meta = case.args

    @jax.jit
    def run(*args):
        return attend(dataclasses.replace(case, args=(*args, meta)), causal=causal)

    first, differs = run(q, kv, k_rope), jnp.zeros((), bool)
    for _ in range(2000):
        differs |= jnp.any(run(q, kv, k_rope).out != first.out)
    assert not differs


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.01, 2.0, 6.0, 40.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_maxima_that_rise_by_little_and_by_much(dtype, factor, rng):
    case = prefill_case(rng, dims=V2_LITE, query_lens=[700, 300], dtype=dtype)
    case = steep(case, factor)
    judge(attend(case), case, case.parts, lse_rounding=2.0**-21)


@pytest.mark.gpu
def test_float32_states(rng):
    """Context chunks are merged in float32: the result is not rounded on its way."""
    case = prefill_case(rng, dims=V2_LITE, query_lens=[300, 70], key_lens=[700, 600], causal=False)
    state = attend(case, causal=False, out_dtype=jnp.float32)
    assert state.out.dtype == jnp.float32
    judge(state, case, case.parts)
    rounded = attend(case, causal=False)
    np.testing.assert_array_equal(state.out.astype(jnp.bfloat16), rounded.out)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [V2_LITE, GLM], ids=["v2_lite", "glm"])
def test_permuting_requests_permutes_bits(dims, rng):
    lens = [300, 17, 129, 500]
    case = prefill_case(rng, dims=dims, query_lens=lens, pad=0)
    state, ends = attend(case), np.cumsum(lens)
    for order in ([2, 0, 3, 1], [3, 2, 1, 0]):
        at = np.concatenate([np.arange(ends[r] - lens[r], ends[r]) for r in order])
        begin = jnp.asarray(starts([lens[r] for r in order]))
        meta = PrefillMetadata(query_starts=begin, key_starts=begin)
        args = (*(x[at] for x in case.args[:3]), meta)
        want = dataclasses.replace(state, out=state.out[at], lse=state.lse[at])
        same_bits(attend(dataclasses.replace(case, args=args)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_rubbish_in_a_request_stays_there(poison, rng):
    """Beside it; inside it, from its tile on."""
    case = prefill_case(rng, dims=V2_LITE, query_lens=[200, 77, 260], pad=0)
    q, kv, k_rope, meta = case.args
    clean = attend(case)
    dirty = attend(dataclasses.replace(case, args=(q, kv.at[230].set(poison), k_rope, meta)))
    other = np.r_[0:200, 277:537]
    same_bits(*(jax.tree.map(lambda x: x[other], s) for s in (clean, dirty)))
    assert not np.isfinite(dirty.out[230:277].astype(jnp.float32)).any()


@pytest.mark.gpu
def test_scale_of_any_sign(rng):
    case = prefill_case(rng, dims=V2_LITE, query_lens=[150])
    q, *rest = case.args
    negated = dataclasses.replace(case, args=(-q, *rest), scale=-case.scale)
    same_bits(attend(case), attend(negated))
