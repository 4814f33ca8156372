"""Where arrays live: one object that weights, caches, staging and the choice of kernels ask.

A placement is one device, or several of a kind in a mesh of one axis. Over that axis weights are
divided by heads, experts, vocabulary and feed-forward width (``model.sharding``); caches and what
a step carries are on every device.

The devices may belong to several processes (``jax.distributed``), of one host or of many. Then
every process does the same, in the same order, with equal arguments.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from mla_jax.errors import ArgumentError

__all__ = ["ONE_QUEUE", "PAGE_LOCKED", "SHARDS", "Placement", "default_device", "put", "several"]

SHARDS = "shards"
"""The axis of a placement's mesh."""

ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS", "1"
"""An environment variable and its value: CUDA launches through one hardware queue, not eight.

CUDA reads it when it starts. With eight queues a step of one request took 2.26 or 2.36 ms (V2-Lite,
H200), depending on the programs that ran before; with one queue 2.24 to 2.29. Over several devices
this was not tried.
"""

PAGE_LOCKED = "pinned_host"
"""JAX's name of the host's memory that a GPU reads and writes by itself."""


@dataclass(frozen=True)
class Placement:
    """Devices of one kind as a mesh ``(shards,)``. Hashable; holds no array but ``peers``."""

    mesh: Mesh
    peers: Any = field(default=None, compare=False)
    """Inside of a program the ``Peers`` that it takes as an argument; None: it takes none."""

    @classmethod
    def of(cls, devices: Any) -> "Placement":
        """From devices, from a mesh of one axis, or (None) the device that JAX takes by itself.

        Raises:
            ArgumentError: no device, devices of several kinds, a mesh of several axes, or devices
                of other processes without some of each process.
        """
        if isinstance(devices, Placement):
            return devices
        if isinstance(devices, Mesh):
            if devices.devices.ndim != 1:
                axes = dict(devices.shape)
                raise ArgumentError("Placement: mesh", axes, "a mesh of one axis")
            devices = list(devices.devices)
        elif devices is None:
            devices = [default_device()]
        elif not isinstance(devices, Sequence):
            devices = [devices]
        if not all(hasattr(d, "device_kind") for d in devices):
            allowed = "None, a jax.Device or several, a mesh of one axis, or a Placement"
            raise ArgumentError("Placement: devices", devices, allowed)
        kinds = sorted({d.device_kind for d in devices})
        if len(kinds) != 1:
            raise ArgumentError("Placement: devices", kinds or "none", "devices of one kind")
        if len(set(devices)) != len(devices):
            raise ArgumentError("Placement: devices", devices, "each device once")
        owners = {d.process_index for d in devices}
        if owners not in ({jax.process_index()}, {*range(jax.process_count())}):
            given = f"devices of processes {sorted(owners)}"
            allowed = f"those of this one ({jax.process_index()}), or some of each of all "
            raise ArgumentError("Placement", given, allowed + str(jax.process_count()))
        return cls(Mesh(np.array(devices), (SHARDS,), axis_types=(AxisType.Auto,)))

    @property
    def size(self) -> int:
        """Devices."""
        return self.mesh.size

    @property
    def processes(self) -> int:
        """Processes that have devices of it."""
        return len({d.process_index for d in self.mesh.devices.flat})

    @property
    def device(self) -> Any:
        """One of this process's devices: they are of one kind."""
        here = (d for d in self.mesh.devices.flat if d.process_index == jax.process_index())
        return next(here, self.mesh.devices.flat[0])

    @property
    def on_gpu(self) -> bool:
        """Whether its programs run on GPUs."""
        return self.device.platform in ("gpu", "cuda")

    @property
    def everywhere(self) -> Sharding:
        """Of an array that each device holds whole."""
        if self.size == 1:
            return SingleDeviceSharding(self.device)  # as ``jax.device_put(x, device)`` gives
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def page_locked(self) -> Sharding:
        """Of an array in the host's memory that a GPU reads and writes by itself."""
        return self.everywhere.with_memory_kind(PAGE_LOCKED)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it JAX computes here, whatever mesh or device its caller works under."""
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(self.device))
            if not jax.sharding.get_abstract_mesh().empty:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield

    def least(self, number: int) -> int:
        """The least of what all its processes have as ``number``, below 2^31."""
        if self.processes == 1:
            return number
        return int(multihost_utils.process_allgather(np.int32(number)).min())

    def divided(self, axis: int) -> NamedSharding:
        """Of an array whose axis number ``axis`` is divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, SHARDS))


def put(given: Any, home: Any) -> Any:
    """``jax.device_put``; over several processes without a look at what the others have.

    JAX compares what the processes give, with a sum over all devices for each array. Here they must
    give equal arrays. ``home`` is a sharding, None, or a tree of shardings.
    """
    homes = jax.tree.leaves(home)
    if all(home.is_fully_addressable for home in homes):
        return jax.device_put(given, home)
    leaves, tree = jax.tree.flatten(given)
    pairs = zip(leaves, homes * len(leaves) if len(homes) == 1 else homes, strict=True)
    return tree.unflatten(_put_share(leaf, home) for leaf, home in pairs)


def _put_share(leaf: Any, home: Sharding) -> Any:
    """On this process's devices, their parts of an array."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, home)  # of these processes already
    array = np.asarray(leaf)
    return jax.make_array_from_callback(array.shape, home, lambda part: array[part])


def several(placement: Placement | None) -> TypeGuard[Placement]:
    """Whether there is more than one device; None is one."""
    return placement is not None and placement.size > 1


def default_device() -> Any:
    """``jax.default_device`` if it is set, else the first local device of the default backend."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return jax.local_devices()[0] if default is None else default
