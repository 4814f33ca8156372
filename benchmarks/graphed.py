"""A torch call as a CUDA graph: replaying it leaves the host out of the clock."""

from collections.abc import Callable

import torch

__all__ = ["Graphed"]


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
