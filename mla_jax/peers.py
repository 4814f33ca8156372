"""Memory of each device into which the others write: what sums over devices go through.

A device writes its rows into the memory of all others, tells them so, and waits for theirs
(``pallas.all_reduce``). XLA knows nothing of it, so a sum is one kernel of a CUDA graph, and the
host need not bring the devices together for it.

Source: one-shot sums as of vLLM's custom all-reduce, with two sets of slots in turn.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.placement import Placement, put
from mla_jax.types import Array

__all__ = [
    "FLAGS",
    "MOST_DEVICES",
    "ROW_BYTES",
    "SLOTS",
    "SLOTTED",
    "PeerMemory",
    "Peers",
    "reach_each_other",
    "rows_of",
    "table_of",
]

MOST_DEVICES, SLOTTED = 16, 512
"""Devices that share memory, and rows of all of them in one set of slots."""

ROW_BYTES = 16384
"""Of a slot: the largest row."""

FLAGS, SLOTS = 4096, 8192
"""Where flags and slots begin, in bytes. Before them each row has the number of its sums."""


def rows_of(devices: int) -> int:
    """Rows that a device may give to one sum."""
    return SLOTTED // devices


def reach_each_other(devices: Sequence[Any]) -> bool:
    """Whether every GPU can write into the memory of every other one.

    True of devices that are not here, for which programs are only compiled.
    """
    numbers = [device.local_hardware_id for device in devices]
    if None in numbers:
        return True
    driver = ctypes.CDLL("libcuda.so.1")
    return all(_reaches(driver, a, b) for a in numbers for b in numbers if a != b)


def _reaches(driver: Any, a: int, b: int) -> bool:
    found, one, other = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuDeviceGet(ctypes.byref(one), a) or driver.cuDeviceGet(ctypes.byref(other), b)
    failed = failed or driver.cuDeviceCanAccessPeer(ctypes.byref(found), one, other)
    return not failed and bool(found.value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Peers:
    """What a program needs of a ``PeerMemory``, one row for each device.

    A row has the device's number, a word that aligns what follows, and the address of every
    device's memory: its low word, then its high word.
    """

    table: Array  # uint32 [devices, 2 + 2 devices]


def table_of(places: Sequence[int]) -> np.ndarray:
    """The table of devices whose memory has these addresses."""
    halves = [half for place in places for half in (place & 0xFFFFFFFF, place >> 32)]
    return np.array([[number, 0, *halves] for number in range(len(places))], np.uint32)


@dataclass(frozen=True)
class PeerMemory:
    """Memory of the devices of a placement. It must be kept while a program that uses it runs.

    Programs that use the same memory run one after the other on every device, and the sums of a
    program depend on each other, so that all devices make them in the same order.
    """

    memory: Array
    peers: Peers

    @classmethod
    def of(cls, placement: Placement) -> "PeerMemory":
        """New memory, in which no sum was made. Devices of one process, one host."""
        count, home = placement.size, placement.divided(0)
        words = (SLOTS + 2 * SLOTTED * ROW_BYTES) // 4
        with placement.working():
            zeros = jax.jit(lambda: jnp.zeros((count, words), jnp.uint32), out_shardings=home)
            memory = jax.block_until_ready(zeros())
        at = {s.device: s.data.unsafe_buffer_pointer() for s in memory.addressable_shards}
        table = table_of([at[device] for device in placement.mesh.devices.flat])
        return cls(memory, Peers(table=put(table, home)))

    @staticmethod
    def spec(placement: Placement) -> Peers:
        """``peers`` of a placement, without memory: programs can be compiled for it."""
        count = placement.size
        shape = count, 2 + 2 * count
        return Peers(jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=placement.divided(0)))  # pyright: ignore[reportArgumentType]
