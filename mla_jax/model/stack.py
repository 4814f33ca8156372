"""Equal layers as one program text: weights stacked on a leading axis, run by ``lax.scan``.

A decoder's layers are cut into runs that repeat a short period of kinds: dense layers, then expert
layers; a period may have several kinds. Where many layers are equal, a period has several of them.
Compiling takes as long for sixty layers as for one period of each run, and each weight stays where
it is: a turn of the loop reads its own layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax.types import Array, Int

__all__ = ["LAYERS_A_TURN", "Layers", "Period", "Place", "Stack", "periods_of", "places_of"]

LONGEST_PERIOD = 8
"""Kinds of one period, at most."""

LAYERS_A_TURN, MANY_REPEATS = 3, 12
"""Layers of one turn where a period repeats many times, at most: a turn costs 2 us on a GPU.

More save little, and the host hands every array of weights over at each call of a program.
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the weights of a layer are: ``stacks.{stack}.blocks.{block}``, row ``index``."""

    stack: int
    block: int
    index: int
    repeats: int  # rows of the stack

    @property
    def path(self) -> str:
        """Of the block's leaves; each has a leading axis of repeats."""
        return f"stacks.{self.stack}.blocks.{self.block}"


@dataclass(frozen=True, kw_only=True)
class Period:
    """Layers ``first``, ``first + 1``, …: ``repeats`` times the same sequence of kinds."""

    first: int
    kinds: tuple[Any, ...]
    repeats: int


def places_of(periods: Sequence[Period]) -> tuple[Place, ...]:
    """Where each layer of the decoder is."""
    return tuple(
        Place(stack=s, block=block, index=index, repeats=period.repeats)
        for s, period in enumerate(periods)
        for index in range(period.repeats)
        for block in range(len(period.kinds))
    )


def periods_of(kinds: Sequence[Any]) -> tuple[Period, ...]:
    """Cut the layers, in order, into runs of a repeated period.

    At each layer the period that covers most layers is taken, the shortest of equals:
    ``d s s s s`` is ``(d) x 1, (s) x 4``; ``a b c b c b c`` is ``(a) x 1, (b c) x 3``. A short
    period that repeats many times becomes a longer one: twenty-six times ``s`` is
    ``(s s s) x 8, (s) x 2``.
    """
    found: list[Period] = []
    first = 0
    while first < len(kinds):
        best = 1, 1
        for length in range(1, LONGEST_PERIOD + 1):
            period = kinds[first : first + length]
            repeats = 1
            while kinds[first + repeats * length : first + (repeats + 1) * length] == period:
                repeats += 1
            covers = length * repeats if repeats > 1 else 1
            if len(period) == length and covers > best[0] * best[1]:
                best = length, repeats
        length, repeats = best
        several = max(LAYERS_A_TURN // length, 1) if repeats >= MANY_REPEATS else 1
        length, repeats = length * several, repeats // several
        found.append(
            Period(first=first, kinds=tuple(kinds[first : first + length]), repeats=repeats)
        )
        first += length * repeats
    return tuple(found)


class Stack[Block: nnx.Module](nnx.Module):
    """The blocks of one period; every weight has a leading axis of ``repeats``."""

    def __init__(self, period: Period, make: Callable[[Any, nnx.Rngs], Block], rngs: nnx.Rngs):
        """``make(kind, rngs)`` is one block."""

        def stacked(kind: Any) -> Block:
            keys = jax.random.split(rngs.params(), period.repeats)
            return nnx.vmap(lambda key: make(kind, nnx.Rngs(key)))(keys)

        self.blocks = nnx.List(stacked(kind) for kind in period.kinds)
        self.period = period

    def block(self, place: Place) -> Block:
        """One layer as a module of its own; its weights are copies."""
        graph, state = nnx.split(self.blocks[place.block])
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[place.index], state))

    def run[Carry](
        self,
        carry: Carry,
        layer: Callable[[Block, Any, Int[Array, ""] | int, Carry], Carry],
        *,
        beside: Sequence[Any] | None = None,
        zero: Int[Array, ""] | int = 0,
    ) -> Carry:
        """``carry = layer(block, extra, number, carry)`` over all layers, in order.

        ``beside`` has a pytree for each block of the period whose leaves are stacked as the
        weights are; ``extra`` is one layer's part of it, ``number`` the layer's in the decoder.
        Layers are counted from ``zero`` on; a served step computes it (``loops.computed_zero``).
        """
        graphs, state = zip(*map(nnx.split, self.blocks), strict=True)
        beside = [None] * len(self.blocks) if beside is None else beside
        first, length = self.period.first, len(self.period.kinds)
        # Blocks of one kind are traced and lowered once; XLA puts the text in where it is called.
        texts = {graph: jax.jit(_text(graph, layer)) for graph in graphs}

        def turn(start: Any, carry: Carry, weights: Any, extras: Sequence[Any]) -> Carry:
            for k, (graph, *of_block) in enumerate(zip(graphs, weights, extras, strict=True)):
                carry = texts[graph](*of_block, start + k, carry)
            return carry

        def counted(carried: tuple[Array, Carry], each: Any) -> tuple[tuple[Array, Carry], None]:
            start, carry = carried
            # The number is carried: a slice of an array of numbers would be a launch in every turn.
            # The barrier has XLA increase it in place, once nothing reads it; else XLA copies it.
            start, carry = lax.optimization_barrier((start, turn(start, carry, *each)))
            return (start + length, carry), None

        if self.period.repeats == 1:
            only = jax.tree.map(lambda leaf: leaf[0], (state, list(beside)))
            return turn(zero + first, carry, *only)
        begin = jnp.asarray(zero + first, jnp.int32), carry
        return lax.scan(counted, begin, (state, list(beside)))[0][1]


def _text(graph: Any, layer: Callable[..., Any]) -> Callable[..., Any]:
    """``layer`` of blocks of one kind, from a block's weights."""
    return lambda weights, *rest: layer(nnx.merge(graph, weights), *rest)


class Layers[Block: nnx.Module](Sequence[Block]):
    """The layers of some stacks, one by one: each a module of its own whose weights are copies.

    To look at a layer, and for tests; what is written to it stays there.
    """

    def __init__(self, stacks: Sequence[Stack[Block]]):
        self._stacks, self._places = stacks, places_of([stack.period for stack in stacks])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        """Layer ``number``, or a list of layers for a slice."""
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        place = self._places[number]
        return self._stacks[place.stack].block(place)
