"""Prompts, wishes and settings as an engine is given them, checked before anything is done."""

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mla_jax.errors import EngineError, shown
from mla_jax.model.sampling import SamplingParams

__all__ = [
    "check_cache_fits",
    "checked_params",
    "checked_prompt",
    "checked_prompts",
    "checked_wishes",
]


def check_cache_fits(groups: Sequence[Any], num_pages: Sequence[int], device: Any) -> None:
    """Refuse caches that are larger than the device's whole memory, before they are asked for.

    A CPU's memory is the machine's: asked for more, the system ends the process. ``groups`` are
    the model's ``CacheGroup``; ``num_pages`` has the pages of each.

    Raises:
        EngineError: with the pages that the memory holds.
    """
    size = sum(n * group.page_bytes for n, group in zip(num_pages, groups, strict=True))
    memory = _memory_of(device)
    if memory is None or size <= memory:
        return
    first, tokens = num_pages[0], groups[0].tokens
    given = f"{size:,} bytes ({first:,} pages of {tokens:,} tokens)"
    most = memory * first // size
    hint = f"{most:,} such pages are as large as all of it." if most > 1 else "Use smaller pages."
    raise EngineError("cache", given, f"at most {memory:,} bytes, the device's memory", hint)


def _memory_of(device: Any) -> int | None:
    """Bytes of a ``jax.Device``; ``None`` where nobody says."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return limit


def checked_prompts(prompts: Any) -> Sequence[Sequence[int]]:
    """Prompts for ``Engine.generate``: a sequence of sequences.

    Raises:
        EngineError: it is none, or one of them is none. What is in them is not looked at.
    """
    if not _is_sequence(prompts):
        hint = "Text becomes token ids through the model's tokenizer." if _is_text(prompts) else ""
        raise EngineError("generate: prompts", _kind(prompts), "a sequence of prompts", hint)
    for i, prompt in enumerate(prompts):
        checked_prompt(prompt, where=f"generate: prompt {i}", whole=prompts)
    return prompts


def checked_prompt(prompt: Any, *, where: str, whole: Any = None) -> Sequence[int]:
    """A prompt: a sequence; its ids are checked against the vocabulary by the scheduler."""
    if _is_sequence(prompt):
        return prompt
    hint = "Text becomes token ids through the model's tokenizer." if _is_text(prompt) else ""
    if whole is not None and not hint:
        hint = f"A single prompt is written [{shown(whole)}]."
    raise EngineError(where, _kind(prompt), "a sequence of token ids", hint)


def checked_params(params: Any, *, where: str = "params") -> SamplingParams:
    """What one request asks for; ``None`` asks for the defaults."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    hint = ""
    if isinstance(params, Mapping):
        inside = ", ".join(f"{key}=…" for key in list(params)[:3])
        hint = f"Write SamplingParams({inside})."
    raise EngineError(where, _kind(params), "a SamplingParams, or None: the defaults", hint)


def checked_wishes(params: Any, prompts: int) -> list[SamplingParams]:
    """One wish for every prompt, from one for all or one each.

    Raises:
        EngineError: neither, or not as many as prompts.
    """
    if not _is_sequence(params):
        return [checked_params(params, where="generate: params")] * prompts
    if len(params) != prompts:
        raise EngineError("generate: params", len(params), f"one, or {prompts}, one each")
    return [checked_params(p, where=f"generate: params {i}") for i, p in enumerate(params)]


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes | bytearray)


def _is_sequence(value: Any) -> bool:
    """Lists, tuples, ranges and arrays; no text, mapping, set or generator."""
    if _is_text(value) or isinstance(value, Mapping | AbstractSet):
        return False
    try:
        len(value)
        iter(value)
    except TypeError:  # an array without axes has both, and neither
        return False
    return True


def _kind(value: object) -> str:
    """``5 (int)``, so that an array or text of the same look is told apart."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = shown(value)
    return f"{shown(text)} ({type(value).__name__})"
