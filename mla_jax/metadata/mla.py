"""Metadata of one MLA step: a decode view, a prefill view and the cached context in chunks.

Decodes come first in the batch. All shapes come from an ``MLABucket``; all counts are arrays,
so one program serves every batch of its bucket. Padded tokens have slot -1, padded requests
length 0, and no consumer needs a special case.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mla_jax.metadata.buckets import CommonBucket, MLABucket
from mla_jax.metadata.common import CommonMetadata, GroupSpec, build_common, exclusive_sum
from mla_jax.types import Array, Bool, Int

__all__ = [
    "ContextMetadata",
    "DecodeMetadata",
    "MLAMetadata",
    "PrefillMetadata",
    "build_mla",
    "mla_views",
    "query_runs",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeMetadata:
    """Few queries per request against its pages; causal inside a request, bottom-right."""

    max_query_len: int = field(metadata={"static": True})  # queries of one request, at most
    page_table: Int[Array, "requests pages"]  # page ids; entries past the length are unread
    seq_lens: Int[Array, "requests"]  # keys visible to the last query; 0 = padding
    query_starts: Int[Array, "starts"]  # exclusive sum of query lengths


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillMetadata:
    """A ragged batch of queries and keys; causal masks are aligned bottom-right."""

    query_starts: Int[Array, "starts"]
    key_starts: Int[Array, "starts"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ContextMetadata:
    """Cached context of the prefills, laid end to end and cut every ``rows`` rows."""

    rows: int = field(metadata={"static": True})  # workspace rows of one chunk
    page_table: Int[Array, "requests pages"]
    context_starts: Int[Array, "starts"]  # exclusive sum of context lengths
    query_starts: Int[Array, "starts"]  # of the prefill's new tokens

    def num_chunks(self) -> Int[Array, ""]:
        """``ceil(total context / rows)``: the trip count of the loop over chunks."""
        return (self.context_starts[-1] + self.rows - 1) // self.rows

    def chunk(self, i: Int[Array, ""]) -> tuple[Int[Array, "requests"], PrefillMetadata]:
        """Chunk ``i``: first cached position per request, and where its keys lie.

        The chunk holds rows ``[i * rows, (i + 1) * rows)`` of the line, hence request ``r``
        owns workspace rows ``clip(context_starts - i * rows, 0, rows)[r : r + 2]``.
        """
        line = self.context_starts - i * self.rows
        first = jnp.maximum(-line[:-1], 0)
        keys = jnp.clip(line, 0, self.rows)
        return first, PrefillMetadata(query_starts=self.query_starts, key_starts=keys)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLAMetadata:
    """Everything a latent-attention layer needs besides its weights and its cache."""

    bucket: MLABucket = field(metadata={"static": True})
    positions: Int[Array, "tokens"]  # absolute; 0 on padding
    slots: Int[Array, "tokens"]  # cache row each token writes; -1 = none
    real: Bool[Array, "tokens"]  # not padding
    num_decodes: Int[Array, ""]  # prefill requests start here
    num_decode_tokens: Int[Array, ""]  # prefill tokens start here
    decode: DecodeMetadata | None  # None iff no decodes; an absorbed step is all in here
    decode_requests: Int[Array, "runs"] | None  # of each row of ``decode``; None = its index
    prefill: PrefillMetadata | None  # new tokens among themselves; None iff none is expanded
    context: ContextMetadata | None  # None iff the bucket has no context rows


def query_runs(
    query_starts: Int[Array, "starts"], seq_lens: Int[Array, "requests"],
    page_table: Int[Array, "requests pages"], *, longest: int, runs: int,
) -> tuple[DecodeMetadata, Int[Array, "{runs}"]]:  # fmt: skip
    """Every request cut into runs of at most ``longest`` queries, and the request of each run.

    A run is a request of its own on the same pages: the ``n`` queries from query ``j`` of a
    request with ``q`` queries and ``s`` keys see ``s - q + j + n`` keys, the last of them all,
    which is the request's own causal mask. Rows behind the last run are padding.
    """
    lens = jnp.diff(query_starts)
    count = (lens + longest - 1) // longest
    ends = jnp.cumsum(count, dtype=jnp.int32)
    k = jnp.arange(runs, dtype=jnp.int32)
    real = k < ends[-1]
    owner = jnp.searchsorted(ends, k, side="right", method="compare_all")
    request = jnp.where(real, owner.astype(jnp.int32), 0)
    first = longest * (k - ends[request] + count[request])
    stop = jnp.minimum(first + longest, lens[request])
    begins = jnp.where(real, query_starts[request] + first, query_starts[-1])
    decode = DecodeMetadata(
        max_query_len=longest,
        page_table=page_table[request],
        seq_lens=jnp.where(real, seq_lens[request] - lens[request] + stop, 0),
        query_starts=jnp.concatenate([begins, query_starts[-1:]]),
    )
    return decode, request


def build_mla(
    query_starts: Int[Array, "starts"], seq_lens: Int[Array, "requests"],
    page_table: Int[Array, "requests pages"], num_decodes: Int[Array, ""], *, bucket: MLABucket,
    page: int,
) -> MLAMetadata:  # fmt: skip
    """Derive a step's metadata on the device, inside the compiled step.

    ``num_decodes`` leading requests have one token each; the rest are prefills; then padding
    with query and sequence length 0 and page table 0.
    """
    group = GroupSpec("latent", page)
    common = build_common(
        query_starts,
        seq_lens,
        {group.name: page_table},
        jnp.sum(seq_lens > 0, dtype=jnp.int32),
        bucket=CommonBucket(requests=bucket.requests, tokens=bucket.tokens, pages=(bucket.pages,)),
        groups=(group,),
    )
    return mla_views(common, num_decodes, bucket=bucket, group=group.name)


def mla_views(
    common: CommonMetadata, num_decodes: Int[Array, ""], *, bucket: MLABucket, group: str
) -> MLAMetadata:
    """Decodes, prefills and cached context of a step over the cache group of this name."""
    query_starts, seq_lens = common.query_starts, common.seq_lens
    page_table = common.page_tables[group]
    num_decode_tokens = query_starts[num_decodes]
    decode = decode_requests = prefill = context = None
    if bucket.absorb:
        decode, decode_requests = query_runs(
            query_starts, seq_lens, page_table, longest=bucket.absorb, runs=bucket.runs
        )
    elif d := bucket.decodes:
        decode = DecodeMetadata(
            max_query_len=1,
            page_table=page_table[:d],
            seq_lens=jnp.where(jnp.arange(d) < num_decodes, seq_lens[:d], 0),
            query_starts=jnp.minimum(query_starts[: d + 1], num_decode_tokens),
        )
    if (p := bucket.prefills) and not bucket.absorb:
        rows = num_decodes + jnp.arange(p, dtype=jnp.int32)
        starts = query_starts[num_decodes + jnp.arange(p + 1)] - num_decode_tokens
        prefill = PrefillMetadata(query_starts=starts, key_starts=starts)
        if bucket.context_rows:
            lens = seq_lens - jnp.diff(query_starts)
            behind = jnp.arange(lens.size, dtype=jnp.int32) >= num_decodes
            before = exclusive_sum(jnp.where(behind, lens, 0))
            context = ContextMetadata(
                rows=bucket.context_rows,
                page_table=page_table[rows],
                context_starts=before[num_decodes + jnp.arange(p + 1)],
                query_starts=starts,
            )
    return MLAMetadata(
        bucket=bucket,
        positions=common.positions,
        slots=common.slots[group],
        real=common.real,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        decode=decode,
        decode_requests=decode_requests,
        prefill=prefill,
        context=context,
    )
