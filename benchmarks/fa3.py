"""FlashAttention-3's ragged forward pass from a released shared object, on the arrays we use."""

import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import torch

from benchmarks.graphed import Graphed

__all__ = ["FA3", "load"]


class FA3(Graphed):
    """One problem. ``concat``: making its keys, ``[k_nope | k_rope]`` per head, counts too."""

    def __init__(
        self, q: jax.Array, kv: jax.Array, k_rope: jax.Array, query_starts, key_starts,
        *, longest: tuple[int, int], scale: float, causal: bool, concat: bool,
    ):  # fmt: skip
        operator = torch.ops._vllm_fa3_C.fwd
        queries, both, rope, qs, ks = (
            torch.from_dlpack(x) for x in (q, kv, k_rope, query_starts, key_starts)
        )
        nope = queries.shape[-1] - rope.shape[-1]
        shared = rope[:, None].expand(-1, both.shape[1], -1)

        def keys():
            return torch.cat([both[..., :nope], shared], dim=-1)

        k = keys()
        v = both[..., nope:] if concat else both[..., nope:].contiguous()

        def call():
            return operator(
                queries, keys() if concat else k, v, None, None, None, None, qs, ks, None, None,
                None, *longest, None, None, None, None, None, None, None, None, None, scale, causal,
                -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
            )  # fmt: skip

        self.out, self.lse, *_ = call()
        super().__init__(call)


def load(peers: Path) -> Callable[..., FA3]:
    """Register the operators and return the constructor; the archive is unpacked once."""
    unpacked = Path(tempfile.gettempdir()) / "fa3.so"
    if not unpacked.exists():
        part = unpacked.with_suffix(f".{os.getpid()}")
        part.write_bytes(lzma.decompress((peers / "fa3.so.xz").read_bytes()))
        part.rename(unpacked)
    torch.ops.load_library(str(unpacked))
    return FA3
