"""Folders of tiny DeepSeek V4 models in the dtypes that are published."""

import json

import ml_dtypes
import numpy as np
from flax import nnx

from mla_jax.model.safetensors_io import write_safetensors
from mla_jax.model.sharding import named_leaves
from mla_jax.model.weight_table_v4 import published_tensors, weight_table_v4
from mla_jax.model.weights import dequantise_fp4
from tests.model import v4

PUBLISHED = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "expert_dtype": "fp4",
}
"""Of config.json."""


def leaves_of(module):
    leaves = named_leaves(nnx.state(module, nnx.Param))
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def tensors_of(module, layout="published"):
    """The module's weights by checkpoint name, float32 and int64."""
    leaves, found = leaves_of(module), {}
    for weight in weight_table_v4(module.config, layout=layout):
        parts = [leaves[path] for path in weight.paths]
        parts = [p if weight.place is None else p[weight.place.index] for p in parts]
        for e, name in enumerate(weight.names()):
            if weight.fused:  # [experts, parts, in, out] of gate and up
                joined = np.stack(parts, 1) if len(parts) > 1 else parts[0][:, None]
                found[name] = np.ascontiguousarray(
                    joined.swapaxes(2, 3).reshape(len(joined), -1, joined.shape[2])
                )
                continue
            x = weight.to_checkpoint(parts[0][e] if weight.experts else parts[0])
            found[name] = np.ascontiguousarray(x.astype(np.int64) if weight.integer else x)
    return found


def folder_of(path, cfg, tensors, **changes):
    write_safetensors(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(cfg.to_hf() | changes))
    return path


def quantised(module, rng):
    """A published folder's dtypes for a tiny model, and the float32 numbers that they stand for."""
    cfg, plain = module.config, tensors_of(module)
    stored, exact = {}, dict(plain)
    for name, (shape, dtype) in published_tensors(cfg).items():
        if name.startswith("mtp."):
            stored[name] = np.zeros(shape, np.int8 if dtype == "I8" else np.float32)
        elif dtype == "I8":
            out, half = shape
            codes = rng.integers(0, 256, shape, dtype=np.uint8).view(np.int8)
            power = rng.integers(-6, 0, (out, -(-half // 16)))
            scale = (2.0**power).astype(ml_dtypes.float8_e8m0fnu)
            stored[name], stored[name.removesuffix("weight") + "scale"] = codes, scale
            exact[name] = dequantise_fp4(codes, scale)
        elif dtype == "F8_E4M3":
            low = plain[name].astype(ml_dtypes.float8_e4m3fn)
            blocks = [-(-n // 128) for n in shape]
            scale = (2.0 ** rng.integers(-2, 2, blocks)).astype(ml_dtypes.float8_e8m0fnu)
            stored[name], stored[name.removesuffix("weight") + "scale"] = low, scale
            grown = scale.astype(np.float32).repeat(128, 0).repeat(128, 1)
            exact[name] = low.astype(np.float32) * grown[: shape[0], : shape[1]]
        elif dtype != "F8_E8M0":
            stored[name] = plain[name].astype(
                {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}[dtype]
            )
            exact[name] = stored[name].astype(np.int64 if dtype == "I64" else np.float32)
    return stored, exact


def write(folder, cfg):
    """A published folder of random weights."""
    stored, _ = quantised(v4.model(cfg), np.random.default_rng(0))
    folder_of(folder, cfg, stored, **PUBLISHED)
