"""The text of a request while it grows: whole characters, and nothing of a stop string.

A token may hold a part of a character, or a part of a stop string, so text is told when the
tokens behind it have settled what it is. All of it together is the text of all tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mla_jax.errors import EngineError

__all__ = ["TextSoFar"]

_BROKEN = "\ufffd"  # how decoders write bytes that are no character, or not yet
_MOST_WAITING = 16  # tokens; no character has more, so whatever waits longer is no character
_MOST_OPEN = 3  # tokens of a character that is not complete: it has four bytes at most
_WINDOW = 8  # tokens decoded together; the first of them give the next one its place in a word


@dataclass(frozen=True, kw_only=True)
class TextSoFar:
    """What is known of the text after some tokens. A new token makes a new one of it."""

    decode: Callable[[Sequence[int]], str]
    stops: tuple[str, ...] = ()
    window: tuple[int, ...] = ()  # the last tokens
    known: str = ""  # what those of the window say that are settled
    settled: int = 0  # how many these are
    held: str = ""  # settled, and not told: a stop string may begin there
    broken: bool = False  # the tokenizer had no text for a token: no text from here on

    def push(self, token: int) -> tuple["TextSoFar", str, bool]:
        """``(after the token, text to tell, whether a stop string was found)``.

        What was told ends before the first stop string; what is behind it is never told.
        """
        if self.broken:
            return self, "", False
        window = (*self.window, token)
        try:
            text = self.decode(window)
            settled = len(window)
            if text.endswith(_BROKEN):
                if settled - self.settled < _MOST_WAITING:
                    return replace(self, window=window), "", False
                settled -= _MOST_OPEN
                text = self.decode(window[:settled])
            waiting = self.held + text[len(self.known) :]
            # Before the first text of a window decoders drop a space: some text must be left.
            if len(window) > _WINDOW and (shorter := self.decode(window[self.settled : settled])):
                window, text = window[self.settled :], shorter
                settled -= self.settled
        except EngineError:
            return replace(self, broken=True), "", False
        told, held, found = _cut(waiting, self.stops)
        after = replace(self, window=window, known=text, settled=settled, held=held)
        return after, told, found

    def rest(self) -> tuple[str, bool]:
        """``(what is left to tell, whether a stop string was found)`` when no token follows.

        Half a character is told as it is.
        """
        if self.broken or len(self.window) == self.settled:
            return self.held, False
        try:
            left = self.held + self.decode(self.window)[len(self.known) :]
        except EngineError:
            return self.held, False
        told, held, found = _cut(left, self.stops)
        return told + held, found


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
    """``(text before the first stop string, where one may begin, whether one was found)``."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], "", True
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return text[:-size], text[-size:], False
    return text, "", False
