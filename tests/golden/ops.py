"""Cache writes and reads, attention states, indexer scores: stems of the operations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax.cache import ELEMENT_FORMATS, RECORD_FORMATS, LatentCache, RecordCache, RecordFormat
from mla_jax.ops import gather_latent, merge_attn_states, write_latent
from mla_jax.pallas.cache_io.records import gather_records, write_records
from mla_jax.pallas.indexer.ref import paged_index_logits
from mla_jax.types import AttnState
from tests.golden.common import Case, Check, compare

DS_MLA, V4 = RECORD_FORMATS["ds_mla"], RECORD_FORMATS["v4"]
_FORMAT_OF = {f.dtype: f for f in ELEMENT_FORMATS.values()}


def _cache(pages: np.ndarray, *, rank: int, scale: float = 1.0) -> LatentCache:
    return LatentCache(
        pages=jnp.asarray(pages),
        scale=jnp.float32(scale),
        rank=rank,
        format=_FORMAT_OF[pages.dtype.name],
    )


def _records(format: RecordFormat, i: dict) -> RecordCache:
    """A cache of byte records, every byte as the case says."""
    cache = RecordCache.alloc(num_pages=i["num_blocks"], page=i["block_size"], format=format)
    return replace(cache, pages=jnp.full_like(cache.pages, i.get("cache_fill", 0)))


def _split(format: RecordFormat, rows: jax.Array) -> tuple[jax.Array, ...]:
    """Rows as the values of a record, side by side."""
    ends = np.cumsum([f.count for f in format.values])
    return tuple(jnp.split(rows, ends[:-1], axis=-1))


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
        records = write_records(_records(DS_MLA.with_rule("plain"), i), (kv, rope), slots)
        got = np.asarray(records.pages).reshape(*shape, DS_MLA.row_bytes)
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
        values = DS_MLA.decode((jnp.asarray(pages),), dtype=jnp.bfloat16)
        pages = np.asarray(jnp.concatenate(values, axis=-1))
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
    k, slots = jnp.asarray(i["k"]), _int32(i["slot_mapping"])
    cache = jax.jit(write_records)(_records(V4, i), _split(V4, k), slots)
    live = slots[np.asarray(case["out"]["live_tokens"], np.int32)]
    alive = [t for t, s in enumerate(i["slot_mapping"]) if s >= 0]
    rows = np.asarray(gather_records(cache, live))
    got = {"k_cache": np.asarray(cache.pages), "live_tokens": alive, "dequantized": rows}
    return compare(case["out"], got)


def flashmla_fp8_layout(case: Case) -> str | None:
    """Both layouts with FlashMLA's rule for scales: exact bytes and exact values."""
    k = jnp.asarray(case["in"]["k"])
    record = {"656": DS_MLA, "584": V4.with_rule("floor_of_quotient")}[case["in"]["layout"]]
    num_pages, page, _ = k.shape
    cache = _records(record, {"num_blocks": num_pages, "block_size": page})
    slots = jnp.arange(num_pages * page)
    cache = write_records(cache, _split(record, k.reshape(num_pages * page, -1)), slots)
    size = page * record.row_bytes  # what is behind it, the files leave out
    packed = np.asarray(cache.pages)[:, :size].reshape(*k.shape[:2], -1)
    got = {"records": packed, "dequantized": np.asarray(gather_records(cache, slots))}
    got["dequantized"] = got["dequantized"].reshape(k.shape)
    return compare(case["out"], got)


def indexer_k_cache(case: Case) -> str | None:
    """Exact page bytes."""
    i = case["in"]
    rule = "power_of_two" if i["scale_fmt"] == "ue8m0" else "plain"
    cache = _records(RECORD_FORMATS["index_key"].with_rule(rule), i)
    cache = jax.jit(write_records)(cache, (jnp.asarray(i["k"]),), _int32(i["slot_mapping"]))
    return compare(case["out"], {"kv_cache": np.asarray(cache.pages)})


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
