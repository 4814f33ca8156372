"""Chat templates: messages to the text that a model was trained on.

A template is a Jinja program that a checkpoint publishes, rendered as transformers renders it. It
comes from a stranger, so it runs in Jinja's sandbox, and sees plain data only.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mla_jax.errors import EngineError, shown
from mla_jax.files import read_regular
from mla_jax.hf_keys import load_object

__all__ = ["ChatTemplate", "is_chat", "special_tokens"]

_MAX_BYTES: Final = 2**24
_OPTIONS: Final = (
    "chat_template", "continue_final_message", "max_length", "padding", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip
"""Of transformers' ``apply_chat_template``: no template reads them."""

_SPECIAL: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages: ``[{"role": "user", "content": "Hello"}]``."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return listed and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, as ``tokenizer_config.json`` names them."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one decides
        data = _object(folder / name)
        for kind in _SPECIAL:
            given = data.get(f"{kind}_token")
            value = given.get("content") if isinstance(given, Mapping) else given
            if isinstance(value, str):
                named[f"{kind}_token"] = value
            elif given is not None:
                allowed = "a text, an object with its content, or null"
                raise EngineError(f"{folder / name}: {kind}_token", shown(given), allowed)
    return named


def _object(path: Path) -> Mapping[str, Any]:
    """The JSON object of a file; an empty one if the file is not there."""
    return load_object(path) if path.is_file() else {}


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The templates of one folder, and the tokens that they may name."""

    where: str  # the file
    sources: Mapping[str, str]  # by name; "default", and "tool_use" where tools have their own
    tokens: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> "ChatTemplate | None":
        """Of ``chat_template.jinja``, or else of ``tokenizer_config.json``; None: neither has one.

        Raises:
            EngineError: a template that is no text.
            ConfigError: a tokenizer_config.json that cannot be read.
        """
        sources, where = _sources(folder)
        if not sources:
            return None
        return cls(where=str(where), sources=sources, tokens=special_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        where: str = "chat",
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        ``tools`` are JSON schemas of functions; ``add_generation_prompt`` opens the model's
        answer; ``variables`` are whatever else the template reads (``thinking=True``). ``where``
        names the conversation.

        Raises:
            EngineError: jinja2 is not installed, an option of ``apply_chat_template`` that is not
                implemented, or the template refuses, with its own words.
        """
        if unread := [name for name in variables if name in _OPTIONS]:
            given = ", ".join(f"{name}={variables[name]!r}" for name in unread)
            allowed = "tools, add_generation_prompt, and variables that the template reads"
            hint = "This option of transformers' apply_chat_template is not implemented."
            raise EngineError(where, given, allowed, hint)
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            found = ", ".join(sorted(self.sources))
            raise EngineError(f"{where}: {self.where}", f"templates {found}", "one named default")
        given = {"messages": messages, "tools": tools, "documents": None, **variables}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            plain = json.loads(json.dumps(given, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            allowed = "messages of texts, numbers, lists and objects, as in JSON"
            raise EngineError(where, shown(error), allowed) from None
        try:
            sandbox: Any = importlib.import_module("mla_jax.chat_sandbox")
            return sandbox.compiled(self.sources[name]).render(**{**self.tokens, **plain})
        except ModuleNotFoundError:
            allowed = "text or token ids, because jinja2 is not installed"
            raise EngineError(where, "messages", allowed, "pip install jinja2.") from None
        except Exception as error:  # whatever a stranger's program comes to
            said = f"{type(error).__name__}: {error}"
            allowed = "messages that the template takes"
            raise EngineError(f"{where}: {self.where}", shown(said), allowed) from None


def _sources(folder: Path) -> tuple[dict[str, str], Path]:
    """Templates by name, and the file that has the default one."""
    file, named = folder / "chat_template.jinja", {}
    if file.is_file():
        named["default"] = _text(file)
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named[extra.stem] = _text(extra)
        return named, file
    file = folder / "tokenizer_config.json"
    found = _object(file).get("chat_template")
    match found:
        case None:
            return {}, file
        case str():
            return {"default": found}, file
        case [*several] if all(_is_named(one) for one in several):
            return {one["name"]: one["template"] for one in several}, file
    allowed = "a text, or a list of {name, template}"
    raise EngineError(f"{file}: chat_template", shown(found), allowed)


def _is_named(value: object) -> bool:
    texts = isinstance(value, Mapping) and (value.get("name"), value.get("template"))
    return bool(texts) and all(isinstance(text, str) for text in texts)


def _text(path: Path) -> str:
    try:
        return read_regular(path, limit=_MAX_BYTES).decode()
    except OSError as error:
        given = error.strerror or type(error).__name__
        raise EngineError(str(path), given, f"a text of at most {_MAX_BYTES:,} bytes") from None
    except UnicodeDecodeError as error:
        raise EngineError(str(path), f"byte {error.start} is not UTF-8", "UTF-8") from None
