"""The order of axes inside a cache page, as a connector may ask for it.

For MLA there is one latent head, so the layouts differ by the place of a singleton axis and
nothing of ours depends on it.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from mla_jax.errors import MetadataError

__all__ = ["KVCacheLayout", "LayoutChoice"]

type KVCacheLayout = Literal["NHD", "HND"]
"""``NHD``: a page is ``[tokens, heads, dim]``; ``HND``: ``[heads, tokens, dim]``."""


def _checked(layout: str) -> KVCacheLayout:
    allowed = get_args(KVCacheLayout.__value__)
    if layout not in allowed:
        raise MetadataError("KV cache layout", repr(layout), f"one of {', '.join(allowed)}")
    return cast(KVCacheLayout, layout)


@dataclass(kw_only=True)
class LayoutChoice:
    """One engine's layout: decided by the first question, then frozen.

    No environment variable is read (vLLM: ``VLLM_KV_CACHE_LAYOUT``): who has one passes it.
    """

    wanted: str | None = None  # by the program; it goes before what a connector requires
    frozen: KVCacheLayout | None = None  # what the first question was answered

    def __post_init__(self):
        if self.wanted is not None:
            _checked(self.wanted)

    def get(self, required: str | None = None) -> KVCacheLayout:
        """The layout wanted, else the one a connector requires, else ``NHD``."""
        needed = _checked(required or "NHD")
        if self.frozen is None:
            self.frozen = needed if self.wanted is None else _checked(self.wanted)
        return self.frozen
