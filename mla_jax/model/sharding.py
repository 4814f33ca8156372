"""Weights over the devices of a placement: which axis of which leaf is divided.

| leaf | divided by |
|---|---|
| embedding and output head | vocabulary |
| query and key/value up-projections, output projection, absorbed weights | heads |
| routed experts | experts |
| dense and shared feed-forward | width |

Norms, latent down-projections and routers are on every device, and so are caches. An axis that
the devices do not divide evenly stays whole. Attention runs under ``jax.shard_map`` over heads,
experts over experts; XLA divides the other products.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from mla_jax.placement import SHARDS, Placement

__all__ = ["divided", "divides", "divided_axis", "sharding_of"]

_AXES = (
    (r"embed\.embedding", 0),
    (r"lm_head\.kernel", 1),
    (r"attn\.(q|q_up|kv_up)\.kernel", 1),
    (r"attn\.out\.kernel", 0),
    (r"(mlp|shared)\.(gate|up)\.kernel", 1),
    (r"(mlp|shared)\.(gate|up)\.bias", 0),
    (r"(mlp|shared)\.down\.kernel", 0),
    (r"experts\.(gate|up|down)", 0),
)


def divided_axis(path: str) -> int | None:
    """The axis of a leaf that is divided, stacked layers counted; None: the leaf stays whole."""
    for pattern, axis in _AXES:
        if re.search(rf"(^|\.){pattern}$", path):
            return axis + path.startswith("stacks.")
    return None


def sharding_of(path: str, shape: tuple[int, ...], placement: Placement) -> Sharding:
    """Where the leaf of this path is."""
    axis = divided_axis(path)
    if axis is None or not divides(placement, shape[axis]):
        return placement.everywhere
    return placement.divided(axis)


def divides(placement: Placement | None, size: int) -> bool:
    """Whether an axis of this size is divided: several devices, each with as much."""
    return placement is not None and placement.size > 1 and size % placement.size == 0


def divided[**P, R](
    run: Callable[P, R], placement: Placement, *, given: Any, returned: Any
) -> Callable[P, R]:
    """``run`` on every device with its own share.

    ``given`` and ``returned`` have the divided axis of each argument and result, None for one
    that every device holds whole.
    """

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, SHARDS)

    def specs(axes: Any) -> Any:
        return jax.tree.map(spec, axes, is_leaf=lambda x: x is None)

    # Mosaic kernels do not say what varies between devices, so JAX cannot check it.
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=specs(given),
        out_specs=specs(returned),
        check_vma=False,
    )
