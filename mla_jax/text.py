"""Text and chats to token ids, and back: a model's tokenizer and chat template together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mla_jax.chat_template import ChatTemplate, is_chat
from mla_jax.detokenize import TextSoFar
from mla_jax.errors import EngineError, described
from mla_jax.model.sampling import SamplingParams
from mla_jax.scheduler import checked_ids
from mla_jax.tokenizer import TextTokenizer

__all__ = ["TextProcessor"]

_ENCODERS: Final = {
    "deepseek_v32": "encoding/encoding_dsv32.py",
    "deepseek_v4": "encoding/encoding_dsv4.py",
}
"""Families whose checkpoints publish a Python program in place of a chat template."""


@dataclass(frozen=True, kw_only=True)
class TextProcessor:
    """A model's tokenizer and chat template: prompts to ids, ids to text."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    vocab: int  # of the model: ids beyond it are refused
    family: str

    @classmethod
    def open(cls, folder: Path, *, vocab: int, family: str) -> "TextProcessor | None":
        """Of a folder; None if it has no tokenizer.json or ``tokenizers`` is not installed.

        As in transformers 5, tokenizer.json says which tokens a plain text begins and ends with;
        ``add_bos_token`` of tokenizer_config.json is not read.

        Raises:
            EngineError: a tokenizer or a template that cannot be used.
            ConfigError: a tokenizer_config.json that cannot be read.
        """
        tokenizer = TextTokenizer.open(folder)
        if tokenizer is None:
            return None
        template = ChatTemplate.open(folder)
        return cls(tokenizer=tokenizer, template=template, vocab=vocab, family=family)

    def ids(self, prompt: Any, where: str = "prompt") -> list[int]:
        """Token ids of a text or of a chat, the model's answer opened.

        Raises:
            EngineError: there are none; ``where`` names the prompt.
        """
        return self.chat(prompt, where) if is_chat(prompt) else self.encode(prompt, where)

    def encode(self, text: str, where: str = "text", *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``special_tokens``: with those that every text begins with."""
        ids = self.tokenizer.encode(text, where=where, special_tokens=special_tokens)
        return checked_ids(ids, vocab=self.vocab, where=f"{where}: tokenizer.json")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str = "chat",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of messages, by the chat template: see ``ChatTemplate.render``.

        Raises:
            EngineError: the model has no template, or it refuses the messages.
        """
        if self.template is None:
            raise self._no_template(where)
        facts = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        text = self.template.render(messages, where=where, **facts)
        return self.encode(text, where, special_tokens=False)

    def _no_template(self, where: str) -> EngineError:
        allowed = "text or token ids, because the model publishes no chat template"
        hint = "One would be in chat_template.jinja or tokenizer_config.json."
        if (program := _ENCODERS.get(self.family)) is not None:
            hint = (
                f"It publishes {program} instead: call its encode_messages yourself, and give "
                "engine.encode(text, special_tokens=False) what it returns."
            )
        return EngineError(where, "messages", allowed, hint)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens.

        An id of the model that tokenizer.json does not name has none.

        Raises:
            EngineError: an id that the model does not have.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise EngineError("decode", described(ids), "token ids")
        return self.tokenizer.decode(checked_ids(list(ids), vocab=self.vocab, where="decode"))

    def begin(self, params: SamplingParams) -> TextSoFar:
        """The text of a request that has no token yet."""
        return TextSoFar(decode=self.tokenizer.decode, stops=params.stop)
