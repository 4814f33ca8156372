"""A forward pass written down: every named intermediate tensor of one sequence, in order.

Both sides of a comparison write the same names and layouts, ``[tokens, …]`` in float32:

======================  ======================================  =============================
name                    what                                    shape behind ``tokens``
======================  ======================================  =============================
embedding               rows of the token embedding             hidden
layers.i.attn_norm      norm before attention                   hidden
layers.i.query_latent   normalised query latent                 q_rank
layers.i.query          projected queries, before rotation      heads, nope + rope
layers.i.row            projected latent and key, as projected  rank + rope
layers.i.latent         normalised key/value latent             rank
layers.i.query_nope     queries without rotation                heads, nope
layers.i.query_rope     rotated queries, pairs (2i, 2i + 1)     heads, rope
layers.i.key_rope       rotated shared key, the same order      rope
layers.i.selected       1 where a query may see a key (DSA)     tokens
layers.i.attention      output projection of attention          hidden
layers.i.after_attn     residual after attention                hidden
layers.i.mlp_norm       norm before the feed-forward block      hidden
layers.i.router_choice  1 for each chosen expert                experts
layers.i.router         weights of the experts, 0 if not chosen experts
layers.i.mlp            feed-forward block, experts and shared  hidden
layers.i.residual       residual after the layer                hidden
final_norm              norm before the head                    hidden
logits                  of every position                       vocab
======================  ======================================  =============================

A checkpoint that rotates halves keeps its own channel order on both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.config import ModelConfig
from mla_jax.errors import ConfigError
from mla_jax.model.family import family_of
from mla_jax.model.rope import cos_sin

__all__ = ["Trace", "dense_router", "trace_model"]


@dataclass(kw_only=True)
class Trace:
    """Tensors of one side by name, in the order of computation."""

    side: str  # who computed them
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def put(self, name: str, value: Any) -> None:
        """Write one down, in float32."""
        self.tensors[name] = np.asarray(value, dtype=np.float32)

    def put_router(self, at: str, weights: Any, experts: Any, count: int) -> None:
        """Which of ``count`` experts each token chose, and their weights."""
        router = dense_router(np.asarray(weights), np.asarray(experts), count)
        self.put(f"{at}.router_choice", router != 0)
        self.put(f"{at}.router", router)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def dense_router(weights: np.ndarray, experts: np.ndarray, count: int) -> np.ndarray:
    """``[tokens, count]`` from each token's weights and experts; 0 where not chosen."""
    dense = np.zeros((len(weights), count), np.float32)
    np.put_along_axis(dense, np.asarray(experts), np.asarray(weights, np.float32), axis=1)
    return dense


def trace_model(model: nnx.Module, config: ModelConfig, token_ids: Sequence[int]) -> Trace:
    """Our module over one whole sequence, layer by layer, on the definitions (``xla``).

    Raises:
        ConfigError: no tracer knows the layers of this family.
    """
    name = family_of(config.family).name
    if name not in _ATTENTION:
        allowed = f"models of {', '.join(sorted(_ATTENTION))}"
        raise ConfigError(f"parity: model_type of family {name}", config.family, allowed)
    trace = Trace(side="mla_jax")
    decoder: Any = model
    h = decoder.embed(jnp.asarray(token_ids, jnp.int32))
    trace.put("embedding", h)
    state: Any = None
    for i, block in enumerate(decoder.layers):
        h, state = _layer(trace, f"layers.{i}", block, h, state, _ATTENTION[name])
    h = decoder.final_norm(h)
    trace.put("final_norm", h)
    trace.put("logits", decoder.logits(h))
    return trace


def _layer(
    trace: Trace, at: str, block: Any, h: Any, state: Any, attend: Callable[..., Any]
) -> tuple[Any, Any]:
    """One block: ``h += attn(norm(h)); h += mlp_or_moe(norm(h))``."""
    x = block.attn_norm(h)
    trace.put(f"{at}.attn_norm", x)
    _projections(trace, at, block.attn, x)
    y, state = attend(trace, at, block.attn, x, state)
    trace.put(f"{at}.attention", y)
    h = h + y
    trace.put(f"{at}.after_attn", h)
    x = block.mlp_norm(h)
    trace.put(f"{at}.mlp_norm", x)
    if block.sparse:
        weights, experts = block.moe.router(x, backend="xla")
        trace.put_router(at, weights, experts, block.moe.router.moe.experts)
        y = block.moe(x, jnp.ones(x.shape[:1], jnp.bool_), backend="xla")
    else:
        y = block.mlp(x, backend="xla")
    trace.put(f"{at}.mlp", y)
    h = h + y
    trace.put(f"{at}.residual", h)
    return h, state


def _projections(trace: Trace, at: str, attn: Any, x: Any) -> None:
    angles = cos_sin(jnp.arange(x.shape[0], dtype=jnp.int32), attn.rope)
    if attn.dims.q_rank is None:
        trace.put(f"{at}.query", attn.q(x, backend="xla"))
    else:
        low = attn.query_latents(x, backend="xla")
        trace.put(f"{at}.query_latent", low)
        trace.put(f"{at}.query", attn.q_up(low, backend="xla"))
    trace.put(f"{at}.row", attn.kv_down(x, backend="xla"))
    q_nope, q_rope = attn.queries(x, angles, backend="xla")
    latent, k_rope = attn.latents(x, angles, backend="xla")
    trace.put(f"{at}.latent", latent)
    trace.put(f"{at}.query_nope", q_nope)
    trace.put(f"{at}.query_rope", q_rope)
    trace.put(f"{at}.key_rope", k_rope)


def _dense(trace: Trace, at: str, attn: Any, x: Any, state: None) -> tuple[Any, None]:
    return attn.full(x), state


def _sparse(trace: Trace, at: str, attn: Any, x: Any, selected: Any) -> tuple[Any, Any]:
    """V3.2 and GLM-5; ``selected`` are positions, -1 behind the last."""
    y, selected = attn.whole(x, selected)
    positions = np.asarray(selected)
    seen = np.zeros((len(positions), len(positions) + 1), np.float32)
    np.put_along_axis(seen, np.where(positions < 0, len(positions), positions), 1, axis=1)
    trace.put(f"{at}.selected", seen[:, :-1])
    return y, selected


_ATTENTION: dict[str, Callable[..., Any]] = {"deepseek_v3": _dense, "deepseek_v32": _sparse}
"""How the attention of a family's layers is run; another family adds its own here."""
