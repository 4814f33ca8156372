"""The host's arrays of a step as one buffer: one transfer instead of one for each array.

``jax.jit`` moves every host array that it is given by itself; a step has about ten small ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import jax
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.types import Array, Int

__all__ = ["Layout", "Packed", "pack", "padded_rows"]

INT32 = np.dtype(np.int32)
HOST = np.ndarray, np.int32


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the leaves of a tree lie among the words. Equal ones are one object: see ``of``."""

    tree: Any  # jax's description of the structure
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    @cache
    def of(tree: Any, shapes: tuple[tuple[int, ...], ...]) -> "Layout":
        """The one layout of these: ``jax.jit`` compares it by identity, not bucket by bucket."""
        return Layout(tree=tree, shapes=shapes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Packed:
    """A pytree of int32 arrays laid end to end. The layout is static, the words are not."""

    layout: Layout = field(metadata={"static": True})
    words: Int[Array | np.ndarray, "words"]

    def unpack(self) -> Any:
        """The pytree again. Inside a compiled step its arrays are slices that fuse away."""
        leaves, start = [], 0
        for shape in self.layout.shapes:
            stop = start + math.prod(shape)
            leaves.append(self.words[start:stop].reshape(shape))
            start = stop
        return jax.tree.unflatten(self.layout.tree, leaves)


def pack(tree: Any) -> Packed:
    """Lay the host arrays of ``tree`` end to end, in the order of its leaves.

    Raises:
        MetadataError: a leaf is not a host array of int32.
    """
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, HOST) or leaf.dtype != INT32:
            given = f"{type(leaf).__name__} of {getattr(leaf, 'dtype', 'no dtype')}"
            raise MetadataError("pack: a leaf", given, "a numpy array of int32")
    words = np.frombuffer(bytearray().join([x.tobytes() for x in leaves]), INT32)
    layout = Layout.of(structure, tuple([x.shape for x in leaves]))
    return Packed(layout=layout, words=words)


def padded_rows(
    rows: Sequence[tuple[int, ...]], size: int, filler: tuple[int, ...]
) -> Int[np.ndarray, "size columns"]:
    """``rows`` as an array, with ``filler`` behind them up to ``size`` rows."""
    words = chain(chain.from_iterable(rows), filler * (size - len(rows)))
    return np.fromiter(words, np.int32, size * len(filler)).reshape(size, len(filler))
