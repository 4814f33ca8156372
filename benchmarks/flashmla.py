"""FlashMLA's dense decode from a released shared object, on the arrays that we use."""

from collections.abc import Callable
from pathlib import Path

import jax
import torch

from benchmarks.graphed import Graphed

__all__ = ["FlashMLA", "library"]


def library(peers: Path) -> Path:
    """The shared object in the folder of peers."""
    return peers / "_flashmla_C.abi3.so"


class FlashMLA(Graphed):
    """One problem, planned once; ``stepped`` plans in every call."""

    def __init__(self, q: jax.Array, pages: jax.Array, table, seq_lens, scale: float):
        operator = torch.ops._flashmla_C.dense_decode_fwd
        q, pages, table, lens = (torch.from_dlpack(x) for x in (q, pages, table, seq_lens))
        pages = pages.unsqueeze(2)  # [pages, page, 1, row]

        def call(plan=(None, None)):
            return operator(q, pages, 512, lens, table, scale, True, *plan, None)

        self.out, self.lse, *plan = call()
        super().__init__(lambda: call(plan))
        self.stepped = Graphed(call)


def load(peers: Path) -> Callable[..., FlashMLA]:
    """Register the operators and return the constructor."""
    torch.ops.load_library(str(library(peers)))
    return FlashMLA
