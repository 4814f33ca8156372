"""Torch calls as CUDA graphs: replaying them leaves the host out of the clock."""

import itertools
from collections.abc import Callable

import torch

__all__ = ["Graphed", "InTurn", "copies"]


class Graphed:
    """``call`` captured once; run it before, so that nothing is set up inside the graph."""

    def __init__(self, call: Callable[[], object]):
        self.call = call
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()
        torch.cuda.synchronize()

    def once(self) -> None:
        """One call; waits."""
        self.call()
        torch.cuda.synchronize()

    def many(self, n: int) -> None:
        """``n`` replays, one after the other; waits once."""
        for _ in range(n):
            self.graph.replay()
        torch.cuda.synchronize()


class InTurn:
    """``call(i)`` for each of so many sets of data in turn."""

    def __init__(self, call: Callable[[int], object], sets: int):
        def all_sets():
            for i in range(sets):
                call(i)

        all_sets()
        self.call, self.turn = call, itertools.cycle(range(sets))
        self.many = Graphed(all_sets).many  # ``many(n)``: all sets, ``n`` times

    def once(self) -> None:
        """The next set; waits."""
        self.call(next(self.turn))
        torch.cuda.synchronize()


def copies(bytes: int, sets: int = 1) -> InTurn:
    """Device-to-device copies that move so many bytes each: half are read, half written."""
    made = [
        torch.randint(0, 255, (bytes // 2,), dtype=torch.uint8, device="cuda") for _ in range(sets)
    ]
    to = [torch.empty_like(x) for x in made]
    return InTurn(lambda i: to[i].copy_(made[i]), sets)
