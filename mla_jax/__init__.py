"""DeepSeek's multi-head latent attention for JAX. Importing this touches no device."""

import importlib

from mla_jax.cache import FORMATS, CacheFormat, LatentCache
from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.errors import (
    ConfigError,
    EngineError,
    MetadataError,
    UnsupportedError,
    WeightsError,
)
from mla_jax.metadata.buckets import MLABucket, MLALadder
from mla_jax.metadata.mla import (
    ContextMetadata,
    DecodeMetadata,
    MLAMetadata,
    PrefillMetadata,
    build_mla,
)
from mla_jax.types import AttnState

_LAZY = {
    "ops": (
        "apply_sinks",
        "copy_blocks",
        "explain",
        "gather_latent",
        "merge_attn_states",
        "mla_decode",
        "mla_prefill",
        "support_matrix",
        "swap_blocks",
        "write_latent",
    ),
    "engine": ("Engine", "SamplingParams"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "FORMATS",
    "AttnState",
    "CacheFormat",
    "ConfigError",
    "ContextMetadata",
    "DecodeMetadata",
    "EngineError",
    "LatentCache",
    "MLABucket",
    "MLADims",
    "MLALadder",
    "MLAMetadata",
    "MetadataError",
    "MoEConfig",
    "ModelConfig",
    "PrefillMetadata",
    "RopeConfig",
    "UnsupportedError",
    "WeightsError",
    "YarnConfig",
    "build_mla",
]


def __getattr__(name: str) -> object:
    """Operations and the engine are imported on first use: Flax is not needed for a config."""
    if name not in _HOME:
        raise AttributeError(f"module 'mla_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mla_jax.{_HOME[name]}"), name)
