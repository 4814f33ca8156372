"""Absorbed decode over pages, every registered backend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache import LatentCache
from mla_jax.metadata.mla import DecodeMetadata
from mla_jax.ops import mla_decode
from mla_jax.pallas.dense_decode import ref, xla
from tests import cases
from tests.cases import GLM, TINY, V2_LITE, V3, decode_case, run
from tests.compare import close_states, judge, same_bits

OP = "mla_decode"


def solve(case, backend, **kwargs):
    return run(mla_decode, *case.args, scale=case.scale, backend=backend, **kwargs)


def judge_decode(state, case):
    rank = case.dims.rank
    judge(state, case, [(q, k, k[:, :rank], seen) for q, k, seen in case.parts])


CASES = {
    "v3": {"dims": V3, "seq_lens": [130, 5, 0, 64], "page": 64},
    "v3_two_queries": {"dims": V3, "seq_lens": [65, 2], "query_lens": [2, 2], "page": 64},
    "v2_lite_fp8": {
        "dims": V2_LITE, "seq_lens": [0, 1, 63, 64, 65, 200], "page": 64, "format": "fp8_e4m3",
        "cache_scale": 0.37,
    },
    "glm_page_69": {"dims": GLM, "seq_lens": [68, 69, 70, 150, 1], "page": 69},
    "lite_fp16": {"dims": V2_LITE, "seq_lens": [17, 33], "page": 16, "format": "fp16",
                  "dtype": "float16"},
    "tiny_fp32": {"seq_lens": [6, 7, 8, 1, 0], "page": 7, "format": "fp32", "dtype": "float32"},
    "one_huge": {"seq_lens": [1, 700, 3, 2], "page": 5, "format": "fp32", "dtype": "float32"},
    "ragged_queries": {
        "seq_lens": [9, 4, 3, 0, 30], "query_lens": [4, 1, 3, 0, 2], "page": 4, "format": "fp32",
        "dtype": "float32", "max_query_len": 5,
    },
    "more_queries_than_keys": {
        "seq_lens": [1, 2, 0], "query_lens": [2, 4, 3], "format": "fp32", "dtype": "float32",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, backend, rng):
    case = decode_case(rng, **CASES[name])
    state = solve(case, backend)
    assert state.out.dtype == jnp.dtype(case.dtype)
    judge_decode(state, case)


@pytest.mark.parametrize(
    ("name", "layer"), [*((name, None) for name in CASES), ("tiny_fp32", 1), ("tiny_fp32", 9)]
)
def test_definition(name, layer, rng):
    """``ref`` against float64 like every backend, and ``xla`` against ``ref``."""
    case = decode_case(rng, **CASES[name])
    q_latent, q_rope, cache, meta = case.args
    where = {}
    if layer is not None:
        cache, where = cases.stacked(cache, min(layer, 2)), {"layer": jnp.int32(layer)}
    args = q_latent, q_rope, cache.pages, cache.scale
    args = *args, meta.page_table, meta.seq_lens, meta.query_starts
    more = {"max_query_len": meta.max_query_len, "scale": case.scale, "format": cache.format}
    defined, ours = (
        jax.jit(functools.partial(run, **more, out_dtype=jnp.float32))(*args, **where)
        for run in (ref.dense_decode, xla.dense_decode)
    )
    judge_decode(dataclasses.replace(defined, out=defined.out.astype(case.dtype)), case)
    close_states(ours, defined, atol=1e-5)


def test_padding_tokens_behind_a_full_batch(backend, rng):
    """No padded request, whose result would be that of padding anyway."""
    case = decode_case(rng, seq_lens=[5, 9], pad_tokens=3, pad_requests=0)
    judge_decode(solve(case, backend), case)


def test_single_key_and_bottom_right_mask(backend, rng):
    """Query 0 of 2 over one key sees nothing; query 1 returns the value exactly."""
    case = decode_case(rng, seq_lens=[1], query_lens=[2], pad_tokens=0, pad_requests=0)
    state = solve(case, backend)
    q, k, _ = case.parts[0]
    assert not np.asarray(state.out[0]).any() and np.isneginf(state.lse[0]).all()
    value = np.broadcast_to(k[0, : TINY.rank], (TINY.heads, TINY.rank))
    np.testing.assert_array_equal(np.asarray(state.out[1], np.float64), value)
    logit = case.scale * q[1].astype(np.float64) @ k[0]
    np.testing.assert_allclose(state.lse[1], logit, atol=1e-6)


def test_equal_logits_give_the_mean(backend, rng):
    case = decode_case(rng, seq_lens=[11], format="fp32", dtype="float32", pad_tokens=0)
    q_latent, q_rope, cache, meta = case.args
    zero = jnp.zeros_like(q_latent), jnp.zeros_like(q_rope)
    state = run(mla_decode, *zero, cache, meta, scale=1.0, backend=backend)
    mean = case.parts[0][1][:, : TINY.rank].mean(0)
    np.testing.assert_allclose(state.out[0], np.tile(mean, (TINY.heads, 1)), atol=1e-6)
    np.testing.assert_allclose(state.lse[0], np.log(11), rtol=1e-6)


def test_unused_memory_is_never_read(backend, rng):
    """The same numbers with clean zeros instead of NaN and garbage pages, bit for bit."""
    case = decode_case(rng, seq_lens=[5, 130, 0, 4], page=4, format="fp32", dtype="float32")
    q_latent, q_rope, cache, meta = case.args
    clean = LatentCache(
        pages=jnp.nan_to_num(cache.pages, nan=0.0),
        scale=cache.scale, rank=cache.rank, format=cache.format,
    )  # fmt: skip
    table = jnp.where(meta.page_table == cases.GARBAGE_PAGE, 0, meta.page_table)
    clean_meta = DecodeMetadata(
        max_query_len=1, page_table=table, seq_lens=meta.seq_lens, query_starts=meta.query_starts
    )
    dirty = solve(case, backend)
    args = jnp.nan_to_num(q_latent), jnp.nan_to_num(q_rope), clean, clean_meta
    same_bits(dirty, run(mla_decode, *args, scale=case.scale, backend=backend))


def test_repeatable_and_permutable(backend, rng):
    case = decode_case(rng, seq_lens=[40, 3, 150, 0, 17], pad_tokens=0, pad_requests=0)
    q_latent, q_rope, cache, meta = case.args
    first = solve(case, backend)
    same_bits(first, solve(case, backend))
    order = np.array([3, 1, 4, 0, 2])
    permuted = DecodeMetadata(
        max_query_len=1, page_table=meta.page_table[order], seq_lens=meta.seq_lens[order],
        query_starts=meta.query_starts,
    )  # fmt: skip
    args = q_latent[order], q_rope[order], cache, permuted
    state = run(mla_decode, *args, scale=case.scale, backend=backend)
    np.testing.assert_array_equal(state.out, first.out[order])
    np.testing.assert_array_equal(state.lse, first.lse[order])


@pytest.mark.parametrize(("tokens", "requests", "width"), [(0, 0, 4), (3, 0, 1), (0, 2, 2)])
def test_nothing_to_do(tokens, requests, width, backend):
    cache = LatentCache.alloc(num_pages=2, page=4, rank=16, rope=4)
    meta = DecodeMetadata(
        max_query_len=1,
        page_table=jnp.zeros((requests, width), jnp.int32),
        seq_lens=jnp.zeros((requests,), jnp.int32),
        query_starts=jnp.zeros((requests + 1,), jnp.int32),
    )
    q = jnp.full((tokens, 3, 20), jnp.nan, jnp.bfloat16)
    state = run(mla_decode, q[..., :16], q[..., 16:], cache, meta, scale=1.0, backend=backend)
    assert state.out.shape == (tokens, 3, 16) and not np.asarray(state.out).any()
    assert np.isneginf(state.lse).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_only_who_sees_it(bad):
    """The second of a request's two keys, which its first query does not see."""
    cache = LatentCache.alloc(num_pages=1, page=4, rank=2, rope=1, format="fp32")
    cache = dataclasses.replace(cache, pages=cache.pages.at[0, :2].set(1.0).at[0, 1, 0].set(bad))
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    meta = DecodeMetadata(
        max_query_len=2, page_table=ints([[0]]), seq_lens=ints([2]), query_starts=ints([0, 2])
    )
    got = mla_decode(jnp.ones((2, 1, 2)), jnp.ones((2, 1, 1)), cache, meta, scale=1.0)
    np.testing.assert_array_equal(got.out[0], [[1.0, 1.0]])
    np.testing.assert_allclose(got.lse[0], 3.0)
    assert np.isnan(got.out[1]).all()


def test_no_copy_per_head_and_no_whole_sequence():
    """Scratch grows with one block of keys, not with the length of the page table."""

    def temp(width, heads):
        cache = LatentCache.alloc(num_pages=width, page=16, rank=64, rope=8)
        meta = DecodeMetadata(
            max_query_len=1,
            page_table=jnp.zeros((4, width), jnp.int32),
            seq_lens=jnp.full((4,), 16 * width, jnp.int32),
            query_starts=jnp.arange(5, dtype=jnp.int32),
        )
        q = jnp.zeros((4, heads, 72), jnp.bfloat16)
        f = jax.jit(lambda q, c, m: mla_decode(q[..., :64], q[..., 64:], c, m, scale=1.0))
        return f.lower(q, cache, meta).compile().memory_analysis().temp_size_in_bytes

    block = 4 * 128 * 72 * 4  # the keys of one step in float32
    assert temp(1024, 8) == temp(64, 8)
    assert temp(64, 32) - temp(64, 8) < block
