"""Latent attention as a good PyTorch user assembles it: cuBLAS, FlashAttention-3, FlashMLA.

Projections are ``F.linear``, keys are written out per head because the attention wants them so,
elementwise steps that PyTorch has no kernel for are small Triton kernels, and everything is one
CUDA graph.
"""

from collections.abc import Callable

import jax
import numpy as np
import torch
import triton
import triton.language as tl
from torch.nn.functional import linear, rms_norm

from benchmarks.graphed import Graphed

__all__ = ["ChunkedPrefill", "DecodeLayer", "PrefillLayer", "Replayed", "tensor"]

EPS = 1e-6


def tensor(x: jax.Array) -> torch.Tensor:
    """The same memory."""
    return torch.from_dlpack(x)


def ints(x) -> torch.Tensor:
    return torch.as_tensor(np.asarray(x), dtype=torch.int32, device="cuda")


def transposed(kernel: jax.Array, inner: int) -> torch.Tensor:
    """A kernel ``[in, …]`` as ``linear`` stores it, ``[out, in]``."""
    return tensor(kernel).reshape(inner, -1).t().contiguous()


class Replayed(Graphed):
    """A path of many kernels: an isolated call of it is a replay too."""

    def __init__(self, call: Callable[[], torch.Tensor]):
        for _ in range(2):
            call()
        super().__init__(call)

    def once(self) -> None:
        """One replay; waits."""
        self.graph.replay()
        torch.cuda.synchronize()


@triton.jit
def _merge(
    out, lse, part, part_lse, new_lse, stride, part_stride, new_stride,
    HEADS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Merge ``part`` into ``out`` in place; one token, all heads; lse is heads first.

    Threads of several warps hold one head's ``lse``, so the merged one goes elsewhere.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    a = tl.load(lse + h * stride + t)
    b = tl.load(part_lse + h * part_stride + t)
    top = tl.maximum(a, b)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    total = wa + wb
    tl.store(new_lse + h * new_stride + t, top + tl.log(total))
    at = t * HEADS * V + h[:, None] * V + tl.arange(0, V)[None, :]
    x, y = tl.load(out + at).to(tl.float32), tl.load(part + at).to(tl.float32)
    tl.store(out + at, (x * (wa / total)[:, None] + y * (wb / total)[:, None]).to(tl.bfloat16))


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor):
    tokens, heads, v = out.shape
    new_lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    strides = lse.stride(0), part_lse.stride(0), new_lse.stride(0)
    given = out, lse, part, part_lse, new_lse
    _merge[(tokens,)](*given, *strides, HEADS=heads, V=v, num_warps=8)
    lse.copy_(new_lse)


@triton.jit
def _rope(x, cos, sin, row, HEADS: tl.constexpr, HEAD: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate interleaved pairs in place; ``x`` points at the first rotary element of a row."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAIRS)
    c, s = tl.load(cos + t * PAIRS + i)[None, :], tl.load(sin + t * PAIRS + i)[None, :]
    at = t * row + tl.arange(0, HEADS)[:, None] * HEAD + 2 * i[None, :]
    a, b = tl.load(x + at).to(tl.float32), tl.load(x + at + 1).to(tl.float32)
    tl.store(x + at, (a * c - b * s).to(tl.bfloat16))
    tl.store(x + at + 1, (a * s + b * c).to(tl.bfloat16))


def rope_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """``x [tokens, heads, 64]``, any strides of tokens and heads."""
    heads, pairs = x.shape[1], x.shape[2] // 2
    warps = min(max(heads * pairs // 64, 1), 4)
    sizes = {"HEADS": heads, "HEAD": x.stride(1), "PAIRS": pairs}
    _rope[(len(x),)](x, cos, sin, x.stride(0), **sizes, num_warps=warps)


def expand(kv: torch.Tensor, k_rope: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of every head with the shared rotary part, and values where they are."""
    rope = k_rope.shape[-1]
    k = kv.new_empty((*kv.shape[:2], nope + rope))
    k[..., :nope] = kv[..., :nope]
    k[..., nope:] = k_rope[:, None]
    return k, kv[..., nope:]


def attend(q, k, v, query_starts, key_starts, longest, *, scale, causal):
    """FlashAttention-3: ``out [tokens, heads, v]`` and ``lse [heads, tokens]``, natural log."""
    out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, query_starts, key_starts, None, None, None, *longest,
        None, None, None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True,
        None, 1, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out, lse


class ChunkedPrefill:
    """New tokens, then the context by a plan of packed chunks: gather, project, attend, merge."""

    def __init__(self, kv_up: jax.Array, *, rank: int, nope: int, scale: float):
        self.rank, self.nope, self.scale = rank, nope, scale
        self.heads, self.up = kv_up.shape[1], transposed(kv_up, rank)

    def _part(self, q, latent, k_rope, starts, key_starts, longest, *, causal):
        kv = linear(latent, self.up).view(len(latent), self.heads, -1)
        k, v = expand(kv, k_rope, self.nope)
        return attend(q, k, v, starts, key_starts, longest, scale=self.scale, causal=causal)

    def plan(self, packed, table: np.ndarray, page: int) -> list:
        """Per chunk: query tokens, rows of the cache, starts and longest lengths."""
        chunks = []
        for c in packed.chunks if packed is not None else ():
            rows = np.concatenate(
                [
                    table[s.request, p // page] * page + p % page
                    for s in c.spans
                    for p in [np.arange(s.start, s.start + s.length)]
                ]
            )
            longest = int(np.diff(c.query_start_loc).max()), int(c.seq_lens.max())
            starts = ints(c.query_start_loc), ints(c.cu_seq_lens)
            chunks.append((slice(*c.token_slice), ints(rows), *starts, longest))
        return chunks

    def __call__(self, q, latent, k_rope, rows, starts, longest, chunks) -> torch.Tensor:
        """``rows`` is the cache as ``[slots, row]``."""
        out, lse = self._part(q, latent, k_rope, starts, starts, (longest, longest), causal=True)
        for tokens, index, query_starts, key_starts, longest_of in chunks:
            got = rows.index_select(0, index)
            part = self._part(
                q[tokens], got[:, : self.rank], got[:, self.rank :],
                query_starts, key_starts, longest_of, causal=False,
            )  # fmt: skip
            merge(out[tokens], lse[:, tokens], *part)
        return out


class Projections:
    """What both layers share; ``weights`` are our own arrays by name."""

    def __init__(self, weights: dict[str, jax.Array], dims, cos, sin):
        hidden = weights["q_down"].shape[0]
        down = [transposed(weights[k], hidden) for k in ("q_down", "kv_down")]
        self.down, self.dims = torch.cat(down), dims
        self.q_up = transposed(weights["q_up"], dims.q_rank)
        self.out = transposed(weights["out"], dims.heads * dims.v)
        self.q_norm, self.kv_norm = tensor(weights["q_norm"]), tensor(weights["kv_norm"])
        self.cos, self.sin = tensor(cos), tensor(sin)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``q [tokens, heads, qk]`` rotated, the latent, the rotated key."""
        d = self.dims
        q, latent, k_rope = linear(x, self.down).split((d.q_rank, d.rank, d.rope), dim=-1)
        q = linear(rms_norm(q, (d.q_rank,), self.q_norm, EPS), self.q_up)
        q = q.view(len(x), d.heads, d.qk)
        latent = rms_norm(latent, (d.rank,), self.kv_norm, EPS)
        rope_(q[..., d.nope :], self.cos, self.sin)
        rope_(k_rope.unsqueeze(1), self.cos, self.sin)
        return q, latent, k_rope


class PrefillLayer:
    """Projections, cache write, expanded attention, projection back."""

    def __init__(self, weights, dims, cos, sin, *, scale: float):
        self.project = Projections(weights, dims, cos, sin)
        sizes = {"rank": dims.rank, "nope": dims.nope, "scale": scale}
        self.prefill = ChunkedPrefill(weights["kv_up"], **sizes)

    def __call__(self, x, rows, slots, starts, longest) -> torch.Tensor:
        q, latent, k_rope = self.project(x)
        rows.index_copy_(0, slots, torch.cat([latent, k_rope], dim=-1))
        out = self.prefill(q, latent, k_rope, rows, starts, longest, ())
        return linear(out.view(len(x), -1), self.project.out)


class DecodeLayer:
    """Projections, cache write, absorbed attention by FlashMLA, projection back."""

    def __init__(self, weights, dims, cos, sin, *, scale: float):
        self.project = Projections(weights, dims, cos, sin)
        self.k_absorb, self.v_absorb = tensor(weights["k_absorb"]), tensor(weights["v_absorb"])
        self.dims, self.scale, self.plan = dims, scale, (None, None)

    def __call__(self, x, pages, slots, table, lens) -> torch.Tensor:
        d = self.dims
        q, latent, k_rope = self.project(x)
        rows = pages.view(-1, d.row)
        rows.index_copy_(0, slots, torch.cat([latent, k_rope], dim=-1))
        absorbed = torch.bmm(q[..., : d.nope].transpose(0, 1), self.k_absorb)
        joined = torch.cat([absorbed.transpose(0, 1), q[..., d.nope :]], dim=-1).unsqueeze(1)
        out, _, *plan = torch.ops._flashmla_C.dense_decode_fwd(
            joined, pages.unsqueeze(2), d.rank, lens, table, self.scale, True, *self.plan, None
        )
        self.plan = tuple(plan)
        heads = torch.bmm(out.squeeze(1).transpose(0, 1), self.v_absorb)
        return linear(heads.transpose(0, 1).reshape(len(x), -1), self.project.out)
