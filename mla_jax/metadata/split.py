"""Where the decodes of an ordered batch end. Host only: counts decide programs, not arrays.

All functions take host arrays and real counts (no padding); pad afterwards.
"""

from typing import NamedTuple

import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import CommonAttentionHost
from mla_jax.types import Bool, Int

__all__ = [
    "DecodePrefillSplit",
    "DecodeExtendPrefillSplit",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
]


class DecodePrefillSplit(NamedTuple):
    """Requests and tokens of the leading decodes and of the rest."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class DecodeExtendPrefillSplit(NamedTuple):
    """Decodes, then long queries with cached context, then long queries without."""

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    host: CommonAttentionHost,
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
    starts = host.query_start_loc_cpu
    requests, tokens = host.num_reqs, host.num_actual_tokens
    if requests == 0:
        return DecodePrefillSplit(0, 0, 0, 0)
    short = treat_short_extends_as_decodes
    first = host.leading_up_to(decode_threshold)
    alike = decode_threshold == 1 and (host.max_query_len <= 1 or starts[1] > 0)
    if debug or (0 < first and (not short or (require_uniform and not alike))):
        lens = host.query_lens_cpu[:requests]
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
    before = int(starts[first])
    return DecodePrefillSplit(first, requests - first, before, tokens - before)


def _is_prefilling(host: CommonAttentionHost) -> Bool[np.ndarray, "requests"]:
    if host.is_prefilling is None:
        raise MetadataError(
            "treat_short_extends_as_decodes=False",
            "is_prefilling=None",
            "a boolean per request",
            "Build the host metadata with is_prefilling.",
        )
    return host.is_prefilling[: host.num_reqs]


def _check_order(lens: Int[np.ndarray, "requests"], prefill: Bool[np.ndarray, "requests"]) -> None:
    """Refuse a decode behind a prefill; zero-length requests may stand anywhere."""
    behind = np.maximum.accumulate(prefill) & ~prefill & (lens > 0)
    if behind.any():
        i = int(np.argmax(behind))
        raise MetadataError(
            f"batch order: query_lens[{i}]",
            f"{int(lens[i])} behind a prefill",
            "decodes before prefills",
            "Apply reorder_batch_to_split_decodes_and_prefills first.",
        )


def split_decodes_prefills_and_extends(
    host: CommonAttentionHost,
    seq_lens: Int[np.ndarray, "requests"],
    decode_threshold: int = 1,
) -> DecodeExtendPrefillSplit:
    """Three regions: decodes, then extends, then prefills (``seq_len == query_len``)."""
    decodes, rest, decode_tokens, rest_tokens = split_decodes_and_prefills(host, decode_threshold)
    starts = host.query_start_loc_cpu
    lens = np.diff(starts[: host.num_reqs + 1])[decodes:]
    pure = (seq_lens[decodes : host.num_reqs] == lens) & (lens > decode_threshold)
    extends = int(np.argmax(pure)) if pure.any() else rest
    extend_tokens = int(starts[decodes + extends]) - decode_tokens
    if extends == rest:
        extend_tokens = rest_tokens
    return DecodeExtendPrefillSplit(
        decodes,
        extends,
        rest - extends,
        decode_tokens,
        extend_tokens,
        rest_tokens - extend_tokens,
    )


def split_prefill_chunks(
    seq_lens: Int[np.ndarray, "requests"], workspace: int, offset: int = 0
) -> list[tuple[int, int]]:
    """Greedy groups ``[start, stop)`` of whole requests with ``sum(seq_lens) <= workspace``.

    ``offset`` is added to every bound: the first prefill's place in the batch.
    """
    groups: list[tuple[int, int]] = []
    start = used = 0
    for i, length in enumerate(seq_lens.tolist()):
        if length > workspace:
            raise MetadataError(
                f"seq_lens[{i}]", length, f"at most {workspace}, the rows of the workspace"
            )
        if used + length > workspace:
            groups.append((offset + start, offset + i))
            start, used = i, 0
        used += length
    if len(seq_lens):
        groups.append((offset + start, offset + len(seq_lens)))
    return groups
