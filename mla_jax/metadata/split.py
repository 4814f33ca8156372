"""Where the decodes of an ordered batch end. Host only: counts decide programs, not arrays.

All functions take host arrays and real counts (no padding); pad afterwards.
"""

from typing import NamedTuple

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import HostBatch
from mla_jax.types import Array, Bool, Int

__all__ = [
    "DecodePrefillSplit",
    "SplitCounts",
    "split_decodes_and_prefills",
]


class DecodePrefillSplit(NamedTuple):
    """Requests and tokens of the leading decodes and of the rest."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class SplitCounts:
    """The same, read from the first four of a step's ``counts``: apart, each costs a kernel."""

    counts: Int[Array, "counts"]

    @property
    def num_decodes(self) -> Int[Array, ""]:
        return self.counts[0]

    @property
    def num_prefills(self) -> Int[Array, ""]:
        return self.counts[1]

    @property
    def num_decode_tokens(self) -> Int[Array, ""]:
        return self.counts[2]

    @property
    def num_prefill_tokens(self) -> Int[Array, ""]:
        return self.counts[3]


def split_decodes_and_prefills(
    host: HostBatch,
    decode_threshold: int = 1,
    *,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    debug: bool = False,
) -> DecodePrefillSplit:
    """The first request that is not a decode ends the decode region, whatever follows it.

    A decode has ``query_len <= decode_threshold``. ``require_uniform``: all decodes have the
    length of request 0 (length 0 is padding and fits anywhere). Short queries of requests whose
    prompt is unfinished count as decodes unless ``treat_short_extends_as_decodes`` is false.

    Raises:
        MetadataError: ``is_prefilling`` is needed and absent, or, with ``debug``, a decode
            stands behind a prefill.
    """
    starts = host.query_starts
    requests, tokens = host.num_requests, host.num_tokens
    if requests == 0:
        return DecodePrefillSplit(0, 0, 0, 0)
    short = treat_short_extends_as_decodes
    first = host.leading_up_to(decode_threshold)
    uniform = not require_uniform or (
        decode_threshold == 1 and (host.max_query_len <= 1 or starts[1] > 0)
    )
    if debug or (0 < first and not (short and uniform)):
        lens = host.query_lens[:requests]
        prefill = lens > decode_threshold
        if require_uniform:
            prefill = (lens != lens[0]) & (lens != 0)
        if not short:
            prefill = prefill | _is_prefilling(host)
        if debug and not require_uniform:
            _check_order(lens, prefill)
        if first > 0:
            first = int(prefill.argmax()) if prefill.any() else requests
    if first == requests:
        return DecodePrefillSplit(requests, 0, tokens, 0)
    before = starts.item(first)
    return DecodePrefillSplit(first, requests - first, before, tokens - before)


def _is_prefilling(host: HostBatch) -> Bool[np.ndarray, "requests"]:
    if host.is_prefilling is None:
        raise MetadataError(
            "treat_short_extends_as_decodes=False",
            "is_prefilling=None",
            "a boolean per request",
            "Build the host metadata with is_prefilling.",
        )
    return host.is_prefilling[: host.num_requests]


def _check_order(lens: Int[np.ndarray, "requests"], prefill: Bool[np.ndarray, "requests"]) -> None:
    """Refuse a decode behind a prefill; zero-length requests may stand anywhere."""
    behind = np.maximum.accumulate(prefill) & ~prefill & (lens > 0)
    if behind.any():
        i = int(np.argmax(behind))
        raise MetadataError(
            f"batch order: query_lens[{i}]",
            f"{int(lens[i])} behind a prefill",
            "decodes before prefills",
            "Put the decodes first (compat.reorder says by which swaps).",
        )
