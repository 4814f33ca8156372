"""Where arrays live: one object that weights, caches, staging and the choice of kernels ask.

A placement is one device, or several of a kind in a mesh of one axis. Over that axis weights are
divided by heads, experts, vocabulary and feed-forward width (``model.sharding``); caches and what
a step carries are on every device.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from mla_jax.errors import ArgumentError

__all__ = ["SHARDS", "Placement", "default_device"]

SHARDS = "shards"
"""The axis of a placement's mesh."""


@dataclass(frozen=True)
class Placement:
    """Devices of one kind as a mesh ``(shards,)``. Hashable; holds no array."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: Any) -> "Placement":
        """From devices, from a mesh of one axis, or (None) the device that JAX takes by itself.

        Raises:
            ArgumentError: no device, devices of several kinds, or a mesh of several axes.
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
        return cls(Mesh(np.array(devices), (SHARDS,), axis_types=(AxisType.Auto,)))

    @property
    def size(self) -> int:
        """Devices."""
        return self.mesh.size

    @property
    def device(self) -> Any:
        """One of the devices: they are of one kind."""
        return self.mesh.devices.flat[0]

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
        return self.everywhere.with_memory_kind("pinned_host")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it JAX computes here, whatever mesh or device its caller works under."""
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(self.device))
            if not jax.sharding.get_abstract_mesh().empty:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield

    def divided(self, axis: int) -> NamedSharding:
        """Of an array whose axis number ``axis`` is divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, SHARDS))


def default_device() -> Any:
    """``jax.default_device`` if it is set, else the first local device of the default backend."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return jax.local_devices()[0] if default is None else default
