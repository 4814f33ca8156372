"""Prompts as people give them: token ids, text, or a file with one JSON object a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from mla_jax.errors import EngineError, listed
from mla_jax.scheduler import checked_ids
from mla_jax.tokenizer import TextTokenizer

__all__ = ["Prompt", "Reader", "ids_of"]

_MAX_BYTES = 2**30  # of a prompts file


@dataclass(frozen=True, kw_only=True)
class Prompt:
    where: str  # what the user wrote it in: an option, or a file and its line
    ids: list[int]


def ids_of(text: str, *, vocab: int, where: str) -> list[int]:
    """``"1, 2,3"`` as token ids; an empty text has none."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    return checked_ids([_number(word) for word in words], vocab=vocab, where=where)


def _number(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads prompts for one model."""

    vocab: int
    tokenizer: TextTokenizer | None  # None = the model has none

    def prompts(
        self, *, ids: str | None = None, text: str | None = None, file: Path | None = None
    ) -> list[Prompt]:
        """The prompts of the one source that is given.

        Raises:
            EngineError: no source or several, or a prompt that is none, with its line.
        """
        match ids, text, file:
            case str(), None, None:
                where = "--prompt-ids"
                return [Prompt(where=where, ids=ids_of(ids, vocab=self.vocab, where=where))]
            case None, str(), None:
                return [Prompt(where="--prompt", ids=self._encoded(text, "--prompt"))]
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
            content = raw.decode()
        except UnicodeDecodeError as error:
            raise EngineError(str(path), f"byte {error.start} is not UTF-8", "UTF-8") from None
        # Not splitlines(): a JSON string may hold other line separators than \n.
        lines = enumerate(content.split("\n"), start=1)
        prompts = [self._line(line, f"{path} line {n}") for n, line in lines if line.strip()]
        if not prompts:
            raise EngineError(str(path), "no prompts", "one JSON object a line")
        return prompts

    def _line(self, line: str, where: str) -> Prompt:
        shape = '{"prompt_ids": [integers]} or {"prompt": "text"}'
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            long = "" if isinstance(error, json.JSONDecodeError | RecursionError) else f" ({error})"
            raise EngineError(where, f"no JSON{long}", shape) from None
        match data:
            case {"prompt_ids": [*ids], **rest} if not rest:
                return Prompt(where=where, ids=checked_ids(ids, vocab=self.vocab, where=where))
            case {"prompt": str(text), **rest} if not rest:
                return Prompt(where=where, ids=self._encoded(text, where))
        given = f"keys {listed(list(data))}" if isinstance(data, dict) else type(data).__name__
        raise EngineError(where, given, shape)

    def _encoded(self, text: str, where: str) -> list[int]:
        if self.tokenizer is None:
            raise EngineError(
                where,
                "text",
                "token ids, because there is no tokenizer",
                "Text needs tokenizer.json in the folder and pip install 'mla-jax[hf]'.",
            )
        ids = self.tokenizer.encode(text, where=where)
        return checked_ids(ids, vocab=self.vocab, where=f"{where}: tokenizer.json")
