"""How many pages an engine's cache groups have, and whether a device has room for them."""

import bisect
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from mla_jax.checks import checked_size
from mla_jax.errors import EngineError
from mla_jax.model.family import CacheGroup, Serving
from mla_jax.types import cdiv

__all__ = [
    "bytes_of", "check_cache_fits", "check_histories_fit", "page_counts", "pages_that_fit",
    "room_beside",
]  # fmt: skip

SHARE, SHARE_OF_CPU = 0.9, 0.25
"""Of a device's memory for weights and caches together; a CPU's is not an engine's alone.

The rest is for what a step computes. On a GPU it is a share of what JAX takes for itself.
"""

_GIB = 2**30
_PAGES = "2 or more (page 0 is never given), at most 2,147,483,647, or None: what fits"


def page_counts(groups: Sequence[CacheGroup], num_pages: int, serving: Serving) -> list[int]:
    """Pages of each group for the tokens that ``num_pages`` of the first hold, and the null page.

    Those of a window, of which old pages are given back, are fewer: what all requests see.

    Raises:
        EngineError: a number of pages that no cache can have.
    """
    checked_size("num_pages", num_pages, low=2, allowed=_PAGES)
    tokens = (num_pages - 1) * groups[0].tokens
    most = {"requests": serving.max_requests, "chunk": serving.prefill_chunk}
    return [1 + group.pages_for(tokens, **most) for group in groups]


def pages_that_fit(groups: Sequence[CacheGroup], serving: Serving, room: int) -> int:
    """The most pages of the first group with which all groups take at most ``room`` bytes.

    Never more than ``max_requests`` requests of ``max_model_len`` tokens fill.

    Raises:
        EngineError: there is no room for two pages.
    """

    def size(num_pages: int) -> int:
        return _bytes(groups, page_counts(groups, num_pages, serving))

    most = 1 + serving.max_requests * cdiv(serving.max_model_len, groups[0].tokens)
    found = 1 + bisect.bisect_right(range(2, most + 1), room, key=size)
    if found < 2:
        given = f"{max(room, 0):,} bytes beside the weights"
        allowed = f"{size(2):,} or more, for two pages"
        hint = "More devices, smaller pages or e4m3 weights make room."
        raise EngineError("room for caches", given, allowed, hint)
    return found


def room_beside(weights: Any, device: Any, *, later: int = 0) -> int:
    """Bytes for caches on ``device``, which holds ``weights`` (a tree of arrays) already.

    ``later`` bytes are kept for what is made after this.

    In whole GiB where there is one: engines of equal settings have equally many pages then, and
    find each other's compiled programs.

    Raises:
        EngineError: the device does not say how much memory it has.
    """
    memory = _memory_of(device)
    if memory is None:
        allowed = "a number, because the device does not say how much memory it has"
        raise EngineError("num_pages", None, allowed)
    share = SHARE_OF_CPU if device.platform == "cpu" else SHARE
    used = (device.memory_stats() or {}).get("bytes_in_use", 0)
    room = int(share * memory) - max(used, bytes_of(weights)) - later
    return room if room < _GIB else room // _GIB * _GIB


def check_cache_fits(groups: Sequence[CacheGroup], pages: Sequence[int], device: Any) -> None:
    """Refuse caches that are larger than the device's whole memory, before they are asked for.

    A CPU's memory is the machine's: asked for more, the system ends the process. ``pages``: how
    many each group has.

    Raises:
        EngineError: with the pages that the memory holds.
    """
    size, memory = _bytes(groups, pages), _memory_of(device)
    if memory is None or size <= memory:
        return
    first, tokens = pages[0], groups[0].tokens
    given = f"{size:,} bytes ({first:,} pages of {tokens:,} tokens)"
    most = memory * first // size
    hint = f"{most:,} such pages are as large as all of it." if most > 1 else "Use smaller pages."
    raise EngineError("cache", given, f"at most {memory:,} bytes, the device's memory", hint)


def check_histories_fit(requests: int, size: int, device: Any) -> None:
    """Refuse token histories that are larger than the device's whole memory.

    Raises:
        EngineError: with the requests that it holds.
    """
    memory = _memory_of(device)
    if memory is not None and size > memory:
        allowed = f"at most {memory * requests // size:,}: their token histories fill the memory"
        raise EngineError("max_requests", f"{requests:,} ({size:,} bytes)", allowed)


def bytes_of(tree: Any) -> int:
    """Bytes that the arrays of ``tree`` take on one device."""
    arrays = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def _bytes(groups: Sequence[CacheGroup], pages: Sequence[int]) -> int:
    return sum(n * group.page_bytes for n, group in zip(pages, groups, strict=True))


def _memory_of(device: Any) -> int | None:
    """Bytes of a ``jax.Device``; ``None`` where the device does not say."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return limit
