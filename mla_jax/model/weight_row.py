"""One tensor of a checkpoint: its name, where it goes, and how its axes move.

Axes are written as ``"(H qk) rq -> rq H qk"``: the checkpoint's ``[out, in]`` matrix with its
merged axes spelled out, then the order of the leaf. A number is an axis of that size.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mla_jax.model.stack import Place

__all__ = ["Weight", "make_weight", "shapes_of"]

_EXPERTS = re.compile(r"\.(mlp|ffn)\.experts\.")
_INT32 = ("moe.router.table",)
_FLOAT32 = (
    "_streams.proj",
    "_streams.bias",
    "_streams.scale",
    "stream_head.proj",
    "stream_head.bias",
    "stream_head.scale",
    "attn.sink",
    "pool.gate_bias",
    "moe.router.kernel",
    "moe.router.choice_bias",
    "indexer.k_norm.scale",
    "indexer.k_norm.bias",
    "indexer.head_weights.kernel",
)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One checkpoint tensor, or one per expert, and the leaves that it fills."""

    name: str  # with {e} where there is one tensor per expert
    paths: tuple[str, ...]  # two for a fused gate and up-projection
    split: tuple[int, ...]  # checkpoint axes with merged ones spelled out, of one expert
    shape: tuple[int, ...]  # checkpoint shape, of one expert
    order: tuple[int, ...]  # leaf axis -> split axis
    experts: int = 0  # leaves are stacked over these; 0 = not an expert
    place: Place | None = None  # the layer's row in a stack of layers; None = no layer's

    @property
    def fused(self) -> bool:
        """One tensor holds all experts along its first axis."""
        return bool(self.experts) and "{e}" not in self.name

    @property
    def float32(self) -> bool:
        """Kept in float32 whatever the model's dtype."""
        return self.paths[0].endswith(_FLOAT32)

    @property
    def integer(self) -> bool:
        """A table of int32, not numbers to compute with."""
        return self.paths[0].endswith(_INT32)

    @property
    def kind(self) -> str:
        """``float32`` or ``int32`` (kept so), or ``model``: the model's dtype."""
        return "int32" if self.integer else "float32" if self.float32 else "model"

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Of each path's leaf, or of its row where layers are stacked."""
        one = tuple(self.split[i] for i in self.order)
        one = one[1:] if len(self.paths) > 1 else one
        return (self.experts, *one) if self.experts else one

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Of each path's leaf: with the axis of stacked layers, if there is one."""
        return self.leaf_shape if self.place is None else (self.place.repeats, *self.leaf_shape)

    def names(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint names and shapes."""
        if self.fused:
            return {self.name: (self.experts, *self.shape)}
        if self.experts:
            return {self.name.format(e=e): self.shape for e in range(self.experts)}
        return {self.name: self.shape}

    def to_leaf(self, x: np.ndarray) -> np.ndarray:
        """A view of one checkpoint matrix in the leaf's order."""
        return x.reshape(self.split).transpose(self.order)

    def to_checkpoint(self, leaf: np.ndarray) -> np.ndarray:
        """The inverse of ``to_leaf``."""
        return leaf.transpose(np.argsort(self.order)).reshape(self.shape)


def make_weight(
    name: str, paths: str, axes: str, sizes: Mapping[str, int], place: Place | None = None
) -> Weight:
    """A row of a table: one tensor, or one of each expert, and where it goes.

    ``paths`` are leaves of the block at ``place``, or of the model; ``axes`` as above.
    """
    left, right = axes.split(" -> ")
    groups = [tuple(g.split()) for g in _groups(left)]
    symbols = [s for g in groups for s in g]
    return Weight(
        name=name,
        paths=tuple(p if place is None else f"{place.path}.{p}" for p in paths.split()),
        split=tuple(_size(s, sizes) for s in symbols),
        shape=tuple(math.prod(_size(s, sizes) for s in g) for g in groups),
        order=tuple(symbols.index(s) for s in right.split()),
        experts=sizes["E"] if _EXPERTS.search(name) else 0,
        place=place,
    )


def shapes_of(table: Iterable[Weight]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Leaf path to shape and ``Weight.kind``, of a table."""
    return {path: (w.stacked_shape, w.kind) for w in table for path in w.paths}


def _size(symbol: str, sizes: Mapping[str, int]) -> int:
    return int(symbol) if symbol.isdigit() else sizes[symbol]


def _groups(axes: str) -> Iterator[str]:
    for merged, single in re.findall(r"\(([^)]*)\)|(\S+)", axes):
        yield merged or single
