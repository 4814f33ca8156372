"""Golden vectors of the field's cache and merge functions (the format is in each file's doc)."""

import base64
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import run

from mla_jax.cache import FORMATS, LatentCache
from mla_jax.ops import gather_latent, merge_attn_states, write_latent
from mla_jax.types import AttnState
from tests.cases import run

DATA = Path(__file__).parent / "data"


def load(name):
    cases = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return [pytest.param(c, id=c["name"]) for c in cases]


def array(v):
    """A stored array; non-finite numbers are strings."""
    dtype = np.dtype(getattr(ml_dtypes, v["dtype"], v["dtype"]))
    if "b64" in v:
        return np.frombuffer(base64.b64decode(v["b64"]), dtype).reshape(v["shape"])
    return np.array([float(x) if isinstance(x, str) else x for x in v["data"]], dtype).reshape(
        v["shape"]
    )


def int32(v):
    return jnp.asarray(array(v).astype(np.int32))


def cache_of(pages, *, rank, scale=1.0):
    by_dtype = {f.dtype: f for f in FORMATS.values()}
    return LatentCache(
        pages=jnp.asarray(pages), scale=jnp.float32(scale), rank=rank,
        format=by_dtype[pages.dtype.name],
    )  # fmt: skip


@pytest.mark.parametrize("case", load("concat_and_cache_mla"))
def test_write(case):
    given = case["in"]
    kv, kr = jnp.asarray(array(given["kv_c"])), jnp.asarray(array(given["k_pe"]))
    shape = given["num_blocks"], given["block_size"], kv.shape[1] + kr.shape[1]
    if case["kind"] == "auto":
        pages = np.full(shape, given["cache_fill"], ml_dtypes.bfloat16)
    else:
        pages = np.full(shape, given["cache_fill"], np.uint8).view(ml_dtypes.float8_e4m3fn)
    cache = cache_of(pages, rank=kv.shape[1], scale=given["scale"])
    slots = int32(given["slot_mapping"])
    got = np.asarray(run(write_latent, cache, kv, kr, slots, backend=None).pages)
    (want,) = case["out"].values()
    assert got.tobytes() == array(want).tobytes()


@pytest.mark.parametrize("case", load("gather_cache"))
def test_gather(case):
    given = case["in"]
    pages = array(given["src_cache"])
    (want,) = case["out"].values()
    want = array(want)
    # A byte record is read as codes (fp8), or as numbers that a plain cache carries unchanged.
    if case["kind"] == "fp8":
        pages = pages.view(ml_dtypes.float8_e4m3fn)
    elif pages.dtype == np.uint8:
        pages, want = pages.astype(np.float32), want.astype(np.float32)
    n = given["batch_size"]
    first = given["seq_starts"]
    first = jnp.zeros((n,), jnp.int32) if first is None else int32(first)
    rows = want.shape[0] + 2
    got = run(
        gather_latent,
        cache_of(pages, rank=pages.shape[-1] - 1, scale=given["scale"]),
        int32(given["block_table"])[:n], first, int32(given["cu_seq_lens"])[: n + 1],
        rows=rows, dtype=want.dtype, backend=None,
    )  # fmt: skip
    got = np.asarray(got)
    assert got[:-2].tobytes() == want.tobytes() and not got[-2:].any()


@pytest.mark.parametrize("case", load("merge_attn_states"))
def test_merge(case):
    given, want = case["in"], case["out"]

    def state(side):
        out, lse = array(given[f"{side}_output"]), array(given[f"{side}_lse"])
        return AttnState(out=jnp.asarray(out), lse=jnp.asarray(lse.T))

    prefix = state("prefix")
    if (n := given.get("prefill_tokens_with_context")) is not None:
        late = jnp.arange(prefix.lse.shape[0]) >= n  # tokens without context: an empty state
        prefix = AttnState(out=prefix.out, lse=jnp.where(late[:, None], -jnp.inf, prefix.lse))
    got = run(merge_attn_states, prefix, state("suffix"), backend=None)
    low = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}[got.out.dtype.name]
    np.testing.assert_allclose(
        np.asarray(got.out, np.float64), array(want["output"]), rtol=low, atol=low / 4
    )
    np.testing.assert_allclose(
        np.asarray(got.lse.T, np.float64), array(want["output_lse"]), rtol=1e-6, atol=1e-6
    )
