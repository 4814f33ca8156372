"""Runs the assembly of ``all_reduce.mosaic`` on a CPU: a thread block of each device, in any order.

Threads of a block are in step. Between two instructions of a device the others may go on, as a
random draw says. All see each write at once, so it does not know of writes that come late.
"""

from collections.abc import Iterator

import numpy as np

from mla_jax.pallas.all_reduce.mosaic import _exchange
from mla_jax.peers import ROW_BYTES, SLOTS, SLOTTED, table_of
from tests.pallas.ptx_machine import U32, U64, Machine, instructions

__all__ = ["exchange"]

THREADS = 128
LIMIT = 500  # turns of a device, of all devices for one sum: more are a loop without end
OWN = SLOTS + 2 * SLOTTED * ROW_BYTES
"""Bytes of a device's memory."""


class Block(Machine):
    """One row of one device; branches lead anywhere."""

    def __init__(self, memory, words, table: int, row: int, devices: int):
        super().__init__(memory, [], blocks=1, threads=THREADS, shared_words=1)
        given = [*words.T, np.full(THREADS, table), np.full(THREADS, row)]
        self.registers |= {f"${4 * devices + i}": x.astype(U64) for i, x in enumerate(given)}
        self.at = np.zeros(THREADS, int)

    def going(self, text: str) -> Iterator[None]:
        """An instruction at a time, of the threads that are farthest behind."""
        lines = instructions(text)
        labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
        while (self.at < len(lines)).any():
            number = self.at.min()
            here = self.at == number
            self.at[here] += 1
            self.one(lines[number], here, labels)
            yield

    def one(self, line: str, here, labels: dict[str, int]) -> None:
        if line.endswith(":"):
            return
        self.awake = here
        op, arguments, here = self.parsed(line, here)
        if op[0] == "barrier":
            assert here.all(), "a barrier that not all threads reach"
        elif op[0] == "bra":
            self.at[here] = labels[arguments[0]]
        elif here.any():
            getattr(self, f"do_{op[0]}")(op, arguments, here)


def exchange(rows, row: int, rng):
    """What each device has of each sum: ``rows`` and result ``[sums, devices, threads, 4]`` words.

    A device begins a sum when it has ended the one before, whatever the others do.
    """
    sums, devices = rows.shape[:2]
    text, _ = _exchange(THREADS // 128, devices)
    tables = devices * OWN + 64 * np.arange(devices)
    memory = np.zeros((devices * OWN + 64 * devices) // 4, U32)
    for table, words in zip(tables, table_of([d * OWN for d in range(devices)]), strict=True):
        memory[table // 4 : table // 4 + len(words)] = words
    found = np.zeros((sums, devices, devices, THREADS, 4), U32)

    def all_of(device: int) -> Iterator[None]:
        for i in range(sums):
            block = Block(memory, rows[i, device], tables[device], row, devices)
            yield from block.going(text)
            for d in range(devices):
                words = [block.registers[f"${4 * d + k}"] for k in range(4)]
                found[i, device, d] = np.stack(words, axis=1).astype(U32)

    running = {device: all_of(device) for device in range(devices)}
    for _ in range(LIMIT * sums):
        if not running:
            return found
        device = rng.choice(list(running))
        for _ in range(rng.integers(1, 90)):
            if next(running[device], "ended") == "ended":
                del running[device]
                break
    raise AssertionError("a device waits for ever")
