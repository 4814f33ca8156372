"""Ladders of the sparse builders by themselves: a rung of every dimension. Pure Python."""

from dataclasses import dataclass

from mla_jax.metadata.buckets import Ladder, powers_of_two

__all__ = ["IndexerLadder", "SWALadder"]


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


@dataclass(frozen=True, kw_only=True)
class SWALadder:
    """Ladders of every dimension of ``WindowBucket`` but the C128A width."""

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
