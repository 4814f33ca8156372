"""Cache writes and reads, attention states, indexer scores: stems of the operations."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax.cache import FORMATS, LatentCache
from mla_jax.ops import gather_latent, merge_attn_states, write_latent
from mla_jax.pallas.cache_io import records
from mla_jax.pallas.indexer.ref import paged_index_logits
from mla_jax.types import AttnState
from tests.golden.common import Case, Check, compare

_FORMAT_OF = {f.dtype: f for f in FORMATS.values()}


def _cache(pages: np.ndarray, *, rank: int, scale: float = 1.0) -> LatentCache:
    return LatentCache(
        pages=jnp.asarray(pages),
        scale=jnp.float32(scale),
        rank=rank,
        format=_FORMAT_OF[pages.dtype.name],
    )


def _codes(pages: jax.Array) -> np.ndarray:
    """A cache as the files hold it: raw bytes of fp8, elements otherwise."""
    a = np.asarray(pages)
    return a.view(np.uint8) if a.dtype == ml_dtypes.float8_e4m3fn else a


def _int32(a: np.ndarray) -> jax.Array:
    return jnp.asarray(a.astype(np.int32))


def concat_and_cache_mla(case: Case) -> str | None:
    """Exact bytes of the whole cache."""
    i = case["in"]
    kv, rope, slots = jnp.asarray(i["kv_c"]), jnp.asarray(i["k_pe"]), _int32(i["slot_mapping"])
    shape = (i["num_blocks"], i["block_size"])
    if case["kind"] == "fp8_ds_mla":
        n = slots.shape[0]
        rows = jnp.full((shape[0] * shape[1], 656), i["cache_fill"], jnp.uint8)
        packed = records.pack_ds_mla(kv[:n], rope[:n], power_of_two_scales=False)
        got = np.asarray(records.scatter_rows(rows, packed, slots)).reshape(*shape, 656)
        return compare(case["out"], {"kv_cache": got})
    width = kv.shape[1] + rope.shape[1]
    dtype = kv.dtype if case["kind"] == "auto" else np.uint8
    pages = np.full((*shape, width), i["cache_fill"], dtype)
    pages = pages if case["kind"] == "auto" else pages.view(ml_dtypes.float8_e4m3fn)
    cache = write_latent(
        _cache(pages, rank=kv.shape[1], scale=i["scale"]), kv, rope, slots, backend="xla"
    )
    return compare(case["out"], {"kv_cache": _codes(cache.pages)})


def gather_cache(case: Case) -> str | None:
    """Exact rows; a byte cache that is not fp8 is carried as float32 numbers."""
    i = case["in"]
    n, pages = i["batch_size"], i["src_cache"]
    (name, want), *_ = case["out"].items()
    out_dtype = want.dtype
    if case["kind"] == "fp8":
        pages = pages.view(ml_dtypes.float8_e4m3fn)
    elif case["kind"] == "ds_mla":
        pages = np.asarray(records.unpack_ds_mla(jnp.asarray(pages)))
    elif pages.dtype == np.uint8:
        pages, out_dtype = pages.astype(np.float32), np.float32
    first = np.zeros(n, np.int32) if i["seq_starts"] is None else i["seq_starts"]
    got = gather_latent(
        _cache(pages, rank=pages.shape[-1] - 1, scale=i["scale"]),
        _int32(i["block_table"])[:n],
        _int32(first),
        _int32(i["cu_seq_lens"])[: n + 1],
        rows=want.shape[0],
        dtype=out_dtype,
        backend="xla",
    )
    return compare({name: want}, {name: np.asarray(got).astype(want.dtype)})


def merge(case: Case) -> str | None:
    """Outputs within one rounding of their dtype, log-sum-exps within 1e-6."""
    i = case["in"]

    def state(side: str) -> AttnState:
        out, lse = i[f"{side}_output"], i[f"{side}_lse"]
        return AttnState(out=jnp.asarray(out), lse=jnp.asarray(lse.T))

    prefix = state("prefix")
    if (n := i.get("prefill_tokens_with_context")) is not None:
        late = jnp.arange(prefix.lse.shape[0]) >= n  # these have no context: an empty state
        prefix = AttnState(out=prefix.out, lse=jnp.where(late[:, None], -jnp.inf, prefix.lse))
    got = merge_attn_states(prefix, state("suffix"), backend="xla")
    low = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}[got.out.dtype.name]
    found = compare(
        {"output": case["out"]["output"]}, {"output": np.asarray(got.out)}, rtol=low, atol=low / 4
    )
    lse = {"output_lse": np.asarray(got.lse.T)}
    return found or compare({"output_lse": case["out"]["output_lse"]}, lse, rtol=1e-6, atol=1e-6)


def v4_fp8_k_cache(case: Case) -> str | None:
    """Exact page bytes and exact values read back."""
    i = case["in"]
    page = i["block_size"]
    pages = jnp.zeros((i["num_blocks"], records.v4_page_bytes(page)), jnp.uint8)
    slots = _int32(i["slot_mapping"])
    pages = jax.jit(records.write_v4, static_argnames="page")(
        pages, jnp.asarray(i["k"]), slots, page=page
    )
    live = np.asarray(case["out"]["live_tokens"], np.int64)
    data = np.asarray(pages)[:, : page * 576].reshape(-1, 576)[i["slot_mapping"][live]]
    tail = np.asarray(pages)[:, page * 576 : page * 584].reshape(-1, 8)
    rows = records.unpack_v4(jnp.asarray(data), jnp.asarray(tail[i["slot_mapping"][live]]))
    alive = [t for t, s in enumerate(i["slot_mapping"]) if s >= 0]
    got = {"k_cache": np.asarray(pages), "live_tokens": alive, "dequantized": np.asarray(rows)}
    return compare(case["out"], got)


def flashmla_fp8_layout(case: Case) -> str | None:
    """Both layouts with FlashMLA's rule for scales: exact bytes and exact values."""
    k = jnp.asarray(case["in"]["k"])
    if case["in"]["layout"] == "656":
        flat = k.reshape(-1, 576)
        packed = records.pack_ds_mla(flat[:, :512], flat[:, 512:])
        read = records.unpack_ds_mla(packed)
        packed = packed.reshape(*k.shape[:2], 656)
    else:
        data, scale = records.pack_v4(k, floor_of_scale=True)
        read = records.unpack_v4(data, scale)
        pages = jnp.concatenate([data.reshape(len(k), -1), scale.reshape(len(k), -1)], axis=1)
        packed = pages.reshape(*k.shape[:2], 584)
    got = {"records": np.asarray(packed), "dequantized": np.asarray(read).reshape(k.shape)}
    return compare(case["out"], got)


def indexer_k_cache(case: Case) -> str | None:
    """Exact page bytes."""
    i = case["in"]
    page = i["block_size"]
    write = partial(
        records.write_index_keys, page=page, power_of_two_scales=i["scale_fmt"] == "ue8m0"
    )
    pages = jnp.zeros((i["num_blocks"], page * 132), jnp.uint8)
    got = jax.jit(write)(pages, jnp.asarray(i["k"]), _int32(i["slot_mapping"]))
    return compare(case["out"], {"kv_cache": np.asarray(got)})


def indexer_paged_logits(case: Case) -> str | None:
    """float32 sums of up to some thousand products: 1e-5 of the largest score."""
    i = case["in"]
    n = i["next_n"]
    lens = np.asarray(i["context_lens"])[:, None] - n + 1 + np.arange(n)
    got = paged_index_logits(
        jnp.asarray(i["q_codes"]),
        jnp.asarray(i["weights"]).reshape(-1, n, i["weights"].shape[-1]),
        jnp.asarray(i["kv_cache"]),
        _int32(np.maximum(lens, 0)),
        _int32(i["block_table"]),
        page=i["block_size"],
    )
    want = case["out"]["logits"]
    finite = np.abs(want[np.isfinite(want)])
    largest = float(finite.max()) if finite.size else 0.0
    got = np.asarray(got).reshape(want.shape)
    return compare({"logits": want}, {"logits": got}, rtol=1e-5, atol=1e-5 * largest)


CHECKS: dict[str, Check] = {
    "concat_and_cache_mla": concat_and_cache_mla,
    "gather_cache": gather_cache,
    "merge_attn_states": merge,
    "v4_fp8_k_cache": v4_fp8_k_cache,
    "flashmla_fp8_layout": flashmla_fp8_layout,
    "indexer_k_cache": indexer_k_cache,
    "indexer_paged_logits": indexer_paged_logits,
}
