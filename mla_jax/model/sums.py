"""What several devices add up: each gives a part, all get the sum."""

from collections.abc import Callable, Sequence
from typing import Any

from mla_jax import ops
from mla_jax.model.sharding import divided
from mla_jax.pallas.axes import AddNorm
from mla_jax.peers import Peers
from mla_jax.placement import SHARDS, Placement
from mla_jax.types import Array

__all__ = ["summed"]


def summed(
    run: Callable[..., Array],
    placement: Placement,
    *,
    given: Sequence[Any],
    then: AddNorm | None = None,
    backend: str | None = None,
) -> Callable[..., Any]:
    """``run`` on every device with its own share; the sum of the results, on each device.

    ``given`` has the divided axis of each argument, as ``sharding.divided``. With ``then`` the
    residual plus the sum, and its norm (``ops.all_reduce``).
    """
    how = ops.named("all_reduce", backend)

    def share(args: tuple[Any, ...], added: tuple[Array, Array] | None, peers: Peers | None) -> Any:
        onto = None if added is None or then is None else AddNorm(*added, then.eps)
        return ops.all_reduce(run(*args), axis=SHARDS, peers=peers, then=onto, backend=how)

    def call(*args: Any) -> Any:
        added = None if then is None else (then.residual, then.gain)
        returned = None if then is None else (None, None)
        axes = tuple(given), None, 0
        on_all = divided(share, placement, given=axes, returned=returned)
        return on_all(args, added, placement.peers)

    return call
