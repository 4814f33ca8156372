"""The task of the embedded model: facts such as ``ab=12;`` and questions about them.

A prompt is a list of facts, each key at most once, and one question at its end:

=============  ==============  =====================
kind           question        answer
=============  ==============  =====================
``recall``     ``?ab=``        ``12.``
``sum``        ``?12+34=``     ``46.``
``chain``      ``?ab+cd=``     ``12+34=46.``
=============  ==============  =====================

Keys are two letters, values 10 to 99, one token is one character, and ``.`` ends an answer.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from mla_jax.errors import ArgumentError

__all__ = [
    "CHARACTERS",
    "EOS",
    "FACT",
    "KEYS",
    "KINDS",
    "PAD",
    "Question",
    "ask",
    "decode",
    "encode",
    "longest_answer",
    "solve",
]

PAD = 0
CHARACTERS = string.ascii_lowercase + string.digits + "=;?+."
"""Token ``i + 1`` is character ``i``; token 0 is padding."""

EOS = CHARACTERS.index(".") + 1
KEYS = 26 * 26
FACT = len("ab=12;")
KINDS = ("recall", "sum", "chain")
_QUESTION = {"recall": len("?ab="), "sum": len("?12+34="), "chain": len("?ab+cd=")}
_ANSWER = {"recall": len("12."), "sum": len("198."), "chain": len("99+99=198.")}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt and the one right continuation."""

    kind: str
    prompt: str
    answer: str


def encode(text: str) -> list[int]:
    """Token ids of a text.

    Raises:
        ArgumentError: a character outside the alphabet.
    """
    if unknown := sorted(set(text) - set(CHARACTERS)):
        raise ArgumentError("demo: characters", unknown, f"those of {CHARACTERS!r}")
    return [CHARACTERS.index(c) + 1 for c in text]


def decode(token_ids: Sequence[int]) -> str:
    """The text of some token ids; padding has none."""
    return "".join(CHARACTERS[i - 1] for i in token_ids if i != PAD)


def longest_answer(kind: str) -> int:
    """Tokens of the longest answer of a kind, its full stop included."""
    return _ANSWER[kind]


def ask(rng: random.Random, kind: str, *, tokens: int) -> Question:
    """A question of at most ``tokens`` tokens, and of at least ``tokens - 5`` where keys suffice.

    Which facts are asked for is uniform, so the distance to them is too.
    """
    needed = {"recall": 1, "sum": 0, "chain": 2}[kind]
    facts = min(max((tokens - _QUESTION[kind]) // FACT, needed), KEYS)
    keys = [_key(i) for i in rng.sample(range(KEYS), facts)]
    values = [rng.randint(10, 99) for _ in keys]
    text = "".join(f"{k}={v};" for k, v in zip(keys, values, strict=True))
    if kind == "recall":
        a = rng.randrange(facts)
        question = f"?{keys[a]}="
    elif kind == "chain":
        a, b = rng.sample(range(facts), 2)
        question = f"?{keys[a]}+{keys[b]}="
    else:
        question = f"?{rng.randint(10, 99)}+{rng.randint(10, 99)}="
    return Question(kind=kind, prompt=text + question, answer=solve(text + question))


def solve(prompt: str) -> str:
    """The answer to a prompt, by looking it up; KeyError when a fact is missing."""
    facts, question = prompt.rsplit("?", 1)
    values = dict(fact.split("=") for fact in facts.split(";") if fact)
    terms = question.removesuffix("=").split("+")
    numbers = [term if term.isdigit() else values[term] for term in terms]
    total = str(sum(map(int, numbers)))
    if numbers == terms or len(terms) == 1:
        return f"{total}."
    return f"{'+'.join(numbers)}={total}."


def _key(i: int) -> str:
    return string.ascii_lowercase[i // 26] + string.ascii_lowercase[i % 26]
