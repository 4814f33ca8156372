"""DeepSeek's multi-head latent attention for JAX. Importing this touches no device."""

import importlib
from typing import TYPE_CHECKING

from mla_jax.cache import (
    FORMATS,
    CacheFormat,
    LatentCache,
    RecordCache,
    RecordFormat,
    SparseScope,
    StatePool,
)
from mla_jax.config import IndexerConfig, MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.config_v4 import StreamConfig, V4Config, read_config
from mla_jax.errors import (
    ArgumentError,
    ConfigError,
    EngineError,
    MetadataError,
    MLAError,
    PrefillBackendError,
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
from mla_jax.ops import (
    AddNorm,
    RowNorm,
    all_reduce,
    append_latent,
    append_window,
    apply_sinks,
    copy_blocks,
    explain,
    gather_codes,
    gather_latent,
    gather_rows,
    indexer_logits,
    matmul_float32,
    matmul_fp8,
    merge_attn_states,
    mix_streams,
    mla_decode,
    mla_prefill,
    mla_sparse_decode,
    mla_sparse_prefill,
    plan_decode,
    plan_prefill,
    pool_states,
    route_tokens,
    routed_experts,
    routed_experts_fp8,
    select_topk,
    support_matrix,
    swap_blocks,
    write_latent,
    write_rows,
)
from mla_jax.peers import PeerMemory
from mla_jax.types import AttnState, BlockScaled
from mla_jax.version import __version__

if TYPE_CHECKING:
    from mla_jax.engine import Engine, load_model
    from mla_jax.model.sampling import SamplingParams
    from mla_jax.scheduler import Completion, Event

_LATER = {
    "Completion": "scheduler",
    "Engine": "engine",
    "Event": "scheduler",
    "SamplingParams": "model.sampling",
    "load_model": "engine",
}

__all__ = [
    "FORMATS",
    "AddNorm",
    "ArgumentError",
    "AttnState",
    "BlockScaled",
    "CacheFormat",
    "Completion",
    "ConfigError",
    "ContextMetadata",
    "DecodeMetadata",
    "Engine",
    "EngineError",
    "Event",
    "IndexerConfig",
    "LatentCache",
    "MLABucket",
    "MLADims",
    "MLAError",
    "MLALadder",
    "MLAMetadata",
    "MetadataError",
    "MoEConfig",
    "ModelConfig",
    "PeerMemory",
    "PrefillBackendError",
    "PrefillMetadata",
    "RecordCache",
    "RecordFormat",
    "RopeConfig",
    "RowNorm",
    "SamplingParams",
    "SparseScope",
    "StatePool",
    "StreamConfig",
    "UnsupportedError",
    "V4Config",
    "WeightsError",
    "YarnConfig",
    "__version__",
    "all_reduce",
    "append_latent",
    "append_window",
    "apply_sinks",
    "build_mla",
    "copy_blocks",
    "explain",
    "gather_codes",
    "gather_latent",
    "gather_rows",
    "indexer_logits",
    "load_model",
    "matmul_float32",
    "matmul_fp8",
    "merge_attn_states",
    "mix_streams",
    "mla_decode",
    "mla_prefill",
    "mla_sparse_decode",
    "mla_sparse_prefill",
    "plan_decode",
    "plan_prefill",
    "pool_states",
    "read_config",
    "route_tokens",
    "routed_experts",
    "routed_experts_fp8",
    "select_topk",
    "support_matrix",
    "swap_blocks",
    "write_latent",
    "write_rows",
]


def __getattr__(name: str) -> object:
    """The engine is imported on first use: operations and metadata do not need Flax."""
    if name not in _LATER:
        raise AttributeError(f"module 'mla_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mla_jax.{_LATER[name]}"), name)
