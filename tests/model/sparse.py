"""Tiny V3.2 and GLM-5 models."""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from mla_jax.config import ModelConfig
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import StepLadder, default_steps
from mla_jax.model.deepseek_v32 import DeepseekV32

TOPK = 8
PAGE, LONGEST, CHUNK = 8, 96, 16


def config(model_type: str = "deepseek_v32", **changes) -> ModelConfig:
    """Three layers, the first dense; GLM's second takes the first one's selection."""
    facts = {
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 512,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": TOPK,
    }
    if model_type == "glm_moe_dsa":
        facts["indexer_types"] = ["full", "shared", "full"]
    return ModelConfig.from_hf(facts | changes)


def model(cfg: ModelConfig, dtype="float32", seed: int = 0) -> DeepseekV32:
    return DeepseekV32(cfg, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))


def ladder() -> StepLadder:
    """Three programs: decodes, prefills, both."""
    return default_steps(max_requests=4, max_prefill_tokens=CHUNK, max_pages=LONGEST // PAGE)


def engine(module: nnx.Module, cfg: ModelConfig, **more) -> Engine:
    """An engine of two programs, or of three with ``ladder()``."""
    settings = {
        "num_pages": 40,
        "page": PAGE,
        "max_requests": 4,
        "prefill_chunk": CHUNK,
        "max_model_len": LONGEST,
        "ladder": replace(ladder(), mixed=((8, CHUNK),)),
    }
    return Engine(module, cfg, **(settings | more))
