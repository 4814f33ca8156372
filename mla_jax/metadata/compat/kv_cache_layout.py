"""The order of axes inside a cache page: decided once per process, then frozen.

For MLA there is one latent head, so the layouts differ by the place of a singleton axis.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from mla_jax.errors import MetadataError

__all__ = [
    "KVCacheLayout",
    "get_kv_cache_layout",
    "reset_kv_cache_layout",
    "set_kv_cache_layout",
]

type KVCacheLayout = Literal["NHD", "HND"]
"""``NHD``: a page is ``[tokens, heads, dim]``; ``HND``: ``[heads, tokens, dim]``."""


@dataclass
class _Choice:
    wanted: KVCacheLayout | None = None  # set by a program
    frozen: KVCacheLayout | None = None  # what the first query answered


_choice = _Choice()


def _checked(layout: str) -> KVCacheLayout:
    allowed = get_args(KVCacheLayout.__value__)
    if layout not in allowed:
        raise MetadataError("KV cache layout", repr(layout), f"one of {', '.join(allowed)}")
    return cast(KVCacheLayout, layout)


def set_kv_cache_layout(layout: str) -> None:
    """Choose the layout; without effect after the first query, until a reset."""
    _choice.wanted = _checked(layout)


def get_kv_cache_layout(required: str | None = None) -> KVCacheLayout:
    """The layout set, else the one a connector requires, else ``NHD``; the first answer stays.

    No environment variable is read (vLLM: ``VLLM_KV_CACHE_LAYOUT``): who has one sets it.
    """
    needed = _checked(required or "NHD")
    if _choice.frozen is None:
        _choice.frozen = _choice.wanted or needed
    return _choice.frozen


def reset_kv_cache_layout() -> None:
    """Forget the answer and the setting."""
    _choice.wanted = _choice.frozen = None
