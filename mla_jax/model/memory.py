"""How a model and its caches share a memory."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mla_jax.cache import CacheFormat
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig
from mla_jax.model.family import Serving, family_of
from mla_jax.model.weight_table import expected_shapes

__all__ = ["MemoryPlan", "plan_memory"]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of weights and of one token's cache rows. Activations come on top."""

    weights: int  # bytes
    absorbed: int  # bytes of the decode weights derived from the up-projections
    token: int  # bytes of one token in the caches of all layers
    request: int = 0  # bytes of a request whatever its length: its window and open groups (V4)

    def tokens(self, memory: int) -> int:
        """Tokens of one request that fit beside the weights in ``memory`` bytes; 0 when none do."""
        return max(0, memory - self.weights - self.absorbed - self.request) // max(self.token, 1)


def plan_memory(
    config: AnyConfig, *, dtype: str | np.dtype | type, format: CacheFormat
) -> MemoryPlan:
    """The plan of one device that holds the whole model in ``dtype``.

    Raises:
        EngineError: the family does not store these widths in this format.
    """
    itemsize = jnp.dtype(dtype).itemsize
    bytes_of = {"float32": 4, "int32": 4, "model": itemsize}
    shapes = expected_shapes(config).values()
    absorbed = 0
    if isinstance(config, ModelConfig):
        d = config.dims
        absorbed = config.layers * d.heads * (d.nope + d.v) * d.rank * itemsize
    serving = Serving.of(config, cache_format=format.name)
    groups = family_of(config.family).groups(config, serving)
    return MemoryPlan(
        weights=sum(math.prod(shape) * bytes_of[kind] for shape, kind in shapes),
        absorbed=absorbed,
        token=math.ceil(sum(group.token_bytes for group in groups)),
        request=sum(group.request_bytes for group in groups),
    )
