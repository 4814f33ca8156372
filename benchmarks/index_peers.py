"""DeepGEMM's index scores and vLLM's selection, from released binaries, on our arrays."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import torch

__all__ = ["as_torch", "decode", "load", "load_deepgemm", "prefill"]

VLLM = Path("/tmp/b/tree/vllm/_C_stable_libtorch.abi3.so")
"""Where ``go.sh`` of ``shared/peers/vllm`` unpacks vLLM's operators."""

WORKSPACE = 1 << 20
"""Bytes that vLLM gives its selections of decodes."""


def load(peers: Path) -> None:
    """Register the operators: DeepGEMM's of ``peers / "dg.tar.xz"``, vLLM's of ``VLLM``."""
    if not VLLM.exists():
        raise FileNotFoundError(f"{VLLM}: unpack vLLM's bundle by its go.sh first")
    torch.ops.load_library(str(VLLM))
    load_deepgemm(peers)


def load_deepgemm(peers: Path) -> None:
    """Make ``import deep_gemm`` find what ``peers / "dg.tar.xz"`` holds."""
    folder = Path(tempfile.mkdtemp())
    (folder / "deep_gemm").mkdir()
    archive = str(peers / "dg.tar.xz")
    subprocess.run(["tar", "xJf", archive, "-C", str(folder / "deep_gemm")], check=True)
    sys.path.insert(0, str(folder))
    import deep_gemm  # noqa: F401


def as_torch(x: jax.Array) -> torch.Tensor:
    """The same memory; codes arrive as bytes."""
    if x.dtype == "float8_e4m3fn":
        bytes_ = jax.lax.bitcast_convert_type(x, "uint8")
        return torch.from_dlpack(bytes_).view(torch.float8_e4m3fn)
    return torch.from_dlpack(x)


def decode(q, weights, pages, table, lens, *, page: int, k: int) -> dict[str, Callable]:
    """Scores, and each selection that vLLM has for them; all return what they made."""
    import deep_gemm

    q, weights, pages, table, lens = map(as_torch, (q, weights, pages, table, lens))
    rows, queries, heads, _ = q.shape
    longest = table.shape[1] * page
    pages = pages.view(-1, page, 1, pages.shape[-1] // page)
    weights = weights.reshape(rows * queries, heads)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lens, page, deep_gemm.get_num_sms())

    def scores():
        return deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None), pages, weights, lens, table, plan, longest
        )

    found = scores()
    flat = lens.reshape(-1)
    chosen = torch.empty(rows * queries, k, dtype=torch.int32, device="cuda")
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    ops = torch.ops._C

    def radix():
        strides = found.stride(0), found.stride(1)
        ops.top_k_per_row_decode(found, queries, lens, chosen, rows * queries, *strides, k)
        return chosen

    def persistent():
        ops.persistent_topk(found, flat, chosen, space, k, found.shape[1])
        return chosen

    def cooperative():
        ops.cooperative_topk(found, flat, chosen, space, k, found.shape[1])
        return chosen

    found_calls = {"scores": scores, "radix": radix, "persistent": persistent}
    return found_calls | ({"cooperative": cooperative} if len(flat) <= 32 else {})


def prefill(q, weights, keys, scales, starts, ends, *, k: int) -> dict[str, Callable]:
    """Scores and their selection."""
    import deep_gemm

    q, weights, keys, scales, starts, ends = map(as_torch, (q, weights, keys, scales, starts, ends))
    given = (q, None), (keys, scales), weights, starts, ends, len(keys)

    def scores():
        return deep_gemm.fp8_fp4_mqa_logits(*given)

    found = scores()
    chosen = torch.empty(len(q), k, dtype=torch.int32, device="cuda")

    def radix():
        torch.ops._C.top_k_per_row_prefill(
            found, starts, ends, chosen, len(q), found.stride(0), found.stride(1), k
        )
        return chosen

    return {"scores": scores, "radix": radix}
