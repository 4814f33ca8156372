"""The tensors of a DeepSeek V4 that both sides of a comparison write down, and our side of them.

Names are those of ``trace``; what V4 has instead of latents, ``[tokens, …]`` in float32:

=======================  ======================================  ============================
name                     what                                    shape behind ``tokens``
=======================  ======================================  ============================
layers.i.attn_input      sum of the streams, for attention       hidden
layers.i.query           projected queries, before their norm     heads * dim
layers.i.row             projected row, before norm, rotation    dim
layers.i.normed_row      the row after its norm                  dim
layers.i.states          rotated states of complete groups       (a row for each group) dim
layers.i.selected        1 where a query may see a state         groups
layers.i.after_attn      streams after attention                 streams * hidden
layers.i.mlp_input       sum of the streams, for the experts     hidden
layers.i.residual        streams after the layer                 streams * hidden
=======================  ======================================  ============================
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.commands.trace import Trace
from mla_jax.config_v4 import V4Config
from mla_jax.model.moe import HashRouter
from mla_jax.model.rope import cos_sin
from mla_jax.types import Array

__all__ = ["trace_model_v4"]


def trace_model_v4(model: nnx.Module, config: V4Config, token_ids: Sequence[int]) -> Trace:
    """Our module over one whole sequence, layer by layer, on the definitions (``xla``)."""
    trace, ids = Trace(side="mla_jax"), jnp.asarray(token_ids, jnp.int32)
    whole: Any = model
    x = whole.embed(ids)
    trace.put("embedding", x)
    streams = jnp.repeat(x[:, None], config.streams.count, axis=1)
    for i, block in enumerate(whole.layers):
        streams = _layer(trace, f"layers.{i}", block, streams, ids)
    h = whole.final_norm(whole.stream_head(streams, backend="xla"))
    trace.put("final_norm", h)
    trace.put("logits", whole.logits(h))
    return trace


def _layer(trace: Trace, at: str, block: Any, streams: Array, ids: Array) -> Array:
    x, mixing = block.attn_streams(streams, backend="xla")
    trace.put(f"{at}.attn_input", x)
    x = block.attn_norm(x)
    trace.put(f"{at}.attn_norm", x)
    _attention(trace, at, block.attn, x)
    y = block.attn.whole(x)
    trace.put(f"{at}.attention", y)
    streams = mixing.back(streams, y)
    trace.put(f"{at}.after_attn", streams.reshape(len(ids), -1))
    x, mixing = block.mlp_streams(streams, backend="xla")
    trace.put(f"{at}.mlp_input", x)
    x = block.mlp_norm(x)
    trace.put(f"{at}.mlp_norm", x)
    real = jnp.ones((len(ids),), jnp.bool_)
    router = block.moe.router
    hashed = isinstance(router, HashRouter)
    given = (x, ids, real) if hashed else (x, real)
    weights, experts = router(*given, backend="xla")
    weights, experts = np.asarray(weights), np.asarray(experts)
    trace.put_router(at, weights, experts, router.moe.experts)
    y = block.moe(x, ids, real, backend="xla")
    trace.put(f"{at}.mlp", y)
    streams = mixing.back(streams, y)
    trace.put(f"{at}.residual", streams.reshape(len(ids), -1))
    return streams


def _attention(trace: Trace, at: str, attn: Any, x: Array) -> None:
    """What attention reads: projections, states, and which states each query may see."""
    low, row = attn.q_norm(attn.q_down(x)), attn.kv(x)
    trace.put(f"{at}.query_latent", low)
    trace.put(f"{at}.query", attn.q_up(low).reshape(len(x), -1))
    trace.put(f"{at}.row", row)
    trace.put(f"{at}.normed_row", attn.kv_norm(row))
    if attn.pool is not None:
        angles = cos_sin(jnp.arange(len(x), dtype=jnp.int32), attn.config.rope(attn.ratio))
        states = attn.pool.whole(x, angles)
        trace.put(f"{at}.states", states)
        trace.put(f"{at}.selected", attn.seen_states(x, low, angles, len(states)))
