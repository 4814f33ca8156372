"""The host's arrays of a step as one buffer: one transfer instead of one for each array.

``jax.jit`` moves every host array that it is given by itself; a step has about ten small ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from struct import pack_into
from typing import Any

import jax
import numpy as np

from mla_jax.errors import MetadataError
from mla_jax.types import Array, Int, made

__all__ = ["Layout", "Packed", "counts_and_rows", "pack"]

INT32 = np.dtype(np.int32)
DTYPES = frozenset(map(np.dtype, (np.int32, np.uint32, np.float32)))
HOST = np.ndarray, np.generic
FORM = attrgetter("__class__", "dtype", "shape")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the leaves of a tree lie among the words. Equal ones are one object: see ``of``."""

    tree: Any  # jax's description of the structure
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @property
    def size(self) -> int:
        """Words."""
        return sum(map(math.prod, self.shapes))

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
    leaves, structure = jax.tree_util.tree_flatten(tree)
    try:
        layout = _layout(structure, tuple(map(FORM, leaves)))
    except AttributeError as error:
        raise _refused(f"{type(error.obj).__name__} of no dtype") from None
    return made(Packed, layout=layout, words=np.frombuffer(_joined(leaves), INT32))


@cache
def _layout(tree: Any, forms: tuple[tuple[type, np.dtype, tuple[int, ...]], ...]) -> Layout:
    """The layout of leaves of these types, dtypes and shapes: each form is checked once."""
    for kind, dtype, _ in forms:
        if not issubclass(kind, HOST) or dtype not in DTYPES:
            raise _refused(f"{kind.__name__} of {dtype}")
    shapes, dtypes = tuple(x[2] for x in forms), tuple(x[1] for x in forms)
    return Layout.of(tree, shapes, dtypes)


def _joined(leaves: list[Any]) -> bytearray:
    try:
        return bytearray().join(leaves)
    except TypeError:  # one is not contiguous
        return bytearray().join([x.tobytes() for x in leaves])


def _refused(leaf: str) -> MetadataError:
    return MetadataError("pack: a leaf", leaf, "a numpy array of int32, uint32 or float32")


def _bits(words: Array | np.ndarray, dtype: np.dtype) -> Array | np.ndarray:
    if isinstance(words, np.ndarray):
        return words.view(dtype)
    return jax.lax.bitcast_convert_type(words, dtype)


def counts_and_rows(
    counts: Sequence[int],
    plans: Sequence[Sequence[int]],
    size: int,
    filler: tuple[int, ...],
) -> tuple[Int[np.ndarray, "counts"], Int[np.ndarray, "plans {size} columns"]]:
    """``counts``, and the rows of each plan with ``filler`` behind them up to ``size`` rows.

    There is at least one plan. Its rows lie end to end: a list of tuples takes as long again to
    read. The results are two views of one array: making another costs more than filling it.

    Raises:
        MetadataError: a plan has more rows.
    """
    n, columns, start = len(counts), len(filler), 0
    words = _blank(n, len(plans), size, filler).copy()
    live = counts  # each write has a price: the counts go with the first plan
    for plan in plans:
        if len(plan) > size * columns:
            rows = len(plan) // columns
            raise MetadataError("rows of a plan", rows, f"at most {size}, the bucket's")
        # By struct: numpy takes twice as long to read a short list.
        pack_into(f"{len(live) + len(plan)}i", words, 4 * start, *live, *plan)
        start += len(live) + size * columns
        live = ()
    return words[:n], words[n:].reshape(len(plans), size, columns)


@cache
def _blank(counts: int, plans: int, size: int, filler: tuple[int, ...]) -> Int[np.ndarray, "words"]:
    """No count and no row yet. Not to be written."""
    rows = np.asarray(filler * (size * plans), np.int32)
    return np.concatenate([np.zeros(counts, np.int32), rows])
