"""vLLM's kernels for V4's small steps, on torch's memory, without vLLM's models.

``peers`` is where ``go.sh`` of ``shared/peers/vllm`` has unpacked its bundle: ``/tmp/b``. Modules
are imported one by one, for the packages around them import whole models.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["Pool", "insert", "pool"]

ROOT = "vllm.models.deepseek_v4"
LIBRARY = "_C_stable_libtorch.abi3.so"
FACTS = {
    512: {"quant_block": 64, "token_stride": 576, "scale_dim": 8},
    128: {"quant_block": 128, "token_stride": 128, "scale_dim": 4},
}
"""What ``DeepseekCompressor`` tells its kernels of rows of so many channels."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One compressor's arrays, as vLLM has them; slots and positions int64."""

    ratio: int
    values: Any  # [tokens, halves * dim], float32
    gates: Any
    bias: Any  # [ratio, halves * dim]
    state: Any  # [blocks, block, 2 * halves * dim], float32: values, then gates with their bias
    table: Any  # [requests, blocks], int32
    owners: Any  # of each token, int32
    positions: Any
    state_slots: Any
    cache: Any  # [pages, page, bytes of a record], uint8
    slots: Any
    gain: Any
    angles: Any  # [positions, 64], float32: cos, sin
    eps: float


def insert(peers: Path, q, kv, cache, slots, positions, angles, *, eps: float, page: int):
    """A call of the fused insert; it does not norm ``kv``. Returns the queries."""
    _load(peers)
    heads, ops = q.shape[1], torch.ops._C
    if cache.dtype == torch.uint8:
        fused = ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        return lambda: fused(q, kv, cache, slots, positions, angles, heads, eps, page)
    in_place = ops.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert

    def call():
        in_place(q, kv, cache, slots, positions, angles, eps, page)
        return q

    return call


def pool(peers: Path, given: Pool) -> tuple[str, Callable[[], None]]:
    """The compressor's two calls, save and compress, and which of its kernels compresses."""
    _load(peers)
    save = _module(peers, "common.ops.save_partial_states").save_partial_states
    name, compress = _compressor(peers, given.gain.shape[0])
    dim, block = given.gain.shape[0], given.state.shape[1]
    width = given.state.shape[2] // 2
    overlap = width == 2 * dim

    def call() -> None:
        save(
            kv=given.values,
            score=given.gates,
            ape=given.bias,
            positions=given.positions,
            state_cache=given.state,
            slot_mapping=given.state_slots,
            block_size=block,
            state_width=width,
            compress_ratio=given.ratio,
            pdl_kwargs={"launch_pdl": False},
        )
        compress(
            state_cache=given.state,
            num_actual=len(given.positions),
            token_to_req_indices=given.owners,
            positions=given.positions,
            slot_mapping=given.state_slots,
            block_table=given.table,
            block_size=block,
            state_width=width,
            cos_sin_cache=given.angles,
            kv_cache=given.cache,
            k_cache_metadata=SimpleNamespace(slot_mapping=given.slots),
            pdl_kwargs={"launch_pdl": False},
            head_dim=dim,
            rope_head_dim=given.angles.shape[1],
            compress_ratio=given.ratio,
            overlap=overlap,
            use_fp4_cache=False,
            rms_norm_weight=given.gain,
            rms_norm_eps=given.eps,
            **FACTS[dim],
        )

    return name, call


def _compressor(peers: Path, dim: int) -> tuple[str, Callable[..., None]]:
    """vLLM's choice on CUDA: CuTe for rows of 512, where its packages are there; else Triton."""
    plain = _module(peers, "common.ops.fused_compress_quant_cache").compress_norm_rope_store_triton
    if dim != 512:
        return "Triton", plain
    try:
        cute = _module(peers, "nvidia.ops.sparse_attn_compress_cutedsl")
    except ImportError as missing:
        print(f"vLLM's CuTe compressor cannot be imported ({missing}): its Triton one", flush=True)
        return "Triton", plain
    return "CuTe", cute.compress_norm_rope_store_cutedsl


@cache
def _load(peers: Path) -> None:
    """Make vLLM's package importable behind all others, and its operations known to torch."""
    for name in ("VLLM_NO_USAGE_STATS", "TVM_FFI_DISABLE_TORCH_C_DLPACK"):
        os.environ.setdefault(name, "1")
    sys.path += [str(peers / part) for part in ("tree", "site", "fix")]
    torch.ops.load_library(str(peers / "tree" / "vllm" / LIBRARY))


@cache
def _module(peers: Path, name: str) -> ModuleType:
    """A module below ``ROOT``, none of whose packages runs its ``__init__``."""
    importlib.import_module("vllm.models")
    for part in ("", ".common", ".common.ops", ".nvidia", ".nvidia.ops"):
        package = ModuleType(ROOT + part)
        folder = peers / "tree" / (ROOT + part).replace(".", "/")
        package.__path__ = [str(folder)]
        sys.modules.setdefault(ROOT + part, package)
    return importlib.import_module(f"{ROOT}.{name}")
