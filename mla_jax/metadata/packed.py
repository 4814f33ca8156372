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
DTYPES = frozenset(map(np.dtype, (np.int32, np.uint32, np.float32)))
HOST = np.ndarray, np.generic


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the leaves of a tree lie among the words. Equal ones are one object: see ``of``."""

    tree: Any  # jax's description of the structure
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @staticmethod
    @cache
    def of(
        tree: Any, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype, ...]
    ) -> "Layout":
        """The one layout of these: ``jax.jit`` compares it by identity, not bucket by bucket."""
        return Layout(tree=tree, shapes=shapes, dtypes=dtypes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Packed:
    """A pytree of 32-bit arrays laid end to end. The layout is static, the words are not."""

    layout: Layout = field(metadata={"static": True})
    words: Int[Array | np.ndarray, "words"]

    def unpack(self) -> Any:
        """The pytree again. Inside a compiled step its arrays are slices that fuse away."""
        leaves, start = [], 0
        for shape, dtype in zip(self.layout.shapes, self.layout.dtypes, strict=True):
            stop = start + math.prod(shape)
            words = self.words[start:stop].reshape(shape)
            leaves.append(words if dtype == INT32 else _bits(words, dtype))
            start = stop
        return jax.tree.unflatten(self.layout.tree, leaves)


def pack(tree: Any) -> Packed:
    """Lay the host arrays of ``tree`` end to end, in the order of its leaves.

    Raises:
        MetadataError: a leaf is not a host array of int32, uint32 or float32.
    """
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, HOST) or leaf.dtype not in DTYPES:
            given = f"{type(leaf).__name__} of {getattr(leaf, 'dtype', 'no dtype')}"
            raise MetadataError("pack: a leaf", given, "a numpy array of int32, uint32 or float32")
    words = np.frombuffer(bytearray().join([x.tobytes() for x in leaves]), INT32)
    layout = Layout.of(
        structure, tuple([x.shape for x in leaves]), tuple([x.dtype for x in leaves])
    )
    return Packed(layout=layout, words=words)


def _bits(words: Array | np.ndarray, dtype: np.dtype) -> Array | np.ndarray:
    if isinstance(words, np.ndarray):
        return words.view(dtype)
    return jax.lax.bitcast_convert_type(words, dtype)


def padded_rows(
    rows: Sequence[tuple[int, ...]], size: int, filler: tuple[int, ...]
) -> Int[np.ndarray, "size columns"]:
    """``rows`` as an array, with ``filler`` behind them up to ``size`` rows."""
    words = chain(chain.from_iterable(rows), filler * (size - len(rows)))
    return np.fromiter(words, np.int32, size * len(filler)).reshape(size, len(filler))
