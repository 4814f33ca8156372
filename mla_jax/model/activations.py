"""Activations in e4m3: whether products with e4m3 weights round many rows too.

DeepSeek-V3 was trained so, and ``activation_scheme: dynamic`` of its configuration says so. With
few rows reading the weights takes the time, and rows stay as they are.
"""

from typing import Any

from flax import nnx

from mla_jax.model.linear import Linear
from mla_jax.model.moe import Experts

__all__ = ["quantising"]


def quantising(graph: nnx.GraphDef[Any], state: nnx.State) -> tuple[nnx.GraphDef[Any], int]:
    """The graph of the same module with e4m3 activations, and how many of its parts have them.

    Those are the products with e4m3 weights. The module that was split stays as it is.
    """
    module = nnx.merge(graph, state)
    parts = [part for _, part in nnx.iter_graph(module) if isinstance(part, Linear | Experts)]
    parts = [part for part in parts if part.fp8]
    for part in parts:
        part.quantise_rows = True
    return nnx.split(module)[0], len(parts)
