"""Array aliases, the axis glossary, and the small helpers that everything else shares.

Axes (one word per thing, used in every signature of the library):

| axis | meaning |
|---|---|
| ``tokens`` | query tokens of one step, flat over requests, in batch order |
| ``requests`` | requests of one step |
| ``starts`` | ``requests + 1``: exclusive sums over requests |
| ``heads`` | attention heads |
| ``rank`` | latent width (``kv_lora_rank``) |
| ``rope`` / ``nope`` / ``v`` | rotary, non-rotary and value widths of one head |
| ``row`` | one cache row, ``rank + rope`` |
| ``pages`` / ``page`` | pages of a cache, tokens in one page |
| ``slots`` | flat cache rows, ``pages * page`` |
| ``rows`` | rows of a gathered workspace |
| ``keys`` | key tokens, flat over requests |
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

__all__ = [
    "Array",
    "SCALE_BLOCK",
    "AttnState",
    "BlockScaled",
    "Bool",
    "Float",
    "Int",
    "UInt",
    "UInt8",
    "cdiv",
    "full_among",
    "gathered",
    "made",
    "power_of_two",
    "round_up",
]

PAD_SLOT = -1
"""The slot of a token that must not write the cache."""


SCALE_BLOCK = 128
"""Rows and columns of a weight matrix that share one scale, in published e4m3 checkpoints."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockScaled:
    """An e4m3 weight as published: ``W[o, i] = values[o, i] * scale[o // 128, i // 128]``.

    The layer is ``y = x W^T``: rows are outputs. Leading axes are experts or layers.
    """

    values: Float[Array, "... out into"]  # float8_e4m3fn
    scale: Float[Array, "... out_blocks in_blocks"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """That of ``values``."""
        return self.values.shape

    def widened(self, dtype: DTypeLike) -> Float[Array, "... out into"]:
        """The matrix in another dtype: the product in float32, rounded once."""
        rows, columns = self.shape[-2:]
        scale = jnp.repeat(self.scale, SCALE_BLOCK, axis=-2)[..., :rows, :]
        scale = jnp.repeat(scale, SCALE_BLOCK, axis=-1)[..., :columns]
        return (self.values.astype(jnp.float32) * scale).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttnState:
    """Attention over a part of the keys, in a form that parts can be merged from.

    ``out = softmax(scores) @ values`` and ``lse = log(sum(exp(scores)))`` (natural log).
    The identity, and the state of a row that may see no key, is ``out = 0, lse = -inf``.
    """

    out: Float[Array, "tokens heads dim"]  # normalised over the keys seen so far
    lse: Float[Array, "tokens heads"]  # float32, natural log; -inf when no key was seen


def made[T](cls: type[T], **fields: Any) -> T:
    """``cls(**fields)`` of a frozen dataclass that has no ``__post_init__``, in half the time.

    Such a class sets each field by a call. For objects that are made in every step: nothing is
    checked, and every field must be given.
    """
    new = object.__new__(cls)
    new.__dict__.update(fields)
    return new


def power_of_two(n: int) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` not below ``a``."""
    return b * cdiv(a, b)


def gathered(x: Array, *keep: int) -> Array:
    """``x`` divided over the Explicit axes of its mesh along axes ``keep`` alone.

    Where a mesh has Auto axes, or there is none, XLA sees to that itself: ``x`` as it is.
    """
    parts = _parts(x)
    kept = tuple(part if axis in keep else None for axis, part in enumerate(parts))
    if parts == kept:
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def _parts(x: Array) -> tuple[Any, ...]:
    """How each axis of ``x`` is divided over the Explicit axes of its mesh; None: it is not."""
    spec = jax.typeof(x).sharding.spec
    return *spec, *[None] * (x.ndim - len(spec))


def full_among(
    like: tuple[Array, ...],
    shape: tuple[int, ...],
    value: float,
    *,
    heads: tuple[Array, int, int] | None = None,
) -> Float[Array, "..."]:
    """A float32 constant to begin a loop with whose body mixes it with ``like``.

    Under ``jax.shard_map`` a loop must carry what differs between devices from the start, and a
    plain constant is the same on all of them. On a mesh with Explicit axes it must be divided from
    the start too: ``heads`` is an array and its axis of heads, and the axis of the constant.
    """
    mixed = sum(jnp.zeros_like(x, shape=(), dtype=jnp.float32) for x in like)
    made = jnp.full_like(mixed, value, shape=shape)
    if heads is None:
        return made
    x, axis, to = heads
    part = _parts(x)[axis]
    if part is None:
        return made
    spec = PartitionSpec(*[part if i == to else None for i in range(len(shape))])
    return jax.sharding.reshard(made, NamedSharding(jax.typeof(x).sharding.mesh, spec))
