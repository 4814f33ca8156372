"""Definition of sums over devices, and their path on every device."""

from jax import lax

from mla_jax.pallas.axes import AddNorm, Hidden
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.peers import Peers

__all__ = ["all_reduce"]


def all_reduce(
    x: Hidden, *, axis: str, peers: Peers | None, then: AddNorm | None
) -> Hidden | tuple[Hidden, Hidden]:
    """The sum of what the devices along ``axis`` have, on each of them; ``add_norm`` of it."""
    del peers
    return add_norm(lax.psum(x, axis), then)
