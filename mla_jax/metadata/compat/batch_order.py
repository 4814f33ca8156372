"""Permuting a ragged batch: requests, their tokens, and every array over either.

The first generation of metadata puts prefills first, everything else here decodes first.
"""

from dataclasses import dataclass

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.types import Int

__all__ = ["BatchOrder", "decodes_first", "permute_batch", "prefills_first"]


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """A permutation of requests and the permutation of tokens that follows from it."""

    requests: Int[np.ndarray, "requests"]  # old row of each new row
    tokens: Int[np.ndarray, "tokens"]  # old token of each new token
    query_start_loc: Int[np.ndarray, "starts"]  # of the new order

    def per_request(self, array):
        """An array over requests (axis 0), host or device, in the new order."""
        return array[self.requests]

    def per_token(self, array):
        """An array over tokens (axis 0), host or device, in the new order."""
        return array[self.tokens]

    def inverse(self) -> "BatchOrder":
        """The order that undoes this one."""
        return permute_batch(self.query_start_loc, np.argsort(self.requests))


def permute_batch(
    query_start_loc: Int[np.ndarray, "starts"], order: Int[np.ndarray, "requests"]
) -> BatchOrder:
    """Request ``order[k]`` becomes request ``k``; its tokens keep their order."""
    if not np.array_equal(np.sort(order), np.arange(len(query_start_loc) - 1)):
        raise MetadataError("order of requests", order.tolist(), "a permutation of all requests")
    lens = np.diff(query_start_loc)[order]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    shift = np.repeat(query_start_loc[:-1][order] - starts[:-1], lens)
    return BatchOrder(requests=order, tokens=np.arange(starts[-1]) + shift, query_start_loc=starts)


def decodes_first(query_start_loc: Int[np.ndarray, "starts"], num_prefills: int) -> BatchOrder:
    """From prefills first to decodes first."""
    return _rotate(query_start_loc, num_prefills)


def prefills_first(query_start_loc: Int[np.ndarray, "starts"], num_decodes: int) -> BatchOrder:
    """From decodes first to prefills first."""
    return _rotate(query_start_loc, num_decodes)


def _rotate(query_start_loc: np.ndarray, by: int) -> BatchOrder:
    return permute_batch(query_start_loc, np.roll(np.arange(len(query_start_loc) - 1), -by))
