"""What every step shares: which request a token belongs to, its position, its cache slot.

Requests are in batch order, tokens of one request contiguous and in position order.
``query_starts`` is the exclusive sum of query lengths; padding repeats its last value.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.context_parallel import WHOLE, ContextShard, dcp_local_seq_lens
from mla_jax.types import PAD_SLOT, Array, Bool, Int

__all__ = [
    "CommonAttentionHost",
    "CommonAttentionMetadata",
    "build_common",
    "exclusive_sum",
    "slot_mapping",
    "token_positions",
    "token_to_request",
]


FEW_PAIRS = 2**24
"""Requests times tokens up to which comparing all is the faster search (H200: 2 µs at 2**22)."""

FEW_SUMMANDS = 1024
"""Entries up to which summing all pairs is the cheaper cumulative sum (H200: 1.7 us at 1024)."""


def token_to_request(
    query_starts: Int[Array, "starts"], tokens: int
) -> tuple[Int[Array, "tokens"], Bool[Array, "tokens"]]:
    """``(request of each token, is a real token)``; padding lanes map to request 0.

    ``request[t] = #{i : query_starts[i + 1] <= t}``; zero-length requests are skipped.
    """
    t = jnp.arange(tokens, dtype=jnp.int32)
    real = t < query_starts[-1]
    # Few: one fused compare-and-sum. Many: a binary search, a chain of dependent gathers.
    few = query_starts.shape[0] * tokens <= FEW_PAIRS
    method = "compare_all" if few else "scan_unrolled"
    request = jnp.searchsorted(query_starts[1:], t, side="right", method=method)
    return jnp.where(real, request.astype(jnp.int32), 0), real


def token_positions(
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    request: Int[Array, "tokens"],
    real: Bool[Array, "tokens"],
) -> Int[Array, "tokens"]:
    """Absolute position of each token, ``seq_len - query_len + index``; 0 on padding."""
    t = jnp.arange(request.shape[0], dtype=jnp.int32)
    p = t + (seq_lens - query_starts[1:])[request]
    return jnp.where(real, p, 0)


def slot_mapping(
    page_table: Int[Array, "requests pages"],
    request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    real: Bool[Array, "tokens"],
    *,
    page: int,
    shard: ContextShard = WHOLE,
) -> Int[Array, "tokens"]:
    """``page_table[request, p // page] * page + p % page``; ``PAD_SLOT`` where not real.

    A position outside the table has no slot either, so a wrong length can lose a token but
    never write another request's page. Under context parallelism a table entry covers
    ``page * ranks`` positions, of which a rank holds every ``ranks``-th run of ``interleave``;
    tokens of other ranks have no slot here.
    """
    shard.check_page(page)
    column, offset = positions // (page * shard.ranks), positions % (page * shard.ranks)
    run = offset // shard.interleave
    local = run % shard.ranks == shard.rank
    inside = real & local & (positions >= 0) & (column < page_table.shape[1])
    page_id = page_table[request, jnp.where(inside, column, 0)]
    row = run // shard.ranks * shard.interleave + offset % shard.interleave
    return jnp.where(inside, page_id * page + row, PAD_SLOT)


def _pad(array, size: int, mode: Literal["constant", "edge"] = "constant") -> Any:
    """Grow axis 0 to ``size`` with zeros (or the last entry), on the host or the device."""
    n = array.shape[0]
    if n == size:
        return array
    if not isinstance(array, np.ndarray):
        return jnp.pad(array, [(0, size - n)] + [(0, 0)] * (array.ndim - 1), mode=mode)
    padded = np.zeros((size, *array.shape[1:]), array.dtype)  # np.pad takes ten times as long
    padded[:n] = array
    if mode == "edge":
        padded[n:] = array[-1]
    return padded


def exclusive_sum(x: Int[Array, "n"]) -> Int[Array, "starts"]:
    """``out[i] = sum(x[:i])``, from 0 to the sum of all: one entry more than ``x``."""
    n = x.shape[0]
    if n > FEW_SUMMANDS:
        total = jnp.cumsum(x, dtype=jnp.int32)
        return jnp.concatenate([jnp.zeros((1,), jnp.int32), total])
    # Few: a masked sum is one kernel, a cumulative sum two or three.
    before = jnp.tri(n + 1, n, -1, dtype=bool)
    return jnp.sum(jnp.where(before, x, 0), axis=1, dtype=jnp.int32)


@dataclass(frozen=True, kw_only=True)
class CommonAttentionHost:
    """What the host knows about a step: every decision about shapes is made from this.

    With asynchronous speculation the host assumes that all drafts are accepted: bounds then
    exceed the true lengths, which only the device has. Bounds size buffers and loops; they are
    never lengths of an attention.
    """

    query_start_loc_cpu: Int[np.ndarray, "starts"]
    seq_lens_cpu_upper_bound: Int[np.ndarray, "requests"]  # exact on prefills
    seq_lens_cpu: Int[np.ndarray, "requests"] | None  # None = the host does not know
    is_prefilling: Bool[np.ndarray, "requests"] | None  # computed < prompt; None = not tracked
    encoder_seq_lens_cpu: Int[np.ndarray, "requests"] | None  # None = no cross attention
    num_reqs: int  # real requests; padding is behind them
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int  # of the upper bounds

    @classmethod
    def of(
        cls,
        query_lens: Int[np.ndarray, "requests"],
        seq_lens: Int[np.ndarray, "requests"],
        *,
        is_prefilling: Bool[np.ndarray, "requests"] | None = None,
        exact: bool = True,
    ) -> "CommonAttentionHost":
        """From real requests; ``exact=False``: ``seq_lens`` are upper bounds."""
        # Ufuncs, not numpy's functions around them: those take as long again.
        queries, bounds = np.asarray(query_lens, np.int32), np.asarray(seq_lens, np.int32)
        starts = np.zeros(len(queries) + 1, np.int32)
        np.add.accumulate(queries, out=starts[1:])
        host = cls(
            query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=bounds,
            seq_lens_cpu=bounds if exact else None,
            is_prefilling=is_prefilling,
            encoder_seq_lens_cpu=None,
            num_reqs=len(bounds),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.maximum.reduce(queries)) if len(queries) else 0,
            max_seq_len=int(np.maximum.reduce(bounds)) if len(bounds) else 0,
        )
        vars(host)["query_lens_cpu"] = queries  # known: not to be computed again
        return host

    @cached_property
    def query_lens_cpu(self) -> Int[np.ndarray, "requests"]:
        """Tokens of each request; 0 = padding. Every builder asks: computed once."""
        return self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]

    @cached_property
    def _leading(self) -> dict[int, int]:
        return {}

    def leading_up_to(self, query_len: int) -> int:
        """How many requests stand before the first one of more than ``query_len`` tokens."""
        if (found := self._leading.get(query_len)) is None:
            found = self.num_reqs
            if self.max_query_len > query_len:
                (longer,) = (self.query_lens_cpu[:found] > query_len).nonzero()
                found = int(longer[0]) if len(longer) else found  # the longest may be a bound
            self._leading[query_len] = found
        return found

    @cached_property
    def _lists(self) -> dict[int, tuple[list[int], list[int]]]:
        return {}

    def lens_from(self, first: int) -> tuple[list[int], list[int]]:
        """Query and key lengths of the real requests from ``first`` on, for plans in Python."""
        if (found := self._lists.get(first)) is None:
            rows = slice(first, self.num_reqs)
            queries, keys = self.query_lens_cpu[rows], self.seq_lens_cpu_upper_bound[rows]
            found = self._lists[first] = queries.tolist(), keys.tolist()
        return found

    @property
    def num_computed_tokens_cpu(self) -> Int[np.ndarray, "requests"]:
        """Cached tokens before this step, an upper bound where the lengths are."""
        return self.seq_lens_cpu_upper_bound - self.query_lens_cpu

    def padded_arrays(
        self, bucket: CommonBucket
    ) -> tuple[Int[np.ndarray, "starts"], Int[np.ndarray, "requests"], np.int32]:
        """What ``build_common`` takes besides the block table: starts, lengths, real requests.

        Raises:
            MetadataError: the host has upper bounds of the lengths only, which no kernel may take.
        """
        if self.seq_lens_cpu is None:
            raise MetadataError(
                "seq_lens_cpu",
                None,
                "exact lengths",
                "Give build_common those that the device has.",
            )
        bucket.check_holds(requests=self.num_reqs, tokens=self.num_actual_tokens, pages=0)
        starts = _pad(self.query_start_loc_cpu, bucket.requests + 1, "edge")
        return starts, _pad(self.seq_lens_cpu, bucket.requests), np.int32(self.num_reqs)

    def pad_to(self, bucket: CommonBucket) -> "CommonAttentionHost":
        """Padded requests have length 0; the counts stay those of the real ones."""
        r = bucket.requests
        bucket.check_holds(requests=self.num_reqs, tokens=self.num_actual_tokens, pages=0)
        return replace(
            self,
            query_start_loc_cpu=_pad(self.query_start_loc_cpu, r + 1, "edge"),
            seq_lens_cpu_upper_bound=_pad(self.seq_lens_cpu_upper_bound, r),
            **{
                name: None if (value := getattr(self, name)) is None else _pad(value, r)
                for name in ("seq_lens_cpu", "is_prefilling", "encoder_seq_lens_cpu")
            },
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata:
    """One step's facts shared by all layers and all builders.

    Only ``block_table_tensor`` and ``slot_mapping`` differ between groups of a cache. Counts are
    those of real requests and tokens, as arrays: padding never compiles a new program.
    """

    bucket: CommonBucket = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})
    query_start_loc: Int[Array, "starts"]  # exclusive sum of query lengths
    seq_lens: Int[Array, "requests"]  # including this step's tokens; 0 = padding
    block_table_tensor: Int[Array, "requests pages"]  # page ids; 0 where unused
    slot_mapping: Int[Array, "tokens"]  # cache row each token writes; -1 = none
    positions: Int[Array, "tokens"]  # absolute; 0 on padding, so test is_valid_token first
    num_reqs: Int[Array, ""]
    num_actual_tokens: Int[Array, ""]
    max_query_len: Int[Array, ""]
    max_seq_len: Int[Array, ""]  # exact; the host's may be a bound
    dcp_local_seq_lens: Int[Array, "requests"] | None  # None = no context parallelism
    encoder_seq_lens: Int[Array, "requests"] | None  # None = no cross attention
    logits_indices_padded: Int[Array, "logits"] | None  # None = every token may have logits
    num_logits_indices: Int[Array, ""] | None  # None exactly with the indices
    max_logits_per_req: Int[Array, ""] | None  # None exactly with the indices

    @property
    def batch_size(self) -> int:
        """Requests of the bucket, padding included."""
        return self.seq_lens.shape[0]

    def query_lens(self) -> Int[Array, "requests"]:
        """Tokens of each request; 0 = padding."""
        return jnp.diff(self.query_start_loc)

    def num_computed_tokens(self) -> Int[Array, "requests"]:
        """Cached tokens before this step."""
        return self.seq_lens - self.query_lens()

    def token_to_req(self) -> Int[Array, "tokens"]:
        """Request of each token; 0 on padding."""
        return token_to_request(self.query_start_loc, self.bucket.tokens)[0]

    def is_valid_token(self) -> Bool[Array, "tokens"]:
        """Not padding."""
        return jnp.arange(self.bucket.tokens, dtype=jnp.int32) < self.num_actual_tokens

    def with_block_table(
        self, block_table: Int[Array, "requests pages"], slots: Int[Array, "tokens"]
    ) -> "CommonAttentionMetadata":
        """The same step for another group of the cache."""
        bucket = replace(self.bucket, pages=block_table.shape[1])
        return replace(self, bucket=bucket, block_table_tensor=block_table, slot_mapping=slots)

    def unpadded(self, host: CommonAttentionHost) -> "CommonAttentionMetadata":
        """The real rows only. Host side: its shapes differ from step to step."""
        r, t = host.num_reqs, host.num_actual_tokens
        return self._resized(replace(self.bucket, requests=r, tokens=t), lambda x, n, _: x[:n])

    def pad_to(self, bucket: CommonBucket) -> "CommonAttentionMetadata":
        """A larger bucket by the padding rules: repeated starts, lengths 0, page 0, slot -1."""
        have = self.bucket
        bucket.check_holds(requests=have.requests, tokens=have.tokens, pages=have.pages)
        padded = self._resized(bucket, _pad)
        slots = padded.slot_mapping
        real = np.arange(bucket.tokens) < have.tokens
        module = np if isinstance(slots, np.ndarray) else jnp
        slots = module.where(real, slots, module.int32(PAD_SLOT))
        table = padded.block_table_tensor
        table = module.pad(table, ((0, 0), (0, bucket.pages - have.pages)))
        return replace(padded, slot_mapping=slots, block_table_tensor=table)

    def _resized(self, bucket: CommonBucket, resize) -> "CommonAttentionMetadata":
        """Apply ``resize(array, size, mode)`` to the array of every request and token."""
        per_request = ("seq_lens", "block_table_tensor", "dcp_local_seq_lens", "encoder_seq_lens")
        sizes = dict.fromkeys(per_request, bucket.requests) | {
            "slot_mapping": bucket.tokens,
            "positions": bucket.tokens,
        }
        arrays = {n: getattr(self, n) for n in sizes}
        changed = {n: resize(a, sizes[n], "constant") for n, a in arrays.items() if a is not None}
        starts = resize(self.query_start_loc, bucket.requests + 1, "edge")
        return replace(self, bucket=bucket, query_start_loc=starts, **changed)


def build_common(
    query_start_loc: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    block_table: Int[Array, "requests pages"],
    num_reqs: Int[Array, ""],
    *,
    bucket: CommonBucket,
    page: int,
    shard: ContextShard = WHOLE,
    causal: bool = True,
) -> CommonAttentionMetadata:
    """Derive positions, slots and counts on the device, inside the compiled step.

    Arrays have the bucket's shapes; padded requests repeat the last start and have length 0.
    """
    request, real = token_to_request(query_start_loc, bucket.tokens)
    positions = token_positions(query_start_loc, seq_lens, request, real)
    # Starts are monotone: all three are maxima, of one kernel.
    tokens, longest_query, longest = jax.lax.reduce(
        (query_start_loc[1:], jnp.diff(query_start_loc), seq_lens),
        (np.int32(0),) * 3,
        lambda a, b: jax.tree.map(jnp.maximum, a, b),
        (0,),
    )
    return CommonAttentionMetadata(
        bucket=bucket,
        causal=causal,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table_tensor=block_table,
        slot_mapping=slot_mapping(block_table, request, positions, real, page=page, shard=shard),
        positions=positions,
        num_reqs=num_reqs,
        num_actual_tokens=tokens,
        max_query_len=longest_query,
        max_seq_len=longest,
        dcp_local_seq_lens=None if shard is WHOLE else dcp_local_seq_lens(seq_lens, shard),
        encoder_seq_lens=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
    )
