"""What makes V4's compressed states, and the indexer that scores them.

Each token ``x_t`` gives a value and a gate for every channel, ``v_t = W_v x_t`` and
``g_t = W_g x_t + B_o`` with ``o`` its place in the group; a group's state is
``rotate(norm(sum_j softmax_j(g_j) * v_j))``, rotated at the group's first position. Overlapping
groups have two values and two gates a token: the first ones count in the group after its own.
Source: DeepSeek-V4, 2.3.
"""

import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import LatentCache, RecordCache, StatePool
from mla_jax.config_v4 import V4Config
from mla_jax.model.linear import Linear, contract, product_float32
from mla_jax.model.norm import RMSNorm
from mla_jax.pallas.pooling.ref import pooled, rotate_tail
from mla_jax.placement import Placement
from mla_jax.types import Array, Float, Int

__all__ = ["Pool", "StateIndexer"]


class Pool(nnx.Module):
    """Values and gates of tokens, and the states of their groups; float32 between the two."""

    def __init__(
        self,
        config: V4Config,
        dim: int,
        *,
        ratio: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.ratio, self.dim, self.eps = ratio, dim, config.eps
        self.halves = 2 if ratio == config.overlapping else 1
        shape = (config.hidden,), (self.halves, dim)
        self.value = Linear(*shape, dtype=dtype, rngs=rngs)
        self.gate = Linear(*shape, dtype=dtype, rngs=rngs)
        self.gate_bias = nnx.Param(jnp.zeros((ratio, self.halves, dim), jnp.float32))
        self.norm = RMSNorm(dim, eps=config.eps, dtype=dtype)

    def products(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens halves dim"], Float[Array, "tokens halves dim"]]:
        """Values and gates of each token, without bias; float32."""
        wide = {"out_dtype": jnp.dtype(jnp.float32)}
        kernels = self.value.kernel[...], self.gate.kernel[...]
        v, g = (contract("td,dhc->thc", x, kernel, **wide) for kernel in kernels)
        return v, g

    def given(
        self,
        products: tuple[Float[Array, "tokens halves dim"], Float[Array, "tokens halves dim"]],
        cache: LatentCache | RecordCache,
        slots: Int[Array, "tokens"],
    ) -> StatePool:
        """What tokens with these ``products`` give to their groups."""
        values, gates = products
        return StatePool(
            cache=cache,
            values=values,
            gates=gates,
            bias=self.gate_bias[...],
            gain=self.norm.scale[...],
            slots=slots,
        )

    def whole(
        self,
        x: Float[Array, "tokens hidden"],
        angles: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
    ) -> Float[Array, "groups dim"]:
        """The states of one whole sequence from position 0, in the dtype of ``x``."""
        tokens, ratio = len(x), self.ratio
        first = jnp.arange(tokens // ratio, dtype=jnp.int32) * ratio
        span = ratio * self.halves
        at = first[:, None] + jnp.arange(ratio - span, ratio, dtype=jnp.int32)
        v, g = self.products(x)
        g = g + self.gate_bias[...][jnp.arange(tokens, dtype=jnp.int32) % ratio]
        v, g = (y[jnp.maximum(at, 0)] for y in (v, g))
        cos, sin = (a[first] for a in angles)
        states = pooled(v, g, at >= 0, self.norm.scale[...], cos, sin, eps=self.eps)
        return states.astype(x.dtype)


class StateIndexer(nnx.Module):
    """Scores of compressed states: ``sum_h w_h relu(q_h . k) / sqrt(heads * dim)``.

    Keys are states of a smaller pool of its own over the same tokens.
    """

    def __init__(self, config: V4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        heads, dim = config.index_heads, config.index_dim
        self.q_up = Linear((config.q_rank,), (heads, dim), dtype=dtype, rngs=rngs, fp8=fp8)
        wide = jnp.dtype(jnp.float32)
        self.head_weights = Linear((config.hidden,), (heads,), dtype=wide, rngs=rngs)
        self.pool = Pool(config, dim, ratio=config.overlapping, dtype=dtype, rngs=rngs)
        self.topk, self.factor = config.index_topk, (heads * dim) ** -0.5

    def queries(
        self,
        q_latent: Float[Array, "tokens q_rank"],
        angles: tuple[Array, Array],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens heads dim"]:
        """From the normalised query latent; the last channels rotated."""
        q = self.q_up(q_latent, backend=backend, placement=placement)
        return rotate_tail(q, *angles)

    def weights(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens heads"]:
        """Of each head, float32, the constant factor of the score in them."""
        where = {"backend": backend, "placement": placement}
        return product_float32(x, self.head_weights.kernel[...], **where) * self.factor
