"""Text to token ids and back, by the ``tokenizer.json`` of a model's folder.

The file comes from a stranger, and the package that runs it is native code: it raises what is no
``Exception``, and asked for too much memory it ends the process. So what could grow without
bound is looked at first, and whatever is raised becomes one error in words.
"""

import importlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from mla_jax.errors import EngineError, shown
from mla_jax.files import read_regular

__all__ = ["TextTokenizer"]

_MAX_BYTES: Final = 256 * 2**20  # of a file; published ones have up to 35 million
_MOST_GROWTH: Final = 2**14  # characters that one may become; a handful is usual


_ITS: Final = "text that its vocabulary covers"


class TextTokenizer:
    """The tokenizer of one folder. Neither cuts nor pads, whatever its file asks for."""

    def __init__(self, path: Path, native: Any):
        self._path = path
        self._native = native

    @classmethod
    def open(cls, folder: Path) -> "TextTokenizer | None":
        """The folder's tokenizer; ``None`` if it has none or the package is not installed.

        Raises:
            EngineError: a file that the package, or this module, does not take.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            return None
        allowed = "a tokenizer.json of the tokenizers package"
        try:
            content = read_regular(path, limit=_MAX_BYTES)
            growth = _growth(json.loads(content))
        except OSError as e:
            raise EngineError(str(path), e.strerror or type(e).__name__, allowed) from None
        except (ValueError, RecursionError) as e:
            raise EngineError(str(path), f"not JSON ({shown(e)})", allowed) from None
        if growth > _MOST_GROWTH:
            given = f"replacements that make up to {growth:.3g} characters of one"
            raise EngineError(str(path), given, f"at most {_MOST_GROWTH:,}")
        with _words(str(path), "unreadable", allowed):
            native = tokenizers.Tokenizer.from_buffer(content)
            native.no_truncation()
            native.no_padding()
        return cls(path, native)

    def encode(self, text: str, *, where: str, special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, all of it; with those that its file puts around every text.

        Raises:
            EngineError: the tokenizer has no ids for it; ``where`` names the text.
        """
        with _words(where, f"{shown(repr(text))}, which {self._path} cannot encode", _ITS):
            more = {} if special_tokens else {"add_special_tokens": False}
            return self._native.encode(text, **more).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            EngineError: the tokenizer cannot say.
        """
        with _words(str(self._path), f"{len(ids)} token ids without a text", "ids it knows"):
            return self._native.decode(list(ids))


class _words:
    """Turns what the native package raises into an EngineError.

    Its panics derive from ``BaseException`` alone; Ctrl-C and exits pass.
    """

    def __init__(self, what: str, given: str, allowed: str):
        self._fields = what, given, allowed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object):
        if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit | GeneratorExit):
            return
        what, given, allowed = self._fields
        said = shown(error) or kind.__name__
        raise EngineError(what, f"{given} ({said})", allowed) from None


def _growth(tokenizer: object) -> float:
    """An upper limit of the characters that one character of text may become, and back."""
    if not isinstance(tokenizer, dict):
        raise ValueError("no object")
    parts = ("normalizer", "pre_tokenizer", "decoder")
    return max(math.prod(_factors(tokenizer.get(part))) for part in parts)


def _factors(node: object) -> Iterator[float]:
    """How often each step of a part can multiply its text."""
    if isinstance(node, list):
        for child in node:
            yield from _factors(child)
    if not isinstance(node, dict):
        return
    pattern = node.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    for key in ("content", "prepend", "replacement", "prefix", "suffix"):
        if isinstance(text := node.get(key), str):
            # A literal is as long as it is; an expression may match between any two characters.
            known = isinstance(literal, str) and len(literal) > 0
            yield max(1.0, len(text) / len(str(literal))) if known else 1.0 + len(text)
    for key, child in node.items():
        if key != "pattern":
            yield from _factors(child)
