"""Weights over the devices of a placement: which axis of which leaf is divided.

| leaf | divided by |
|---|---|
| embedding and output head | vocabulary |
| query and key/value up-projections, output projection, absorbed weights | heads |
| V4's output projections | groups of heads |
| dense and shared feed-forward, routed experts | width |

Every device has some of each routed expert's width, whole blocks of 128 of it: whichever experts
the tokens choose, all devices read as much. Where their width gives no whole blocks, each device
has some of the experts.

Of block-scaled e4m3 weights the same, but for the key/value up-projection, which is whole; each
device has whole blocks of 128 of every weight. Norms, latent down-projections and routers are on
every device, and so are caches. An axis that the devices do not divide evenly stays whole.
Attention runs under ``jax.shard_map`` over heads, experts over width or experts, and so do e4m3
products; XLA divides the others.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike

from mla_jax.placement import SHARDS, Placement, several
from mla_jax.types import SCALE_BLOCK

__all__ = [
    "GROUP_OUTPUTS",
    "derived_axis",
    "derived_sharding",
    "divided",
    "divides",
    "divisible_axes",
    "named_leaves",
    "share_axis",
    "sharding_of",
]

GROUP_OUTPUTS = 1024
"""Outputs of a group of heads in every published V4: a device has whole groups."""

_AXES = (
    (r"embed\.embedding", 0, 1),
    (r"lm_head\.kernel", 1, 1),
    (r"attn\.(q|q_up|kv_up)\.kernel", 1, 1),
    (r"attn\.(out|out_a|out_b)\.kernel", 0, 1),
    (r"(mlp|shared)\.(gate|up)\.kernel", 1, 1),
    (r"(mlp|shared)\.(gate|up)\.bias", 0, 1),
    (r"(mlp|shared)\.down\.kernel", 0, 1),
    (r"experts\.(gate|up)", 2, SCALE_BLOCK),
    (r"experts\.down", 1, SCALE_BLOCK),
    (r"experts\.(gate|up|down)", 0, 1),
)
"""Leaves, an axis, and what each device has whole units of; the first that can be divided is."""

_BLOCK_AXES = (
    (r"attn\.(q|q_up)\.(kernel|scale)", 0, SCALE_BLOCK),
    (r"attn\.out_a\.(kernel|scale)", 0, GROUP_OUTPUTS),
    (r"attn\.(out|out_b)\.(kernel|scale)", 1, SCALE_BLOCK),
    (r"(mlp|shared)\.(gate|up)\.(kernel|scale)", 0, SCALE_BLOCK),
    (r"(mlp|shared)\.down\.(kernel|scale)", 1, SCALE_BLOCK),
    (r"experts\.(gate|up)(_scale)?", 1, SCALE_BLOCK),
    (r"experts\.down(_scale)?", 2, SCALE_BLOCK),
    (r"experts\.(gate|up|down)(_scale)?", 0, 1),
)
"""Of e4m3 weights, ``[out, in]``, and of their scales, which have one number for each unit."""


def named_leaves(state: Any) -> dict[str, Any]:
    """Leaves of a module's state by their dotted paths, in the order of ``jax.tree.leaves``.

    ``named_leaves(nnx.state(model, nnx.Param))`` is what ``weights.save`` takes.
    """
    return {".".join(map(str, path)): var.get_value() for path, var in nnx.to_flat_state(state)}


def divisible_axes(path: str, dtype: DTypeLike) -> list[tuple[int, int]]:
    """Axes of a leaf that may be divided, stacks counted, and their units; the best first."""
    scale = path.endswith("scale")
    blocks = scale or jnp.dtype(dtype) == jnp.float8_e4m3fn
    return [
        (axis + path.startswith("stacks."), max(unit // SCALE_BLOCK, 1) if scale else unit)
        for pattern, axis, unit in (_BLOCK_AXES if blocks else _AXES)
        if re.search(rf"(^|\.){pattern}$", path)
    ]


def share_axis(path: str, shape: tuple[int, ...], dtype: DTypeLike, devices: int) -> int | None:
    """The axis of a leaf that is divided among so many devices; None: each holds it whole."""
    fitting = (a for a, unit in divisible_axes(path, dtype) if shape[a] % (devices * unit) == 0)
    return next(fitting, None) if devices > 1 else None


def derived_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """``share_axis`` of an array that ``derive`` makes: absorbed weights are divided by heads.

    They are ``[layers, heads, …]`` of four axes; gains of norms have two, and stay whole.
    """
    heads = shape[1] if len(shape) == 4 else 0
    return 1 if devices > 1 and heads and heads % devices == 0 else None


def sharding_of(
    path: str, shape: tuple[int, ...], dtype: DTypeLike, placement: Placement
) -> Sharding:
    """Where the leaf of this path is."""
    return _home(share_axis(path, shape, dtype, placement.size), placement)


def derived_sharding(shape: tuple[int, ...], placement: Placement) -> Sharding:
    """Where an array of this shape that ``derive`` makes is."""
    return _home(derived_axis(shape, placement.size), placement)


def _home(axis: int | None, placement: Placement) -> Sharding:
    return placement.everywhere if axis is None else placement.divided(axis)


def divides(placement: Placement | None, size: int, *, unit: int = 1) -> bool:
    """Whether an axis is divided: several devices, each with as many units of ``unit``."""
    return several(placement) and size % (placement.size * unit) == 0


def divided[**P, R](
    run: Callable[P, R], placement: Placement | None, *, given: Any, returned: Any
) -> Callable[P, R]:
    """``run`` on every device with its own share; of one device ``run`` itself.

    ``given`` and ``returned`` have the divided axis of each argument and result, None for one
    that every device holds whole.
    """
    if not several(placement):
        return run

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
