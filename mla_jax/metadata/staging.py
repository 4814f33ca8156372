"""Sending a step's words to a GPU without a transfer call.

A transfer of a host array allocates, hands the copy to another thread and wakes it: 40 to 90 us.
Here the host writes page-locked memory and the compiled program copies it in as its first work.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mla_jax.metadata.packed import Packed
from mla_jax.types import Array, Int

__all__ = ["StagedFunction", "staged"]

SLOTS = 3
"""Buffers of one size: a step that is still queued keeps its own."""


class _Slot:
    """A page-locked buffer, the host's view of it, and who read it last."""

    def __init__(self, size: int):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        self.words = jax.block_until_ready(jax.device_put(np.zeros(size, np.int32), sharding))
        place = (ctypes.c_int32 * size).from_address(self.words.unsafe_buffer_pointer())
        self.view = np.ctypeslib.as_array(place)
        self.read: Array | None = None  # ready as soon as the device has copied the words

    def write(self, words: Int[np.ndarray, "words"]) -> Int[Array, "words"]:
        """Fill the buffer, after whoever reads it."""
        if self.read is not None and not self.read.is_ready():
            self.read.block_until_ready()
        self.view[:] = words
        return self.words


class StagedFunction:
    """``jax.jit(fun)`` whose first argument is ``Packed`` by the host; see ``staged``."""

    def __init__(self, fun: Callable[..., Any], **options: Any):
        def run(packed: Packed, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
            words = jax.device_put(packed.words, jax.memory.Space.Device)
            given = Packed(layout=packed.layout, words=words)
            return words, fun(given, *args, **kwargs)

        self._on_gpu = jax.jit(run, **options)
        self._plain = jax.jit(fun, **options)
        self._slots: dict[int, Iterator[_Slot]] = {}

    def __call__(self, packed: Packed, *args: Any, **kwargs: Any) -> Any:
        words = packed.words
        if not words.size or isinstance(words, jax.Array) or jax.default_backend() != "gpu":
            return self._plain(packed, *args, **kwargs)
        slot = self._next(words.size)
        sent = Packed(layout=packed.layout, words=slot.write(words))
        slot.read, out = self._on_gpu(sent, *args, **kwargs)
        return out

    def _next(self, size: int) -> _Slot:
        if size not in self._slots:
            self._slots[size] = _turns(size)
        return next(self._slots[size])

    def compiled_programs(self) -> int:
        """Programs traced so far."""
        return sum(f._cache_size() for f in (self._on_gpu, self._plain))


def _turns(size: int) -> Iterator[_Slot]:
    """Slots in turn, each made when it is first wanted."""
    slots: deque[_Slot] = deque()
    while True:
        if len(slots) < SLOTS:
            slots.append(_Slot(size))
        else:
            slots.rotate(-1)
        yield slots[-1]


def staged(fun: Callable[..., Any], **options: Any) -> StagedFunction:
    """``jax.jit(fun, **options)`` for ``fun(packed, …)`` with ``packed`` from ``pack``.

    On a GPU the words go through page-locked memory of the first device that belongs to this
    function; a buffer is written again only when its last reader is done. Elsewhere, and for
    words that are on a device already, this is ``jax.jit``.
    """
    return StagedFunction(fun, **options)
