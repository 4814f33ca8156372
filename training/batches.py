"""Random training sequences of the demo's grammar, made on the device.

The same language as ``mla_jax.demo_task``, but dense: after its facts a sequence asks question
after question (and may state more facts between them), and every answer is supervised.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.demo_task import CHARACTERS, FACT, KEYS, KINDS
from mla_jax.types import Array, Int, cdiv

__all__ = ["Batch", "sample_batch"]

LONGEST = len("?ab+cd=99+99=198.")
_FACT, _RECALL, _SUM, _CHAIN = range(4)
_LETTER = CHARACTERS.index("a") + 1
_DIGIT = CHARACTERS.index("0") + 1
_MARK = {c: CHARACTERS.index(c) + 1 for c in "=;?+."}
assert KINDS == ("recall", "sum", "chain"), "kinds are numbered from 1 in this order"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one length. ``kind[i]`` says what token ``i`` answers."""

    tokens: Int[Array, "sequences length"]
    kind: Int[Array, "sequences length"]  # 0 = no part of an answer, else 1 + index in KINDS


@partial(jax.jit, static_argnames=("sequences", "length"))
def sample_batch(key: Array, *, sequences: int, length: int) -> Batch:
    """Independent sequences: 0 to 95 % facts first, then questions about any earlier fact."""
    items = cdiv(length, FACT)
    assert items <= KEYS, f"{length} tokens need {items} facts, but there are {KEYS} keys"
    # One draw, cut into columns: a generator costs seconds to compile, and one is enough.
    cuts = np.cumsum([1, 1, KEYS, *[items] * 6])
    draw = jax.random.uniform(key, (sequences, int(cuts[-1]) + items), jnp.float32)
    first, later, order, fact, die, value, which_a, which_b, x, y = jnp.split(draw, cuts, axis=1)

    first = first * 0.95 * items
    later = jnp.maximum(later - 0.5, 0) * 0.6  # half of the sequences have none
    is_fact = (jnp.arange(items, dtype=jnp.float32) < first) | (fact < later)
    known = jnp.cumsum(is_fact, axis=1, dtype=jnp.int32) - is_fact.astype(jnp.int32)
    question = jnp.where((die < 0.2) | (known == 0), _SUM, jnp.where(die < 0.6, _RECALL, _CHAIN))
    kind = jnp.where(is_fact, _FACT, question)

    def below(n: Array | float, share: Array) -> Array:
        return jnp.floor(n * share).astype(jnp.int32)

    def of(table: Array, index: Array) -> Array:
        return jnp.take_along_axis(table, index, axis=1)

    keys = jnp.argsort(order, axis=1)[:, :items].astype(jnp.int32)
    value, x, y = (10 + below(90.0, share) for share in (value, x, y))
    span = known.astype(jnp.float32)
    a = jnp.where(is_fact, known, below(span, which_a))
    b = below(span, which_b)
    x, y = jnp.where(kind == _SUM, x, of(value, a)), jnp.where(kind == _SUM, y, of(value, b))
    return _lay_out(*_spell(kind, of(keys, a), of(keys, b), x, y), length=length)


def _spell(kind: Array, a: Array, b: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Tokens ``[sequences, items, LONGEST]``, their kinds, and how many are real."""

    def marks(c: str) -> list[Array]:
        return [jnp.full_like(kind, _MARK[c])]

    def name(i: Array) -> list[Array]:
        return [i // 26 + _LETTER, i % 26 + _LETTER]

    def two(n: Array) -> list[Array]:
        return [n // 10 + _DIGIT, n % 10 + _DIGIT]

    def total(n: Array) -> list[Array]:
        long, stop = n >= 100, _MARK["."]
        t, u = two(n % 100)
        return [
            jnp.where(long, n // 100 + _DIGIT, t),
            jnp.where(long, t, u),
            jnp.where(long, u, stop),
            jnp.where(long, stop, 0),
        ]

    def row(*parts: list[Array]) -> Array:
        line = [token for part in parts for token in part]
        return jnp.stack(line + [jnp.zeros_like(kind)] * (LONGEST - len(line)), axis=-1)

    ask, eq, plus = marks("?"), marks("="), marks("+")
    rows = jnp.stack(
        [
            row(name(a), eq, two(x), marks(";")),
            row(ask, name(a), eq, two(x), marks(".")),
            row(ask, two(x), plus, two(y), eq, total(x + y)),
            row(ask, name(a), plus, name(b), eq, two(x), plus, two(y), eq, total(x + y)),
        ]
    )
    rows = jnp.take_along_axis(rows, kind[None, ..., None], axis=0)[0]
    answer = jnp.array([LONGEST, 4, 7, 7], jnp.int32)[kind]
    width = (rows > 0).sum(axis=-1, dtype=jnp.int32)
    column = jnp.arange(LONGEST, dtype=jnp.int32)
    return rows, jnp.where(column >= answer[..., None], kind[..., None], 0), width


def _lay_out(rows: Array, kinds: Array, width: Array, *, length: int) -> Batch:
    """Items end to end, cut at ``length``."""
    start = jnp.cumsum(width, axis=1) - width
    column = jnp.arange(LONGEST, dtype=jnp.int32)
    at = jnp.where(column < width[..., None], start[..., None] + column, length)
    sequence = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
    blank = jnp.zeros((rows.shape[0], length), jnp.int32)
    return Batch(
        tokens=blank.at[sequence, at].set(rows, mode="drop"),
        kind=blank.at[sequence, at].set(kinds, mode="drop"),
    )
