"""Sending a step's words to GPUs without a transfer call.

A transfer of a host array allocates, hands the copy to another thread and wakes it: 40 to 90 us.
Here the host writes page-locked memory and the compiled program copies it in as its first work, or
its kernels read it there (``step.IN_KERNELS``).
Of the rest of a call (H200, JAX 0.11) a result costs 7 to 9 us, a kernel 1.4 us within a CUDA
graph, which is what XLA makes of five or more, and 5 us alone.
"""

import ctypes
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import jax
import numpy as np

from mla_jax.metadata.packed import Packed
from mla_jax.placement import PAGE_LOCKED, Placement, put
from mla_jax.types import Array, Int, made

__all__ = ["StagedFunction", "Staging", "fetched", "received", "staged"]

SLOTS = 3
"""Buffers of one size: a step that is still queued keeps its own."""


class _Slot:
    """A page-locked buffer for each device, the host's views of them, and who read them last."""

    def __init__(self, size: int, placement: Placement):
        empty = np.zeros(size, np.int32)
        self.words = jax.block_until_ready(put(empty, placement.page_locked))
        self.views = [_view(shard.data, size) for shard in self.words.addressable_shards]
        self.read: Array | None = None  # ready with the program that copies the words

    def write(self, words: Int[np.ndarray, "words"]) -> Int[Array, "words"]:
        """Fill the buffers, once their last reader is done."""
        if self.read is not None:
            self.read.block_until_ready()
        for view in self.views:
            view[:] = words
        return self.words


def _view(buffer: Array, size: int) -> np.ndarray:
    """Of the host on an array in page-locked memory."""
    place = (ctypes.c_int32 * size).from_address(buffer.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(place)


def fetched(words: Int[Array, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """The values of an int32 array of which every device has the same, when they are there.

    Page-locked memory is read in place. ``np.asarray`` would use one of XLA's streams for copies,
    which may have to wait for the next step if all streams share one hardware queue.
    """
    if words.sharding.memory_kind != PAGE_LOCKED:
        return np.asarray(words)
    one = words.addressable_shards[0].data.block_until_ready()
    return _view(one, one.size).reshape(one.shape).copy()


class Staging:
    """How the host's words come to the devices of a placement.

    To GPUs they go through page-locked buffers, ``SLOTS`` of each size and device. Otherwise they
    are copied to every device.
    """

    def __init__(self, placement: Placement):
        self.placement = placement
        self.page_locked = placement.on_gpu
        self._slots: dict[int, Iterator[_Slot]] = {}

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Of the words as a program gets them."""
        return self.placement.page_locked if self.page_locked else self.placement.everywhere

    def run[T](
        self, program: Callable[[Array], tuple[Array, T]], words: np.ndarray
    ) -> tuple[Array, T]:
        """``program(words)``, of which the first result is ready once it has read them.

        It is waited for before the words' memory is written again, so it must not be donated.
        """
        if not self.page_locked or not words.size:
            return program(put(words, self.sharding))
        if words.size not in self._slots:
            self._slots[words.size] = _turns(words.size, self.placement)
        slot = next(self._slots[words.size])
        slot.read, out = program(slot.write(words))
        return slot.read, out


def received(words: Int[Array, "words"]) -> Int[Array, "words"]:
    """In a program: the words on the device."""
    return jax.device_put(words, jax.memory.Space.Device)


class StagedFunction:
    """``jax.jit(fun)`` with an argument that is ``Packed`` by the host; see ``staged``."""

    def __init__(self, fun: Callable[..., Any], at: int, placement: Placement, **options: Any):
        def run(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
            words = received(args[at].words)
            given = Packed(layout=args[at].layout, words=words)
            # An empty array is ready with the program too, and nothing to allocate.
            return words[:0], fun(*args[:at], given, *args[at + 1 :], **kwargs)

        self._at, self._staging = at, Staging(placement)
        self._staged, self._plain = jax.jit(run, **options), jax.jit(fun, **options)

    def _stages(self, packed: object) -> bool:
        words = packed.words if isinstance(packed, Packed) else None
        return isinstance(words, np.ndarray) and words.size > 0 and self._staging.page_locked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = args[self._at]
        if not self._stages(packed):
            return self._plain(*args, **kwargs)

        def program(words: Array) -> tuple[Array, Any]:
            sent = made(Packed, layout=packed.layout, words=words)
            return self._staged(*args[: self._at], sent, *args[self._at + 1 :], **kwargs)

        return self._staging.run(program, packed.words)[1]

    def compiled_programs(self) -> int:
        """Programs traced so far."""
        both = self._staged, self._plain
        return sum(f._cache_size() for f in both)  # pyright: ignore[reportAttributeAccessIssue]


def _turns(size: int, placement: Placement) -> Iterator[_Slot]:
    return cycle([_Slot(size, placement) for _ in range(SLOTS)])


def staged(
    fun: Callable[..., Any], *, at: int = 0, placement: Placement | None = None, **options: Any
) -> StagedFunction:
    """``jax.jit(fun, **options)`` whose argument ``at`` may come from ``pack``.

    On GPUs its words go through page-locked memory that belongs to this function, for the devices
    of ``placement`` (None: JAX's default device); a buffer is written again only when its last
    reader is done. Elsewhere, and where that argument is on a device already, this is ``jax.jit``.

    Results are then committed to those devices. What one call returns and the next one takes, like
    a cache, must be so from the start (``jax.device_put(x, device)``, which copies nothing there),
    or the second call compiles again.
    """
    return StagedFunction(fun, at, Placement.of(placement), **options)
