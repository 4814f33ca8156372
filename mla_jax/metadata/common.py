"""What every step shares: which request a token belongs to, its position, its cache slots.

Requests are in batch order, tokens of one request contiguous and in position order.
``query_starts`` is the exclusive sum of query lengths; padding repeats its last value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.context_parallel import WHOLE, ContextShard
from mla_jax.types import PAD_SLOT, Array, Bool, Int, cdiv, made

__all__ = [
    "CommonMetadata",
    "GroupSpec",
    "HostBatch",
    "build_common",
    "exclusive_sum",
    "slot_mapping",
    "token_positions",
    "token_to_request",
    "warmup_common",
]


INT32_MAX = int(np.iinfo(np.int32).max)
INT32, UINT32 = np.dtype(np.int32), np.dtype(np.uint32)  # numpy looks up ``np.int32`` every time

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
    page_table: Int[Array, "requests pages"], request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"], real: Bool[Array, "tokens"], *, page: int, ratio: int = 1,
    shard: ContextShard = WHOLE,
) -> Int[Array, "tokens"]:  # fmt: skip
    """``page_table[request, p // page] * page + p % page``; ``PAD_SLOT`` where not real.

    A position outside the table has no slot either, so a wrong length can lose a token but
    never write another request's page. With ``ratio > 1`` a row stands for so many tokens: a
    token has the row that it completes (``(p + 1) % ratio == 0``, at ``p // ratio``), the others
    none; ``page`` counts rows. Under context parallelism a table entry covers ``page * ranks``
    positions, of which a rank holds every ``ranks``-th run of ``interleave``; tokens of other
    ranks have no slot here.
    """
    check_sizes(page=page, ratio=ratio)
    shard.check_page(page)
    inside = real & (positions >= 0)
    if ratio > 1:
        inside = inside & ((positions + 1) % ratio == 0)
        positions = positions // ratio
    column, offset = positions // (page * shard.ranks), positions % (page * shard.ranks)
    run = offset // shard.interleave
    local = run % shard.ranks == shard.rank
    inside = inside & local & (column < page_table.shape[1])
    page_id = page_table[request, jnp.where(inside, column, 0)]
    row = run // shard.ranks * shard.interleave + offset % shard.interleave
    return jnp.where(inside, page_id * page + row, PAD_SLOT)


def exclusive_sum(x: Int[Array, "n"]) -> Int[Array, "starts"]:
    """``out[i] = sum(x[:i])``, from 0 to the sum of all: one entry more than ``x``."""
    n = x.shape[0]
    if n > FEW_SUMMANDS:
        total = jnp.cumsum(x, dtype=jnp.int32)
        return jnp.concatenate([jnp.zeros((1,), jnp.int32), total])
    # Few: a masked sum is one kernel, a cumulative sum two or three.
    before = jnp.tri(n + 1, n, -1, dtype=bool)
    return jnp.sum(jnp.where(before, x, 0), axis=1, dtype=jnp.int32)


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1, by its name."""
    for name, given in sizes.items():
        if given < 1:
            raise MetadataError(name, given, "1 or more")


MAX_CHUNKS = 2**16
"""Pieces of one step's plan: more are a workspace far too small, and no plan would end."""


def check_chunks(chunks: int, workspace: int) -> int:
    """``chunks``, refused where a plan would have more than ``MAX_CHUNKS``."""
    if chunks > MAX_CHUNKS:
        raise MetadataError(
            f"chunks of a step in a workspace of {workspace}",
            chunks,
            f"at most {MAX_CHUNKS}",
            "Give it more rows.",
        )
    return chunks


@dataclass(frozen=True)
class GroupSpec:
    """A group of a cache as metadata sees it: layers that share page table and slots.

    A *ring* has one page for each request, whatever its length: position ``p`` has row
    ``p % page``, and of a step's tokens only the last ``page`` of a request have a slot.
    """

    name: str
    page: int  # rows of a page
    ratio: int = 1  # tokens that a row stands for: a page covers ``page * ratio`` of them
    ring: bool = False

    def __post_init__(self):
        check_sizes(**{f"page of {self.name}": self.page, f"ratio of {self.name}": self.ratio})

    @property
    def tokens(self) -> int:
        """Tokens that a page covers; those of a ring any number."""
        return INT32_MAX if self.ring else self.page * self.ratio

    def pages_of(self, tokens: int) -> int:
        """Width of a page table whose requests have so many tokens at most."""
        return cdiv(tokens, self.tokens)


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """What the host knows about a step: every decision about shapes is made from this.

    With asynchronous speculation the host assumes that all drafts are accepted: ``seq_lens``
    then exceed the true lengths, which only the device has. Bounds size buffers and loops; they
    are never lengths of an attention.
    """

    query_starts: Int[np.ndarray, "starts"]
    seq_lens: Int[np.ndarray, "requests"]  # with this step's tokens; bounds unless ``exact``
    exact: bool
    is_prefilling: Bool[np.ndarray, "requests"] | None  # computed < prompt; None = not tracked
    num_requests: int  # real requests; padding is behind them
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(
        cls,
        query_lens: Int[np.ndarray, "queries"],
        seq_lens: Int[np.ndarray, "requests"],
        *,
        is_prefilling: Bool[np.ndarray, "requests"] | None = None,
        exact: bool = True,
    ) -> "HostBatch":
        """From real requests; ``exact=False``: ``seq_lens`` are upper bounds.

        Raises:
            MetadataError: lengths that no step can have.
        """
        queries, lens = _lengths("query_lens", query_lens), _lengths("seq_lens", seq_lens)
        n = len(queries)
        if n != len(lens):
            raise MetadataError("seq_lens", f"{len(lens)} entries", f"{n}, one each")
        if is_prefilling is not None and len(is_prefilling) != n:
            given = f"{len(is_prefilling)} entries"
            raise MetadataError("is_prefilling", given, f"{n}, one each")
        # ``argmax``: a maximum takes numpy twice as long. Read as unsigned, a negative number is
        # the largest. A length of at least a query's is not negative either.
        longest_query = longest = 0
        if n:
            longest_query = queries.item(queries.view(UINT32).argmax())
            longest = lens.item(lens.argmax())
            wrong = lens < queries
            if longest_query < 0 or wrong[wrong.argmax()]:
                raise _bad_length(queries, lens)
            if n * longest_query > INT32_MAX:
                total = int(queries.sum(dtype=np.int64))
                if total > INT32_MAX:
                    raise MetadataError("tokens of a step", total, f"at most {INT32_MAX}")
        starts = np.zeros(n + 1, INT32)
        np.add.accumulate(queries, out=starts[1:])
        return made(
            cls,
            query_starts=starts,
            seq_lens=lens,
            exact=exact,
            is_prefilling=is_prefilling,
            num_requests=n,
            num_tokens=starts.item(n),
            max_query_len=longest_query,
            max_seq_len=longest,
            query_lens=queries,  # known: not to be computed again
            _leading={},
            _lists={},
        )

    @cached_property
    def query_lens(self) -> Int[np.ndarray, "requests"]:
        """Tokens of each request; 0 = padding. Every builder asks: computed once."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @property
    def context_lens(self) -> Int[np.ndarray, "requests"]:
        """Cached tokens before this step, an upper bound where the lengths are."""
        return self.seq_lens - self.query_lens

    @cached_property
    def _leading(self) -> dict[int, int]:
        return {}

    def leading_up_to(self, query_len: int) -> int:
        """How many requests stand before the first one of more than ``query_len`` tokens."""
        if (found := self._leading.get(query_len)) is None:
            found = self.num_requests
            if found and self.max_query_len > query_len:
                longer = self.query_lens[:found] > query_len
                first = int(longer.argmax())
                found = first if longer[first] else found  # the longest may be a bound
            self._leading[query_len] = found
        return found

    @cached_property
    def _lists(self) -> dict[int, tuple[list[int], list[int]]]:
        return {}

    def lens_from(self, first: int) -> tuple[list[int], list[int]]:
        """Query and key lengths of the real requests from ``first`` on, for plans in Python."""
        if (found := self._lists.get(first)) is None:
            rows = slice(first, self.num_requests)
            queries, keys = self.query_lens[rows], self.seq_lens[rows]
            found = self._lists[first] = queries.tolist(), keys.tolist()
        return found

    def padded_arrays(
        self, bucket: CommonBucket
    ) -> tuple[Int[np.ndarray, "starts"], Int[np.ndarray, "requests"], np.int32]:
        """What ``build_common`` takes besides page tables: starts, lengths, real requests.

        Raises:
            MetadataError: the host has upper bounds of the lengths only, which no kernel may
                take, or the bucket is too small.
        """
        if not self.exact:
            raise MetadataError(
                "seq_lens",
                "upper bounds",
                "exact lengths",
                "Give build_common those that the device has.",
            )
        n, real = bucket.requests, self.num_requests
        if real > n or self.num_tokens > bucket.tokens:
            bucket.check_holds(requests=real, tokens=self.num_tokens)
        starts, lens = np.empty(n + 1, INT32), np.zeros(n, INT32)
        known = self.query_starts[: real + 1]
        starts[: real + 1] = known
        starts[real + 1 :] = known[real]
        lens[:real] = self.seq_lens[:real]
        return starts, lens, np.int32(real)


def _lengths(name: str, given: object) -> Int[np.ndarray, "n"]:
    """As int32, refused where one would wrap; ``of`` refuses negative ones."""
    array = np.asarray(given)
    if array.dtype == INT32 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MetadataError(name, f"{array.dtype} of shape {array.shape}", "a list of integers")
    wrong = (array < 0) | (array > INT32_MAX)
    if wrong.any():
        i = int(wrong.argmax())
        raise MetadataError(f"{name}[{i}]", int(array[i]), f"0 to {INT32_MAX}")
    return array.astype(np.int32)


def _bad_length(
    queries: Int[np.ndarray, "requests"], lens: Int[np.ndarray, "requests"]
) -> MetadataError:
    """Which one, and why."""
    if (queries < 0).any():
        i = int((queries < 0).argmax())
        return MetadataError(f"query_lens[{i}]", int(queries[i]), f"0 to {INT32_MAX}")
    i = int((lens < queries).argmax())
    least = f"at least the query length, {int(queries[i])}"
    return MetadataError(f"seq_lens[{i}]", int(lens[i]), least)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CommonMetadata:
    """One step's facts shared by all layers and all builders.

    Counts are those of real requests and tokens, as arrays: padding never compiles a new program.
    """

    bucket: CommonBucket = field(metadata={"static": True})
    groups: tuple[GroupSpec, ...] = field(metadata={"static": True})
    query_starts: Int[Array, "starts"]  # exclusive sum of query lengths
    seq_lens: Int[Array, "requests"]  # including this step's tokens; 0 = padding
    positions: Int[Array, "tokens"]  # absolute; 0 on padding
    requests: Int[Array, "tokens"]  # of each token; 0 on padding
    real: Bool[Array, "tokens"]  # not padding
    page_tables: dict[str, Int[Array, "requests _"]]  # of each group; 0 where unused
    slots: dict[str, Int[Array, "tokens"]]  # cache row each token writes or completes; -1 = none
    num_requests: Int[Array, ""]
    num_tokens: Int[Array, ""]
    max_query_len: Int[Array, ""]
    max_seq_len: Int[Array, ""]  # exact; the host's may be a bound

    def group(self, name: str) -> GroupSpec:
        """The group of this name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise MetadataError("cache group", name, " or ".join(g.name for g in self.groups))

    @property
    def query_lens(self) -> Int[Array, "requests"]:
        """Tokens of each request; 0 = padding."""
        return jnp.diff(self.query_starts)

    @property
    def context_lens(self) -> Int[Array, "requests"]:
        """Cached tokens before this step."""
        return self.seq_lens - self.query_lens


def build_common(
    query_starts: Int[Array, "starts"],
    seq_lens: Int[Array, "requests"],
    page_tables: Mapping[str, Int[Array, "requests _"]],
    num_requests: Int[Array, ""],
    *,
    bucket: CommonBucket,
    groups: tuple[GroupSpec, ...],
    shard: ContextShard = WHOLE,
) -> CommonMetadata:
    """Derive positions, slots and counts on the device, inside the compiled step.

    Arrays have the bucket's shapes; padded requests repeat the last start and have length 0.
    ``page_tables`` has one for each group.

    Raises:
        MetadataError: a group without a table, or a shape that is not the bucket's.
    """
    _check_shapes(query_starts, seq_lens, page_tables, bucket, groups)
    request, real = token_to_request(query_starts, bucket.tokens)
    positions = token_positions(query_starts, seq_lens, request, real)
    # Starts are monotone: all three are maxima, of one kernel.
    tokens, longest_query, longest = jax.lax.reduce(
        (query_starts[1:], jnp.diff(query_starts), seq_lens),
        (np.int32(0),) * 3,
        lambda a, b: jax.tree.map(jnp.maximum, a, b),
        (0,),
    )
    return CommonMetadata(
        bucket=bucket,
        groups=groups,
        query_starts=query_starts,
        seq_lens=seq_lens,
        positions=positions,
        requests=request,
        real=real,
        page_tables={g.name: page_tables[g.name] for g in groups},
        slots={
            g.name: _ring_slots(page_tables[g.name], request, positions, real, seq_lens, g.page)
            if g.ring
            else slot_mapping(
                page_tables[g.name],
                request,
                positions,
                real,
                page=g.page,
                ratio=g.ratio,
                shard=shard,
            )
            for g in groups
        },
        num_requests=num_requests,
        num_tokens=tokens,
        max_query_len=longest_query,
        max_seq_len=longest,
    )


def _ring_slots(
    page_table: Int[Array, "requests 1"], request: Int[Array, "tokens"],
    positions: Int[Array, "tokens"], real: Bool[Array, "tokens"], seq_lens: Int[Array, "requests"],
    page: int,
) -> Int[Array, "tokens"]:  # fmt: skip
    """Rows of the last ``page`` positions of each request; ``PAD_SLOT`` of all others."""
    kept = real & (positions >= seq_lens[request] - page)
    return slot_mapping(page_table, request, positions % page, kept, page=page)


def _check_shapes(query_starts, seq_lens, page_tables, bucket, groups) -> None:
    """Refuse arrays that are not of the bucket."""
    names = [g.name for g in groups]
    if sorted(page_tables) != sorted(names):
        raise MetadataError("page tables", sorted(page_tables), f"one of each group: {names}")
    r = bucket.requests
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("query_starts", query_starts.shape, (r + 1,)),
        ("seq_lens", seq_lens.shape, (r,)),
    ]
    for group, width in zip(groups, bucket.pages, strict=True):
        name = f"page table of {group.name}"
        shapes.append((name, page_tables[group.name].shape, (r, width)))
    for name, given, wanted in shapes:
        if tuple(given) != wanted:
            raise MetadataError(f"shape of {name}", given, f"{wanted}, as in {bucket}")


def warmup_common(bucket: CommonBucket, groups: tuple[GroupSpec, ...]) -> CommonMetadata:
    """A step of padding only: every slot is -1, so compiling with it touches no cache."""
    return build_common(
        jnp.zeros((bucket.requests + 1,), jnp.int32),
        jnp.zeros((bucket.requests,), jnp.int32),
        {
            g.name: jnp.zeros((bucket.requests, width), jnp.int32)
            for g, width in zip(groups, bucket.pages, strict=True)
        },
        jnp.zeros((), jnp.int32),
        bucket=bucket,
        groups=groups,
    )
