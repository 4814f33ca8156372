"""A tiny V3 model whose products are block-scaled e4m3, as published."""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np

from mla_jax.config import MLADims, ModelConfig, MoEConfig
from mla_jax.model.safetensors_io import Checkpoint, write_safetensors
from mla_jax.model.weights import save
from tests.model import tiny

__all__ = ["config", "is_product", "quantised", "write"]


def config(**changes) -> ModelConfig:
    """Widths that the kernels take too: multiples of 128."""
    facts = {
        "hidden": 256,
        "mlp": 384,
        "dims": MLADims(heads=4, rank=128, nope=32, rope=16, v=32, q_rank=128),
        "rope": dataclasses.replace(tiny.config().rope, dim=16),
        "moe": MoEConfig(
            experts=8, topk=3, width=128, shared=1, method="noaux_tc", groups=4, topk_groups=2,
            normalise=True, scale=2.5,
        ),
        "fp8_block": 128,
    }  # fmt: skip
    return dataclasses.replace(tiny.config(), **(facts | changes))


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and the float32 scale of each block."""
    q = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scale = np.zeros([-(-n // 128) for n in x.shape], np.float32)
    for i, j in np.ndindex(*scale.shape):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scale[i, j] = np.abs(x[block]).max() / 448
        q[block] = (x[block] / scale[i, j]).astype(q.dtype)
    return q, scale


def is_product(name: str) -> bool:
    """Whether a tensor is one of the layers' products."""
    return "_proj" in name and name.endswith(".weight")


def write(path: Path, cfg: ModelConfig) -> None:
    """A folder with random weights."""
    save(path, cfg, tiny.leaves(tiny.model(cfg)))
    text = (path / "config.json").read_text()
    tensors = {}
    for name, tensor in Checkpoint.open(path).tensors.items():
        x = tensor.read()
        if is_product(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(x)
        else:
            tensors[name] = x
    write_safetensors(path / "model.safetensors", tensors)
    block = '"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", '
    block += '"weight_block_size": [128, 128]}'
    (path / "config.json").write_text(text.rstrip()[:-1].rstrip() + f",\n  {block}\n}}\n")
