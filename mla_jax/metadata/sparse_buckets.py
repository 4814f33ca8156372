"""Static sizes of the sparse-attention metadata and their ladders. Pure Python."""

from dataclasses import dataclass
from functools import cache

from mla_jax.metadata.buckets import Ladder, powers_of_two

__all__ = [
    "IndexerBucket",
    "IndexerLadder",
    "SWABucket",
    "SWALadder",
    "indexer_bucket",
    "swa_bucket",
]


@dataclass(frozen=True, order=True, kw_only=True)
class IndexerBucket:
    """Static half of one step of indexer metadata."""

    decode_rows: int  # rows of the decode tensors; 0 iff no decodes
    decode_len: int  # query tokens of one row
    chunks: int  # prefill chunks; 0 iff no prefills
    chunk_requests: int  # requests of one chunk
    chunk_queries: int  # query rows of one chunk
    chunk_keys: int  # gathered key rows of one chunk


@dataclass(frozen=True, kw_only=True)
class IndexerLadder:
    """Ladders of every dimension of ``IndexerBucket`` but the decode length."""

    decode_rows: Ladder
    chunks: Ladder
    chunk_requests: Ladder
    chunk_queries: Ladder
    chunk_keys: Ladder

    @classmethod
    def default(
        cls, *, max_requests: int, max_tokens: int, max_keys: int, max_chunks: int, next_n: int
    ) -> "IndexerLadder":
        """Powers of two up to each limit; key rows in powers of four.

        ``max_keys``: rows of the workspace, or of the longest request if that is more.
        """
        rows = max_requests * next_n
        return cls(
            decode_rows=Ladder("decode rows", powers_of_two(rows)),
            chunks=Ladder("prefill chunks", powers_of_two(max_chunks)),
            chunk_requests=Ladder("requests of a chunk", powers_of_two(max_requests)),
            chunk_queries=Ladder(
                "queries of a chunk", powers_of_two(max_tokens, smallest=min(16, max_tokens))
            ),
            chunk_keys=Ladder("keys of a chunk", powers_of_two(max_keys)[::-2][::-1]),
        )


@dataclass(frozen=True, order=True, kw_only=True)
class SWABucket:
    """Static half of one step of sliding-window metadata."""

    decode_tokens: int  # 0 iff no decodes
    prefills: int  # prefill requests; 0 iff prefill_tokens is 0
    prefill_tokens: int
    chunks: int  # workspace chunks of the prefills
    c128a_width: int  # columns of a C128A list


@dataclass(frozen=True, kw_only=True)
class SWALadder:
    """Ladders of every dimension of ``SWABucket`` but the C128A width."""

    decode_tokens: Ladder
    prefills: Ladder
    prefill_tokens: Ladder
    chunks: Ladder

    @classmethod
    def default(cls, *, max_requests: int, max_tokens: int, next_n: int) -> "SWALadder":
        """Powers of two up to each limit."""
        return cls(
            decode_tokens=Ladder("decode tokens", powers_of_two(max_requests * next_n)),
            prefills=Ladder("prefill requests", powers_of_two(max_requests)),
            prefill_tokens=Ladder(
                "prefill tokens", powers_of_two(max_tokens, smallest=min(16, max_tokens))
            ),
            chunks=Ladder("workspace chunks", powers_of_two(max_requests)),
        )


# Equal buckets are one object: quick to get and to compare.
indexer_bucket = cache(IndexerBucket)
swa_bucket = cache(SWABucket)
