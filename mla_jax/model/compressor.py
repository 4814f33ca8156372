"""What makes V4's compressed states, and the indexer that scores them.

Each token ``x_t`` gives a value and a gate for every channel, ``v_t = W_v x_t`` and
``g_t = W_g x_t + B_o`` with ``o`` its place in the group; a group's state is
``rotate(norm(sum_j softmax_j(g_j) * v_j))``, rotated at the group's first position. Overlapping
groups have two values and two gates a token: the first ones count in the group after its own.
Source: DeepSeek-V4, 2.3.
"""

import jax.numpy as jnp
from flax import nnx

from mla_jax import ops
from mla_jax.config_v4 import V4Config
from mla_jax.model.linear import Linear, contract
from mla_jax.model.norm import RMSNorm
from mla_jax.pallas.pooling.ref import rotate_tail
from mla_jax.types import Array, Bool, Float, Int

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

    @property
    def width(self) -> int:
        """Elements of a token's values and gates."""
        return 2 * self.halves * self.dim

    def rows(
        self, x: Float[Array, "tokens hidden"], positions: Int[Array, "tokens"]
    ) -> Float[Array, "tokens width"]:
        """``[values | gates]`` of each token, float32: what an open group keeps of it."""
        wide = {"out_dtype": jnp.dtype(jnp.float32)}
        v = contract("td,dhc->thc", x, self.value.kernel[...], **wide)
        g = contract("td,dhc->thc", x, self.gate.kernel[...], **wide)
        g = g + self.gate_bias[...][positions % self.ratio]
        return jnp.stack([v, g], axis=1).reshape(len(x), -1)

    def states(
        self,
        rows: Float[Array, "groups span width"],
        there: Bool[Array, "groups span"],
        angles: tuple[Float[Array, "groups pairs"], Float[Array, "groups pairs"]],
        *,
        backend: str | None = None,
    ) -> Float[Array, "groups dim"]:
        """The states of groups whose tokens' ``rows`` are given, oldest first; float32."""
        parts = rows.reshape(*rows.shape[:2], 2, self.halves, self.dim)
        return ops.pool_states(
            parts[:, :, 0],
            parts[:, :, 1],
            there,
            self.norm.scale[...],
            angles,
            eps=self.eps,
            backend=ops.named("pool_states", backend),
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
        rows = self.rows(x, jnp.arange(tokens, dtype=jnp.int32))
        cos, sin = (a[first] for a in angles)
        states = self.states(rows[jnp.maximum(at, 0)], at >= 0, (cos, sin), backend="xla")
        return states.astype(x.dtype)


class StateIndexer(nnx.Module):
    """Scores of compressed states: ``sum_h w_h relu(q_h . k) / sqrt(heads * dim)``.

    Keys are states of a smaller pool of its own over the same tokens.
    """

    def __init__(self, config: V4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        heads, dim = config.index_heads, config.index_dim
        self.q_up = Linear((config.q_rank,), (heads, dim), dtype=dtype, rngs=rngs)
        wide = jnp.dtype(jnp.float32)
        self.head_weights = Linear((config.hidden,), (heads,), dtype=wide, rngs=rngs)
        self.pool = Pool(config, dim, ratio=config.overlapping, dtype=dtype, rngs=rngs)
        self.topk, self.factor = config.index_topk, (heads * dim) ** -0.5

    def queries(
        self, q_latent: Float[Array, "tokens q_rank"], angles: tuple[Array, Array]
    ) -> Float[Array, "tokens heads dim"]:
        """From the normalised query latent; the last channels rotated."""
        return rotate_tail(self.q_up(q_latent), *angles)

    def weights(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens heads"]:
        """Of each head, float32, the constant factor of the score in them."""
        return self.head_weights(x.astype(jnp.float32)) * self.factor
