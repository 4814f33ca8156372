"""Models of V2-Lite's, V3's or V4's widths with random weights, drawn leaf by leaf on the device.

Two standard deviations of 0.02 keep activations finite through any number of layers. One program
that draws all leaves at once takes minutes to compile.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sharding import named_leaves, sharding_of
from mla_jax.placement import Placement
from mla_jax.types import SCALE_BLOCK, BlockScaled

__all__ = ["block_scaled", "drawn", "of_layers", "of_ratios"]

LARGE = 2**28
"""Elements of a leaf that is drawn row by row."""

CODES = 2048
"""How much larger e4m3 codes are than the weights, to use their range."""


def of_layers[C: (ModelConfig, V4Config)](config: C, layers: int) -> C:
    """The model with so many layers: V3's dense ones first, V4's with hashed experts first."""
    if isinstance(config, V4Config):
        return dataclasses.replace(
            config,
            compress_ratios=config.compress_ratios[:layers],
            hash_layers=min(config.hash_layers, layers),
        )
    dense = config.sparse_layers.index(True)
    sparse = (False,) * min(dense, layers) + (True,) * max(layers - dense, 0)
    moe = config.moe if any(sparse) else None
    indexer = config.indexer
    if indexer is not None:
        indexer = dataclasses.replace(indexer, full=indexer.full[:layers])
    changes = {"sparse_layers": sparse, "moe": moe, "indexer": indexer}
    return dataclasses.replace(config, layers=layers, **changes)


def of_ratios(config: V4Config, *ratios: int) -> V4Config:
    """Layers of these ratios, none of them hashed; few tokens in the vocabulary."""
    return dataclasses.replace(
        config, vocab=1024, compress_ratios=ratios, hash_layers=0, fp8_block=None
    )


def block_scaled(w: jax.Array) -> BlockScaled:
    """Weights [outputs, inputs] in e4m3, a scale for each block of 128 x 128."""
    rows = w.astype(jnp.float32)
    padded = jnp.pad(rows, ((0, -len(rows) % SCALE_BLOCK), (0, 0)))
    blocks = padded.reshape(len(padded) // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    scale = jnp.abs(blocks).max(axis=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: len(rows)]
    return BlockScaled(values=values.astype(jnp.float8_e4m3fn), scale=scale)


def drawn(
    config: AnyConfig,
    module: Any = DeepseekV3,
    *,
    fp8: bool = False,
    placement: Placement | None = None,
) -> Any:
    """A model of this class in bfloat16; routers in float32, as always.

    With ``fp8`` its products are block-scaled e4m3. Over the devices of a ``placement`` each draws
    its own share.
    """
    placement = Placement.of(placement)
    facts: dict[str, Any] = {"dtype": jnp.dtype(jnp.bfloat16)} | ({"fp8": True} if fp8 else {})
    abstract = nnx.eval_shape(lambda: module(config, **facts, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree.flatten(state)
    paths = [*named_leaves(state)]
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = []
    low = {path for path, x in zip(paths, leaves, strict=True) if x.dtype == jnp.float8_e4m3fn}
    scales = {path.removesuffix("kernel") + "scale" for path in low} | {f"{p}_scale" for p in low}
    for key, path, x in zip(keys, paths, leaves, strict=True):
        home = sharding_of(path, x.shape, x.dtype, placement)
        if path in scales:
            made.append(jnp.full(x.shape, 1 / CODES, x.dtype, device=home))
        else:
            made.append(_leaf(key, x.shape, x.dtype, home))
    return nnx.merge(graph, jax.tree.unflatten(tree, jax.block_until_ready(made)))


def _leaf(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, home: jax.sharding.Sharding
) -> jax.Array:
    """Large stacks row by row: drawing one takes several times its memory."""
    if math.prod(shape) < LARGE or len(shape) < 3:
        return jax.jit(_normal, static_argnums=(1, 2), out_shardings=home)(key, shape, dtype)
    put = jax.jit(_put, static_argnums=3, donate_argnums=0, out_shardings=home)
    leaf = jnp.zeros(shape, dtype, device=home)
    for i, each in enumerate(jax.random.split(key, shape[0])):
        leaf = put(leaf, each, i, dtype)
    return leaf


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    factor = 0.02 * CODES if dtype == jnp.float8_e4m3fn else 0.02
    return (factor * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def _put(leaf: jax.Array, key: jax.Array, i: int, dtype: jnp.dtype) -> jax.Array:
    return leaf.at[i].set(_normal(key, leaf.shape[1:], dtype))
