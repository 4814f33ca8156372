"""Golden checks of the indexer's metadata, in padded buckets: valid lanes are compared."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import Ladder
from mla_jax.metadata.common import GroupSpec, token_positions, token_to_request
from mla_jax.metadata.compat.indexer import (
    DeepseekV32IndexerMetadataBuilder,
    plan_indexer_chunks,
    split_indexer_prefill_chunks,
)
from mla_jax.metadata.compat.ladders import IndexerLadder
from mla_jax.metadata.compat.paged_logits_schedule import paged_mqa_logits_schedule
from mla_jax.metadata.indexer import build_decode_rows
from mla_jax.metadata.indexer_chunks import build_chunk
from tests.golden.batch import common_of, completed, host_of, padded, size_of
from tests.golden.common import Case, compare

SCHEDULES = {
    "sm90": {"remainder": "last"},
    "sm100": {"item": "token"},
    "rev_d30fc36": {},
}


@cache
def _ladder() -> IndexerLadder:
    def of(name, *rungs):
        return Ladder(name, rungs)

    return IndexerLadder(
        decode_rows=of("decode rows", 8, 64, 512),
        chunks=of("prefill chunks", 1, 8, 512),
        chunk_requests=of("requests of a chunk", 8, 512),
        chunk_queries=of("queries of a chunk", 64, 512, 8192),
        chunk_keys=of("keys of a chunk", 256, 4096, 65536),
    )


@cache
def _program(builder: DeepseekV32IndexerMetadataBuilder):
    return jax.jit(builder.build)


def _build(builder: DeepseekV32IndexerMetadataBuilder):
    """The device half, shared by builders that differ in host limits only."""
    return _program(replace(builder, max_prefill_buffer_size=1, max_logits_bytes=4))


_chunk = jax.jit(lambda prefill, i: prefill.chunk(i))


def _chunk_entries(chunk, plan_row) -> dict:
    """The valid lanes of one chunk."""
    requests, queries = int(chunk.num_reqs), int(chunk.token_end - chunk.token_start)
    keys = int(chunk.cu_seq_lens[requests])
    total = int(chunk.total_seq_lens)
    assert int(plan_row[4]) == total
    return {
        "block_table": chunk.page_table[:requests],
        "cu_seqlen_ks": chunk.cu_seqlen_ks[:queries],
        "cu_seqlen_ke": chunk.cu_seqlen_ke[:queries],
        "cu_seq_lens": chunk.cu_seq_lens[: requests + 1],
        "token_to_seq": chunk.token_to_seq[:total],
        "total_seq_lens": total,
        "token_start": int(chunk.token_start),
        "token_end": int(chunk.token_end),
        "num_reqs": requests,
        "skip_kv_gather": bool(chunk.skip_kv_gather),
        "_keys": keys,
    }


def _cut_table(entries: dict, pages: int) -> dict:
    return entries | {"block_table": entries["block_table"][:, :pages]}


def indexer_build(case: Case) -> str | None:
    given, want = case["in"], case["out"]
    builder = DeepseekV32IndexerMetadataBuilder(
        ladder=_ladder(),
        next_n=given["num_speculative_tokens"] + 1,
        use_flattening=given["use_flattening"],
        page=given["storage_block_size"],
        num_sms=132,
        max_prefill_buffer_size=given["max_prefill_buffer_size"],
        max_logits_bytes=given["max_logits_bytes"],
        compress_ratio=given["compress_ratio"],
    )
    host = host_of(given)
    decision = builder.decide(host)
    pages = given["block_table"].shape[1]
    meta = _build(builder)(common_of(given, builder.group), decision)
    tokens = given["num_actual_tokens"]
    got = {
        name: int(getattr(meta, name))
        for name in ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    }
    got |= {"slot_mapping": meta.slot_mapping[:tokens], "prefill": None, "decode": None}
    if meta.prefill is not None:
        got["prefill"] = [
            _cut_table(_chunk_entries(_chunk(meta.prefill, i), meta.prefill.plan[i]), pages)
            for i in range(int(meta.prefill.num_chunks))
        ]
        if not want["prefill"] and want["prefill"] is not None and not got["prefill"]:
            want = {k: v for k, v in want.items() if k != "prefill"}
    if meta.decode is not None:
        count = tokens if builder.use_flattening else got["num_decodes"]
        count = min(count, got["num_decode_tokens"]) if builder.use_flattening else count
        got["decode"] = _decode_entries(meta.decode, count, pages)
    return compare(want, got)


def _decode_entries(decode, rows: int, pages: int) -> dict:
    return {
        "block_table": decode.page_table[:rows, :pages],
        "seq_lens": decode.seq_lens[:rows],
        "decode_lens": decode.decode_lens[:rows],
        "requires_padding": bool(decode.requires_padding),
    }


_decode_rows = jax.jit(
    build_decode_rows, static_argnames=("rows", "decode_len", "flatten", "ratio")
)


def indexer_decode_tensors(case: Case) -> str | None:
    given, want = case["in"], case["out"]
    decodes, pages = given["block_table"].shape
    lens = given["decode_lens"]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    if not np.array_equal(starts[:-1], given["query_start_loc"]):
        return "query_start_loc is not the exclusive sum of decode_lens"
    flatten = not given["use_native"]
    rows = given["num_decode_tokens"] if flatten else decodes
    tokens = int(starts[-1])
    step = {"query_start_loc": starts, "num_actual_tokens": tokens}
    common = common_of(
        given | step | {"slot_mapping": np.zeros(tokens, np.int32)}, GroupSpec("index_keys", 1)
    )
    decode = _decode_rows(
        common,
        common.page_tables["index_keys"],
        jnp.int32(given["num_decodes"]),
        rows=size_of(rows),
        decode_len=given["max_decode_len"],
        flatten=flatten,
        ratio=1,
    )
    got = _decode_entries(decode, rows, pages) | {"batch_size": rows}
    if want["seq_lens"].ndim == 1:
        got["seq_lens"] = got["seq_lens"][:, 0] if got["seq_lens"].shape[1] == 1 else None
    return compare(want, got)


_chunk_metadata = jax.jit(build_chunk, static_argnames=("requests", "queries", "keys", "ratio"))


def indexer_prefill_chunk_metadata(case: Case) -> str | None:
    given, want = case["in"], case["out"]
    starts, lens, table = (given[n] for n in ("query_start_loc", "seq_lens", "block_table"))
    a, e, ratio = given["start_idx"], given["end_idx"], given["compress_ratio"]
    whole = int(starts[e] - starts[a])
    first, last = given["query_slice"] or (0, whole)
    total = int((lens[a:e] // ratio).sum())
    if want is None or total == 0:
        # What the builder drops: the plan of the same requests is empty.
        plan = plan_indexer_chunks(
            lens[a:e] // ratio, np.diff(starts)[a:e], workspace=1 << 30, max_logits=1 << 40
        )
        return compare(want, None if not plan else "a chunk")
    skip = given["skip_kv_gather"] or first > 0
    row = jnp.array([a, e, first, last, total, int(skip)], jnp.int32)
    requests = size_of(len(lens))
    arrays = padded(starts, requests + 1, edge=True), padded(lens, requests)
    owner, positions, _ = _positions(*arrays, jnp.zeros((size_of(int(starts[-1])),), jnp.int32))
    chunk = _chunk_metadata(
        *arrays,
        padded(table, requests, columns=size_of(table.shape[1])),
        owner,
        positions,
        row,
        requests=requests,
        queries=size_of(whole),
        keys=size_of(total),
        ratio=ratio,
    )
    return compare(want, _cut_table(_chunk_entries(chunk, row), table.shape[1]))


def indexer_split_prefill_chunks(case: Case) -> str | None:
    given = case["in"]
    pieces = split_indexer_prefill_chunks(
        np.asarray(given["compressed_seq_lens"], np.int32),
        np.asarray(given["query_lens"], np.int32),
        workspace=given["workspace_size"],
        max_logits=given["max_logits_bytes"] // 4,
        offset=given["request_offset"],
    )
    got = {
        "req_slices": [list(requests) for requests, _ in pieces],
        "query_slices": [list(queries) for _, queries in pieces],
    }
    return compare(case["out"], got)


@jax.jit
def _positions(starts, lens, slots):
    request, real = token_to_request(starts, slots.shape[0])
    return request, token_positions(starts, lens, request, real), real & (slots >= 0)


def compressed_slot_mapping(case: Case) -> str | None:
    given = case["in"]
    tokens, requests = given["num_tokens"], len(given["seq_lens"])
    own = given.get("slot_mapping", np.zeros(tokens, np.int32))
    size, rows = size_of(tokens), size_of(requests)
    starts = padded(given["query_start_loc"], rows + 1, edge=True)
    lens = padded(given["seq_lens"], rows)
    table = padded(given["block_table"], rows)
    got = completed(
        table,
        *_positions(starts, lens, padded(own, size)),
        page=given["block_size"],
        ratio=given["compress_ratio"],
    )
    if np.any(np.asarray(got[tokens:]) != -1):
        return f"padding tokens have slots {got[tokens:]}"
    return compare(case["out"], {"slot_mapping": got[:tokens]})


_schedule = jax.jit(
    paged_mqa_logits_schedule, static_argnames=("num_sms", "split", "remainder", "item")
)


def paged_mqa_logits_metadata(case: Case) -> str | None:
    given = case["in"]
    request = given["indices"]
    got = {
        name: _schedule(
            jnp.asarray(given["context_lens"]),
            num_sms=given["num_sms"],
            split=given["split_kv"],
            request=None if request is None else jnp.asarray(request),
            **SCHEDULES[name],
        )
        for name in case["out"]
    }
    return compare(case["out"], got)


CHECKS = {
    "indexer_build": indexer_build,
    "indexer_decode_tensors": indexer_decode_tensors,
    "indexer_prefill_chunk_metadata": indexer_prefill_chunk_metadata,
    "indexer_split_prefill_chunks": indexer_split_prefill_chunks,
    "compressed_slot_mapping": compressed_slot_mapping,
    "paged_mqa_logits_metadata": paged_mqa_logits_metadata,
}
