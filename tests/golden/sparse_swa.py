"""Golden checks of the sliding-window metadata and of sparse index conversion."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import Ladder
from mla_jax.metadata.common import token_positions, token_to_request
from mla_jax.metadata.compat.ladders import SWALadder
from mla_jax.metadata.compat.sparse_swa import DeepseekSparseSWAMetadataBuilder
from mla_jax.metadata.sparse import (
    build_c128a_topk_metadata,
    combine_topk_swa_indices,
    compact_indices,
    compute_global_topk_indices_and_lens,
    convert_req_index_to_global_index,
)
from mla_jax.metadata.window import (
    compute_prefill_gather_lens,
    plan_window_chunks,
    sliding_window_indices,
)
from tests.golden.batch import common_of, host_of, padded, size_of
from tests.golden.common import Case, compare


@cache
def _ladder() -> SWALadder:
    return SWALadder(
        decode_tokens=Ladder("decode tokens", (8, 64, 512)),
        prefills=Ladder("prefill requests", (8, 64, 512)),
        prefill_tokens=Ladder("prefill tokens", (64, 512, 8192)),
        chunks=Ladder("workspace chunks", (8, 512)),
    )


@cache
def _build(builder: DeepseekSparseSWAMetadataBuilder):
    return jax.jit(builder.build)


def swa_build(case: Case) -> str | None:
    given, want = case["in"], case["out"]
    builder = DeepseekSparseSWAMetadataBuilder(
        ladder=_ladder(),
        next_n=given["num_speculative_tokens"] + 1,
        window=given["window_size"],
        page=given["block_size"],
        compress_ratios=(0,),
        max_model_len=1 << 20,
        max_batched_tokens=8192,
        num_sms=1,
        heads=64,
    )
    meta = _build(builder)(common_of(given, builder.group), builder.decide(host_of(given)))
    counts = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    got = {name: int(getattr(meta, name)) for name in counts}
    tokens, prefills = given["num_actual_tokens"], got["num_prefills"]
    sizes = {
        "is_valid_token": tokens,
        "token_to_req_indices": tokens,
        "decode_swa_indices": got["num_decode_tokens"],
        "decode_swa_lens": got["num_decode_tokens"],
        "prefill_swa_indices": got["num_prefill_tokens"],
        "prefill_swa_lens": got["num_prefill_tokens"],
        "prefill_seq_lens": prefills,
        "prefill_gather_lens": prefills,
    }
    for name, size in sizes.items():
        value = getattr(meta, name)
        got[name] = None if value is None else value[:size]
    got["decode_swa_indices"] = got["decode_swa_indices"][:, 0]
    for part in ("decode", "prefill"):
        if not got[f"num_{part}_tokens"]:  # the files say null where ours are empty
            names = (f"{part}_swa_indices", f"{part}_swa_lens")
            got |= {n: None for n in names if got[n].size == 0}
    return compare(want, got)


_windows = jax.jit(sliding_window_indices, static_argnames=("window", "page"))


def swa_window_indices(case: Case) -> str | None:
    given = case["in"]
    first, count = given["token_offset"], given["num_tokens"]
    rows, size = size_of(len(given["seq_lens"])), size_of(count)
    starts = padded(given["query_start_loc"], rows + 1, edge=True)
    request, real = token_to_request(starts, first + count)
    positions = token_positions(starts, padded(given["seq_lens"], rows), request, real)
    valid = np.asarray(given["is_valid_token"])
    indices, lens = _windows(
        padded(given["block_table"], rows, columns=size_of(given["block_table"].shape[1])),
        padded(request[first:], size),
        padded(positions[first:], size),
        padded(valid[first : first + count] if len(valid) > count else valid, size),
        window=given["window_size"],
        page=given["block_size"],
    )
    return compare(case["out"], {"swa_indices": indices[:count], "swa_lens": lens[:count]})


def swa_prefill_chunk_plan(case: Case) -> str | None:
    given = case["in"]
    chunks = plan_window_chunks(
        np.asarray(given["prefill_query_lens"], np.int32),
        np.asarray(given["prefill_seq_lens"], np.int32),
        ratio=given["compress_ratio"],
        window=given["window_size"],
        chunk_requests=given["prefill_chunk_size"],
        max_model_len=given["max_model_len"],
        max_batched_tokens=given["max_num_batched_tokens"],
    )
    return compare(case["out"], {"chunks": [list(chunk) for chunk in chunks]})


def swa_prefill_gather_lens(case: Case) -> str | None:
    given = case["in"]
    d, p = given["num_decodes"], given["num_prefills"]
    lens = np.diff(given["query_start_loc"])[d : d + p]
    bounds = given["seq_lens"][d : d + p]
    on_host = compute_prefill_gather_lens(lens, bounds, window=given["window_size"])
    on_device = compute_prefill_gather_lens(
        jnp.asarray(lens), jnp.asarray(bounds), window=given["window_size"]
    )
    if not np.array_equal(on_host, on_device):
        return f"host {on_host} and device {on_device} differ"
    return compare(case["out"], {"prefill_gather_lens": on_device})


_combine = jax.jit(combine_topk_swa_indices, static_argnames=("topk", "ratio", "window"))


def combined_indices(case: Case) -> str | None:
    given = case["in"]
    rows = size_of(len(given["seq_lens"]))
    tokens = given["topk_indices"].shape[0]
    indices, lens = _combine(
        padded(given["topk_indices"], size_of(tokens)),
        padded(given["query_start_loc"], rows + 1, edge=True),
        padded(given["seq_lens"], rows),
        padded(given["gather_lens"], rows),
        jnp.int32(given["M"]),
        jnp.int32(given["N"]),
        topk=given["topk"],
        ratio=given["compress_ratio"],
        window=given["window_size"],
    )
    got = {"combined_indices": indices[:tokens], "combined_lens": lens[:tokens]}
    return compare(case["out"], got)


def c128a_topk_metadata(case: Case) -> str | None:
    given = case["in"]
    tokens, decodes = len(given["positions"]), given["num_decode_tokens"]
    table, size = given["block_table"], size_of(tokens)
    meta = build_c128a_topk_metadata(
        padded(table, size_of(table.shape[0]), columns=size_of(table.shape[1])),
        padded(given["token_to_req_indices"], size),
        padded(given["positions"], size),
        padded(given["slot_mapping"], size, fill=-1),
        jnp.int32(decodes),
        decode_tokens=decodes,
        prefill_tokens=tokens - decodes,
        width=given["max_compressed_tokens"],
        page=given["block_size"],
        ratio=given["compress_ratio"],
    )
    names = ("decode_global_indices", "decode_lens", "prefill_local_indices")
    return compare(case["out"], {name: getattr(meta, name) for name in names})


def global_topk_indices(case: Case) -> str | None:
    given = case["in"]
    indices, lens = compute_global_topk_indices_and_lens(
        jnp.asarray(given["block_table"]),
        jnp.asarray(given["token_to_req_indices"]),
        jnp.asarray(given["topk_indices"]),
        jnp.asarray(given["is_valid_token"]),
        page=given["block_size"],
    )
    return compare(case["out"], {"global_topk_indices": indices, "topk_lens": lens})


def req_index_to_global_index(case: Case) -> str | None:
    given = case["in"]
    indices = convert_req_index_to_global_index(
        jnp.asarray(given["block_table"]),
        jnp.asarray(given["req_id"]),
        jnp.asarray(given["token_indices"]),
        page=given["block_size"],
    )
    compacted, counts = compact_indices(indices)
    got = {"indices": indices, "compacted": compacted, "valid_counts": counts}
    return compare(case["out"], got)


CHECKS = {
    "c128a_topk_metadata": c128a_topk_metadata,
    "combine_topk_swa_indices": combined_indices,
    "global_topk_indices": global_topk_indices,
    "req_index_to_global_index": req_index_to_global_index,
    "swa_build": swa_build,
    "swa_prefill_chunk_plan": swa_prefill_chunk_plan,
    "swa_prefill_gather_lens": swa_prefill_gather_lens,
    "swa_window_indices": swa_window_indices,
}
