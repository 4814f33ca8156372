"""Definition of what several devices add up or bring together, and its path on every device."""

from jax import lax

from mla_jax.pallas.axes import AddNorm, Hidden
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.peers import Peers
from mla_jax.types import Array, Float

__all__ = ["all_gather", "all_reduce"]


def all_reduce(
    x: Hidden, *, axis: str, peers: Peers | None, then: AddNorm | None
) -> Hidden | tuple[Hidden, Hidden]:
    """The sum of what the devices along ``axis`` have, on each of them; ``add_norm`` of it."""
    del peers
    return add_norm(lax.psum(x, axis), then)


def all_gather(
    x: Float[Array, "rows columns"], *, axis: str, peers: Peers | None
) -> Float[Array, "rows all"]:
    """The columns of all devices beside each other, on each of them."""
    del peers
    return lax.all_gather(x, axis, axis=1, tiled=True)
