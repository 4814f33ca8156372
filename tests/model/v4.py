"""Tiny DeepSeek V4 models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.config import MoEConfig, YarnConfig
from mla_jax.config_v4 import StreamConfig, V4Config
from mla_jax.engine import Engine
from mla_jax.metadata.buckets import StepLadder, default_steps
from mla_jax.model.deepseek_v4 import DeepseekV4

PAGE, LONGEST, CHUNK = 4, 96, 16


def config(**changes) -> V4Config:
    """Window, overlapping and disjoint layers; the first routes by token id; short periods."""
    facts = {
        "vocab": 64,
        "hidden": 32,
        "heads": 8,
        "dim": 16,
        "rope_dim": 4,
        "q_rank": 12,
        "out_groups": 2,
        "out_rank": 8,
        "window": 8,
        "compress_ratios": (0, 4, 16),
        "overlapping": 4,
        "disjoint": 16,
        "hash_layers": 1,
        "moe": MoEConfig(
            experts=8, topk=2, width=16, shared=1, method="sqrtsoftplus", normalise=True, scale=1.5
        ),
        "swiglu_limit": 1.0,
        "index_heads": 4,
        "index_dim": 8,
        "index_topk": 3,
        "streams": StreamConfig(count=2),
        "yarn": YarnConfig(factor=4.0, original=32, attention_factor=1.0),
        "max_positions": 256,
        "eos": (0,),
    }
    return V4Config(**(facts | changes))


def model(cfg: V4Config, dtype="float32", seed: int = 0) -> DeepseekV4:
    """Random weights, sinks, biases and mixing that hide no mistake."""
    module = DeepseekV4(cfg, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))
    state = nnx.state(module, nnx.Param)
    key = jax.random.key(seed + 1)
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        name = ".".join(map(str, path))
        if not name.endswith(("bias", "sink", "streams.scale", "stream_head.scale")):
            continue
        noise = jax.random.normal(jax.random.fold_in(key, i), leaf[...].shape, leaf[...].dtype)
        leaf.set_value(1 + 0.2 * noise if name.endswith("scale") else 0.5 * noise)
    nnx.update(module, state)
    return module


def ladder() -> StepLadder:
    """Three programs: decodes, prefills, both."""
    return default_steps(max_requests=4, max_prefill_tokens=CHUNK, max_pages=LONGEST // PAGE)


def engine(module: nnx.Module, cfg: V4Config, **more) -> Engine:
    """An engine of two programs, or of three with ``ladder()``."""
    settings = {
        "num_pages": 80,
        "page": PAGE,
        "max_requests": 4,
        "prefill_chunk": CHUNK,
        "max_model_len": LONGEST,
        "cache_format": "fp32",
        "ladder": replace(ladder(), mixed=((8, CHUNK),)),
    }
    return Engine(module, cfg, **(settings | more))
