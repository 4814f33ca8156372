"""Batches for the tests of sparse metadata: the running example and random ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from mla_jax.metadata.buckets import CommonBucket, Ladder
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, build_common
from mla_jax.metadata.compat.indexer import DeepseekV32IndexerMetadataBuilder
from mla_jax.metadata.compat.ladders import IndexerLadder, SWALadder
from mla_jax.metadata.compat.sparse_swa import DeepseekSparseSWAMetadataBuilder

PAGE = 4
RX = {  # two decodes, two extends
    "query_lens": [1, 1, 3, 2],
    "seq_lens": [5, 9, 5, 6],
    "table": [[7, 3, 0, 0], [5, 9, 2, 0], [8, 4, 0, 0], [6, 1, 0, 0]],
}
SMALL = CommonBucket(requests=6, tokens=16, pages=(8,))
LARGE = CommonBucket(requests=9, tokens=40, pages=(8,))

_common = jax.jit(build_common, static_argnames=("bucket", "groups"))


def host(query_lens, seq_lens) -> HostBatch:
    return HostBatch.of(np.asarray(query_lens, np.int32), np.asarray(seq_lens, np.int32))


def common(
    query_lens, seq_lens, table=None, *, bucket: CommonBucket, group: GroupSpec, junk: bool = False
) -> CommonMetadata:
    """The step in ``bucket``; ``junk`` fills every unused page-table entry with rubbish."""
    n = len(query_lens)
    starts = np.full(bucket.requests + 1, sum(query_lens), np.int32)
    starts[: n + 1] = np.concatenate([[0], np.cumsum(query_lens)])
    lens = np.zeros(bucket.requests, np.int32)
    lens[:n] = seq_lens
    pages = np.full((bucket.requests, bucket.pages[0]), 77 if junk else 0, np.int32)
    if table is None:
        table = 1 + np.arange(n * bucket.pages[0]).reshape(n, bucket.pages[0])[:, ::-1]
    table = np.asarray(table, np.int32)
    used = np.arange(table.shape[1]) * group.tokens < np.asarray(lens[:n])[:, None]
    pages[:n, : table.shape[1]] = np.where(used, table, pages[:n, : table.shape[1]])
    return _common(
        jnp.asarray(starts),
        jnp.asarray(lens),
        {group.name: jnp.asarray(pages)},
        jnp.int32(n),
        bucket=bucket,
        groups=(group,),
    )


def rung(n: int, name: str = "rows") -> Ladder:
    return Ladder(name, (n,))


def indexer(scale: int = 1, **changes) -> DeepseekV32IndexerMetadataBuilder:
    """A builder with one rung per dimension, ``scale`` times larger than needed."""
    ladder = IndexerLadder(
        decode_rows=rung(16 * scale),
        chunks=rung(8 * scale),
        chunk_requests=rung(6 * scale),
        chunk_queries=rung(16 * scale),
        chunk_keys=rung(64 * scale, "keys of a chunk"),
    )
    settings = {
        "ladder": ladder,
        "next_n": 1,
        "use_flattening": False,
        "page": PAGE,
        "num_sms": 4,
        "max_prefill_buffer_size": 60,
    }
    return DeepseekV32IndexerMetadataBuilder(**settings | changes)


def swa(scale: int = 1, **changes) -> DeepseekSparseSWAMetadataBuilder:
    ladder = SWALadder(
        decode_tokens=rung(16 * scale),
        prefills=rung(6 * scale),
        prefill_tokens=rung(16 * scale),
        chunks=rung(6 * scale),
    )
    settings = {
        "ladder": ladder,
        "next_n": 1,
        "window": 4,
        "page": PAGE,
        "compress_ratios": (0, 4, 128),
        "max_model_len": 64,
        "max_batched_tokens": 16,
        "num_sms": 3,
        "heads": 64,
        "index_topk": 8,
    }
    return DeepseekSparseSWAMetadataBuilder(**settings | changes)


@partial(jax.jit, static_argnums=0)
def run(builder, step: CommonMetadata, decision):
    return builder.build(step, decision)


@jax.jit
def chunk(prefill, i):
    return prefill.chunk(i)


@st.composite
def steps(draw, *, next_n: int = 1):
    """``(query_lens, seq_lens)``: decodes of at most ``next_n`` tokens, then prefills.

    Some of each, so that few buckets occur.
    """
    decodes = draw(st.lists(st.integers(1, next_n), min_size=1, max_size=3))
    prefills = draw(st.lists(st.integers(next_n + 1, 5), min_size=1, max_size=2))
    queries = decodes + prefills
    cached = [draw(st.integers(0, 24)) for _ in queries]
    return queries, [q + n for q, n in zip(queries, cached, strict=True)]
