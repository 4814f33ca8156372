"""FlashAttention-3 from a released shared object, on our arrays: ragged prefill and MLA decode."""

import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import torch
import triton

from benchmarks.graphed import Graphed

__all__ = ["FA3", "FA3Decode", "load", "load_decode"]

RANK = 512
SPLITS = 0, 32  # of a request at most: its own choice, and vLLM's bound inside CUDA graphs
FEW = 4096  # rows of queries up to which 32 splits are tried: beyond, their sums take gigabytes


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


class FA3Decode(Graphed):
    """MLA decode over pages: rotary columns are q and k, the latent ones ``q_v`` and v.

    Planned once; ``stepped`` plans in every call. Of its choices of splits the fastest is kept.
    """

    def __init__(self, q: jax.Array, pages: jax.Array, table, seq_lens, scale: float):
        q, pages, table, lens = (torch.from_dlpack(x) for x in (q, pages, table, seq_lens))
        bounds = SPLITS if q.shape[:3].numel() <= FEW else SPLITS[:1]
        made = [self._calls(q, pages, table, lens, scale, most) for most in bounds]
        planned = [Graphed(call) for call, _ in made]
        # A short trial is enough: the bounds differ by tens of percent, or not at all.
        times = [triton.testing.do_bench(lambda g=g: g.many(1)) for g in planned]
        best = times.index(min(times))
        call, stepped = made[best]
        self.splits = SPLITS[best]
        super().__init__(call)
        self.stepped = Graphed(stepped)
        self.out = call()[0].view(*q.shape[:3], RANK)

    def _calls(self, q, pages, table, lens, scale: float, most: int):
        batch, queries, heads, _ = q.shape
        flat, longest = q.flatten(0, 1), int(lens.max())
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        k, v = pages[..., RANK:].unsqueeze(2), pages[..., :RANK].unsqueeze(2)

        def plan():
            return torch.ops._vllm_fa3_C.get_scheduler_metadata(
                batch, queries, longest, heads, 1, k.shape[-1], RANK, q.dtype, lens, starts, None,
                None, None, None, pages.shape[1], 0, True, -1, -1, False, most, None, 0,
            )  # fmt: skip

        def call(made=None):
            return torch.ops._vllm_fa3_C.fwd(
                flat[..., RANK:], k, v, None, None, flat[..., :RANK], None, starts, None, None,
                None, lens, queries, longest, table, None, None, None, None, None, None, None,
                None, scale, True, -1, -1, 0.0, True, plan() if made is None else made, most, None,
                0, None, 1, 0, None,
            )  # fmt: skip

        once = plan()
        for made in (once, None):
            call(made)
        return lambda: call(once), call


def load_decode(peers: Path) -> Callable[..., FA3Decode]:
    """As ``load``, for decoding over pages."""
    load(peers)
    return FA3Decode


def load(peers: Path) -> Callable[..., FA3]:
    """Register the operators and return the constructor; the archive is unpacked once."""
    unpacked = Path(tempfile.gettempdir()) / "fa3.so"
    if not unpacked.exists():
        part = unpacked.with_suffix(f".{os.getpid()}")
        part.write_bytes(lzma.decompress((peers / "fa3.so.xz").read_bytes()))
        part.rename(unpacked)
    torch.ops.load_library(str(unpacked))
    return FA3
