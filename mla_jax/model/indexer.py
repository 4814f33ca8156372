"""The lightning indexer of V3.2 and GLM-5: what it scores tokens with.

With the normalised query latent ``c`` and the layer's normed input ``x``::

    q = rotate(W_q c)  [heads, dim]        k = rotate(layer_norm(W_k x))  [dim]
    w = W_w x / sqrt(heads * dim)          score[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])

Only the first ``rope`` channels are rotated, by the angles of the attention itself.
Source: DeepSeek-V3.2-Exp report, section 2.1.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.config import IndexerConfig, ModelConfig
from mla_jax.errors import ConfigError
from mla_jax.model.linear import Linear, precision_of, product_float32
from mla_jax.model.norm import LayerNorm
from mla_jax.model.rope import rotate
from mla_jax.placement import Placement
from mla_jax.types import Array, Float

__all__ = ["Indexer", "hadamard"]

EPS = 1e-6
"""Of the keys' norm, in every published model."""


class Indexer(nnx.Module):
    """Index queries, keys and head weights of a layer's tokens."""

    def __init__(
        self,
        config: ModelConfig,
        indexer: IndexerConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
    ):
        if config.dims.q_rank is None:
            raise ConfigError("Indexer: config.dims.q_rank", None, "a query latent's width")
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}
        self.q_up = Linear((config.dims.q_rank,), (indexer.heads, indexer.dim), **facts)
        self.k = Linear((config.hidden,), (indexer.dim,), **facts)
        self.k_norm = LayerNorm(indexer.dim, eps=EPS)
        wide = {"dtype": jnp.dtype(jnp.float32), "rngs": rngs}
        self.head_weights = Linear((config.hidden,), (indexer.heads,), **wide)
        self.config, self.rope = indexer, config.dims.rope

    def queries(
        self,
        q_latent: Float[Array, "tokens q_rank"],
        angles: tuple[Array, Array],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens heads dim"]:
        """From the normalised query latent."""
        return self._placed(self.q_up(q_latent, backend=backend, placement=placement), angles)

    def keys(
        self,
        x: Float[Array, "tokens hidden"],
        angles: tuple[Array, Array],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens dim"]:
        """What the index cache stores."""
        k = self.k(x, backend=backend, placement=placement)
        return self._placed(self.k_norm(k), angles)

    def weights(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens heads"]:
        """Of each head, float32, both constant factors of the score in them."""
        c, where = self.config, {"backend": backend, "placement": placement}
        w = product_float32(x, self.head_weights.kernel[...], **where)
        return w * (c.heads * c.dim) ** -0.5

    def _placed(
        self, x: Float[Array, "tokens *heads dim"], angles: tuple[Array, Array]
    ) -> Float[Array, "tokens *heads dim"]:
        """Rotated, and spread over all channels if the configuration says so."""
        rope, rest = x[..., : self.rope], x[..., self.rope :]
        rope = rotate(rope, *angles, interleaved=self.config.interleaved)
        x = jnp.concatenate([rope, rest], axis=-1)
        return hadamard(x) if self.config.hadamard else x


def hadamard(x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
    """``x H / sqrt(dim)`` with the Walsh-Hadamard matrix in Sylvester's order, in float32.

    Orthogonal: products of two vectors stay, and no channel stands out before 8 bits.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    wide = x.astype(jnp.float32)
    spread = jnp.matmul(wide, matrix, precision=precision_of(wide.dtype))
    return (spread * x.shape[-1] ** -0.5).astype(x.dtype)
