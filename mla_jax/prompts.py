"""Prompts as people give them: token ids, text, chats, or a file with one JSON object a line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_jax.chat_template import is_chat
from mla_jax.errors import EngineError, listed
from mla_jax.scheduler import checked_ids
from mla_jax.text import TextProcessor

__all__ = ["Prompt", "Reader", "bias_of", "ids_of"]

_MAX_BYTES = 2**30  # of a prompts file


@dataclass(frozen=True, kw_only=True)
class Prompt:
    where: str  # what the user wrote it in: an option, or a file and its line
    ids: list[int]


def ids_of(text: str, *, vocab: int, where: str) -> list[int]:
    """``"1, 2,3"`` as token ids; an empty text has none."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    return checked_ids([_number(word) for word in words], vocab=vocab, where=where)


def bias_of(text: str, *, vocab: int, where: str) -> dict[int, float]:
    """``"12:1.5, 7:-100"`` as a bias for each token; an empty text has none."""
    found: dict[int, float] = {}
    for pair in text.split(",") if text.strip() else []:
        id, colon, value = pair.partition(":")
        try:
            bias = float(value)
        except ValueError:
            bias = None
        if not colon or bias is None:
            raise EngineError(where, repr(pair), "TOKEN:BIAS, as in 12:1.5,7:-100")
        (token,) = ids_of(id, vocab=vocab, where=where) or [-1]
        if token in found:
            raise EngineError(where, f"token {token} twice", "each token once")
        found[token] = bias
    return found


def _given(line: object) -> str:
    """What a line is that is no prompt."""
    match line:
        case {"prompt_ids": value, **rest} if not rest:
            return f"prompt_ids of type {type(value).__name__}"
        case {"prompt": value, **rest} if not rest:
            return f"prompt of type {type(value).__name__}"
        case {"messages": _, **rest} if not rest:
            return "messages that are no list of objects with a role and a content"
        case dict():
            return f"keys {listed(list(line))}" if line else "an object without keys"
    return type(line).__name__


def _number(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads prompts for one model."""

    vocab: int
    text: TextProcessor | None  # None = the model has no tokenizer
    chat: bool = False  # texts are what a user says, and go through the chat template
    system: str | None = None  # and begin with this message

    def prompts(
        self,
        *,
        ids: Sequence[str] | None = None,
        text: Sequence[str] | None = None,
        file: Path | None = None,
    ) -> list[Prompt]:
        """The prompts of the one source that is given.

        Raises:
            EngineError: no source or several, ids that are to be a chat, or a prompt that is none,
                with its line.
        """
        match ids, text, file:
            case [*rows], None, None:
                where = "--prompt-ids"
                if self.chat or self.system is not None:
                    option = "--chat" if self.system is None else "--system"
                    allowed = "with --prompt or --prompts-file, whose texts become a chat"
                    raise EngineError(option, "--prompt-ids", allowed, "Ids are taken as they are.")
                facts = {"vocab": self.vocab, "where": where}
                return [Prompt(where=where, ids=ids_of(row, **facts)) for row in rows]
            case None, [*texts], None:
                return [Prompt(where="--prompt", ids=self._encoded(t, "--prompt")) for t in texts]
            case None, None, Path():
                return self._file(file)
        count = sum(x is not None for x in (ids, text, file))
        allowed = "exactly one of --prompt-ids, --prompt, --prompts-file"
        raise EngineError("prompts", f"{count} sources", allowed)

    def _file(self, path: Path) -> list[Prompt]:
        with path.open("rb") as source:  # a pipe is as good
            raw = source.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise EngineError(
                str(path), "more", f"at most {_MAX_BYTES:,} bytes", "Cut it in parts."
            )
        try:
            content = raw.decode("utf-8-sig")  # editors may begin a file with a mark
        except UnicodeDecodeError as error:
            raise EngineError(str(path), f"byte {error.start} is not UTF-8", "UTF-8") from None
        # Not splitlines(): a JSON string may hold other line separators than \n.
        lines = enumerate(content.split("\n"), start=1)
        prompts = [self._line(line, f"{path} line {n}") for n, line in lines if line.strip()]
        if not prompts:
            raise EngineError(str(path), "no prompts", "one JSON object a line")
        return prompts

    def _line(self, line: str, where: str) -> Prompt:
        shape = '{"prompt_ids": [integers]}, {"prompt": "text"} or {"messages": [{…}, …]}'
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            long = "" if isinstance(error, json.JSONDecodeError | RecursionError) else f" ({error})"
            raise EngineError(where, f"no JSON{long}", shape) from None
        chat = self.chat or self.system is not None
        match data:
            case {"prompt_ids": [*_], **rest} if chat and not rest:
                allowed = "texts or messages, with --chat or --system"
                raise EngineError(where, "prompt_ids", allowed, "Ids are taken as they are.")
            case {"prompt_ids": [*ids], **rest} if not rest:
                return Prompt(where=where, ids=checked_ids(ids, vocab=self.vocab, where=where))
            case {"prompt": str(text), **rest} if not rest:
                return Prompt(where=where, ids=self._encoded(text, where))
            case {"messages": messages, **rest} if not rest and is_chat(messages):
                return Prompt(where=where, ids=self._encoded(messages, where))
        raise EngineError(where, _given(data), shape)

    def _encoded(self, text: str | Sequence[Mapping[str, Any]], where: str) -> list[int]:
        if self.text is None:
            raise EngineError(
                where,
                "text",
                "token ids, because there is no tokenizer",
                "Text needs tokenizer.json in the folder, and pip install tokenizers jinja2.",
            )
        if not isinstance(text, str):
            if self.system is None:
                return self.text.chat(text, where)
            if text and text[0].get("role") == "system":
                allowed = "chats without one, or no --system"
                raise EngineError(where, "a system message of its own", allowed)
            return self.text.chat([{"role": "system", "content": self.system}, *text], where)
        if not (self.chat or self.system is not None):
            return self.text.encode(text, where)
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.text.chat([*first, {"role": "user", "content": text}], where)
