"""Prompts, sampling parameters and settings of an engine, checked before anything is done."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from mla_jax.chat_template import is_chat
from mla_jax.errors import EngineError, described, shown
from mla_jax.model.sampling import SamplingParams

__all__ = [
    "NEEDS_TOKENIZER",
    "Names",
    "check_callback",
    "check_config",
    "check_parts",
    "checked_params",
    "checked_prompt",
    "checked_prompts",
    "params_of_prompts",
]

NEEDS_TOKENIZER = (
    "Text needs tokenizer.json in the model's folder, and the package tokenizers: pip install "
    "tokenizers jinja2."
)
_PROMPTS = "token ids, a text, or a list of messages"

_NOT_OF_THE_MODULE = "eos", "max_positions", "fp8_block", "ignored_layers"
"""Fields of a configuration that say how a model is stored or served, not what it computes."""


class Names(NamedTuple):
    """What a request and its prompt are called in errors."""

    request: str
    prompt: str

    @classmethod
    def of(cls, request: str) -> "Names":
        """Of a request that has one prompt."""
        return cls(request, f"{request}: prompt")


def check_parts(model: Any, config: Any, *, family: Any, text: Any, defaults: Any) -> None:
    """Refuse what cannot be a part of an engine.

    Raises:
        EngineError: one of them, with what it should be.
    """
    facts = "family", "vocab", "max_positions", "eos"
    parts = (
        ("model", callable(model), model, "a Flax NNX module, or a function that makes it"),
        (
            "config",
            all(hasattr(config, n) for n in facts),
            config,
            f"an object with {', '.join(facts)}",
        ),
        ("family", family is None or hasattr(family, "builder"), family, "a Family, or None"),
        ("text", text is None or hasattr(text, "begin"), text, "a TextProcessor, or None"),
        ("defaults", hasattr(defaults, "params"), defaults, "a GenerationDefaults, or None"),
    )
    for name, good, given, allowed in parts:
        if not good:
            raise EngineError(name, described(given), allowed)
    check_config(config, getattr(model, "config", None), "config", "that of the model")


def check_config(given: Any, other: Any, where: str, whose: str, hint: str = "") -> None:
    """Refuse a configuration whose model fields differ from those of ``other``.

    ``whose`` names ``other`` in the error.
    Configurations of different classes are not compared: a module of one's own may have another.
    """
    if type(other) is not type(given) or not dataclasses.is_dataclass(other):
        return
    names = [f.name for f in dataclasses.fields(other) if f.name not in _NOT_OF_THE_MODULE]
    if unlike := [name for name in names if getattr(given, name) != getattr(other, name)]:
        said, wanted = (shown({n: getattr(c, n) for n in unlike}) for c in (given, other))
        raise EngineError(where, said, f"{whose}: {wanted}", hint)


def check_callback(where: str, given: Any) -> None:
    """Refuse a callback that is neither a function nor None."""
    if given is not None and not callable(given):
        raise EngineError(where, described(given), "a function, or None")


def checked_prompts(
    prompts: Any, encode: Callable[[Any, str], list[int]] | None = None
) -> list[Sequence[int]]:
    """Prompts for ``Engine.generate``, each as ids: see ``checked_prompt``.

    Raises:
        EngineError: no sequence of prompts, or one of them is none.
    """
    if not _is_sequence(prompts):
        hint = ""
        if _is_text(prompts):
            hint = NEEDS_TOKENIZER if encode is None else "A single prompt is written [text]."
        raise EngineError("generate: prompts", described(prompts), "a sequence of prompts", hint)
    where = "generate: prompt"
    return [checked_prompt(p, f"{where} {i}", encode, prompts) for i, p in enumerate(prompts)]


def checked_prompt(
    prompt: Any,
    where: str,
    encode: Callable[[Any, str], list[int]] | None = None,
    whole: Any = None,
) -> Sequence[int]:
    """A prompt as a sequence of ids, which the scheduler compares with the vocabulary.

    ``encode`` makes ids of a text or a chat; None: the engine has no tokenizer.
    """
    chat = is_chat(prompt)
    if encode is not None and (chat or isinstance(prompt, str)):
        return encode(prompt, where)
    if _is_sequence(prompt) and not chat:
        _check_one(prompt, where, encode is not None)
        return prompt
    hint = NEEDS_TOKENIZER if chat or _is_text(prompt) else ""
    if whole is not None and isinstance(prompt, Mapping):
        hint = "A single chat is written [[{message}, …]]."
    elif whole is not None and not hint:
        hint = f"A single prompt is written [{shown(whole)}]."
    allowed = "a sequence of token ids"
    raise EngineError(where, described(prompt), allowed if encode is None else _PROMPTS, hint)


def _check_one(prompt: Sequence[Any], where: str, reads_text: bool) -> None:
    """Refuse several prompts in place of one: token ids are no texts and no chats."""
    first = next(iter(prompt), None)
    if _is_text(first) or is_chat(first):
        given = f"a list of {'texts' if _is_text(first) else 'chats'}"
        if not reads_text:
            raise EngineError(where, given, "a sequence of token ids", NEEDS_TOKENIZER)
        hint = "This is one prompt; generate takes a list of prompts."
        raise EngineError(where, given, _PROMPTS, hint)


def checked_params(
    params: Any, default: SamplingParams, *, where: str = "params"
) -> SamplingParams:
    """What one request asks for; ``None`` asks for the defaults."""
    if params is None:
        return default
    if isinstance(params, SamplingParams):
        return params
    hint = ""
    if isinstance(params, Mapping):
        inside = ", ".join(f"{key}=…" for key in list(params)[:3])
        hint = f"Write SamplingParams({inside})."
    raise EngineError(where, described(params), "a SamplingParams, or None: the defaults", hint)


def params_of_prompts(params: Any, prompts: int, default: SamplingParams) -> list[SamplingParams]:
    """Sampling parameters of every prompt, from one for all or one each; None gives the default.

    Raises:
        EngineError: neither, or not as many as prompts.
    """
    if not _is_sequence(params):
        return [checked_params(params, default, where="generate: params")] * prompts
    if len(params) != prompts:
        raise EngineError("generate: params", len(params), f"one, or {prompts}, one each")
    where = "generate: params"
    return [checked_params(p, default, where=f"{where} {i}") for i, p in enumerate(params)]


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
