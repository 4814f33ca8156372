"""Sending a step's words to a GPU without a transfer call.

A transfer of a host array allocates, hands the copy to another thread and wakes it: 40 to 90 us.
Here the host writes page-locked memory and the compiled program copies it in as its first work.
Of the rest of a call (H200, JAX 0.11) a result costs 7 to 9 us, a kernel 1.4 us within a CUDA
graph, which is what XLA makes of five or more, and 5 us alone.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any

import jax
import numpy as np

from mla_jax.metadata.packed import Packed
from mla_jax.types import Array, Int

__all__ = ["StagedFunction", "on_gpu", "staged"]

SLOTS = 3
"""Buffers of one size: a step that is still queued keeps its own."""


class _Slot:
    """A page-locked buffer, the host's view of it, and who read it last."""

    def __init__(self, size: int):
        empty = np.zeros(size, np.int32)
        self.words = jax.block_until_ready(jax.device_put(empty, _page_locked()))
        place = (ctypes.c_int32 * size).from_address(self.words.unsafe_buffer_pointer())
        self.view = np.ctypeslib.as_array(place)
        self.read: Array | None = None  # ready with the program that copies the words

    def write(self, words: Int[np.ndarray, "words"]) -> Int[Array, "words"]:
        """Fill the buffer, after whoever reads it."""
        if self.read is not None:
            self.read.block_until_ready()
        self.view[:] = words
        return self.words


class StagedFunction:
    """``jax.jit(fun)`` with an argument that is ``Packed`` by the host; see ``staged``."""

    def __init__(self, fun: Callable[..., Any], at: int, **options: Any):
        def run(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
            words = jax.device_put(args[at].words, jax.memory.Space.Device)
            given = Packed(layout=args[at].layout, words=words)
            # An empty array: ready with the program, and nothing to allocate.
            return words[:0], fun(*args[:at], given, *args[at + 1 :], **kwargs)

        self._at = at
        self._staged, self._plain = jax.jit(run, **options), jax.jit(fun, **options)
        self._slots: dict[int, Iterator[_Slot]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = args[self._at]
        if not _stageable(packed):
            return self._plain(*args, **kwargs)
        slot = self._next(packed.words.size)
        sent = Packed(layout=packed.layout, words=slot.write(packed.words))
        slot.read, out = self._staged(*args[: self._at], sent, *args[self._at + 1 :], **kwargs)
        return out

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """``jax.jit(fun).lower`` of the program that a call with these arguments would run."""
        packed = args[self._at]
        if not _stageable(packed):
            return self._plain.lower(*args, **kwargs)
        words = jax.ShapeDtypeStruct(packed.words.shape, np.int32, sharding=_page_locked())
        sent = Packed(layout=packed.layout, words=words)  # pyright: ignore[reportArgumentType]
        return self._staged.lower(*args[: self._at], sent, *args[self._at + 1 :], **kwargs)

    def _next(self, size: int) -> _Slot:
        if size not in self._slots:
            self._slots[size] = _turns(size)
        return next(self._slots[size])

    def compiled_programs(self) -> int:
        """Programs traced so far."""
        both = self._staged, self._plain
        return sum(f._cache_size() for f in both)  # pyright: ignore[reportAttributeAccessIssue]


def _stageable(packed: object) -> bool:
    words = packed.words if isinstance(packed, Packed) else None
    return isinstance(words, np.ndarray) and words.size > 0 and on_gpu()


@cache
def on_gpu() -> bool:
    """Whether programs run on a GPU unless told otherwise."""
    return jax.default_backend() == "gpu"


def _page_locked() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def _turns(size: int) -> Iterator[_Slot]:
    return cycle([_Slot(size) for _ in range(SLOTS)])


def staged(fun: Callable[..., Any], *, at: int = 0, **options: Any) -> StagedFunction:
    """``jax.jit(fun, **options)`` whose argument ``at`` may come from ``pack``.

    On a GPU its words go through page-locked memory of the first device that belongs to this
    function; a buffer is written again only when its last reader is done. Elsewhere, and where
    that argument is on a device already, this is ``jax.jit``.

    Results are then committed to that device. What one call returns and the next one takes, like
    a cache, must be so from the start (``jax.device_put(x, device)``, which copies nothing there),
    or the second call compiles again.
    """
    return StagedFunction(fun, at, **options)
