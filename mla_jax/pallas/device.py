"""What a kernel may use of a device, from a real device or from its name alone."""

from dataclasses import dataclass
from typing import Any

import jax

from mla_jax.errors import ArgumentError
from mla_jax.placement import default_device

__all__ = ["PEAKS", "DeviceInfo", "Peaks", "peaks_of"]

_KINDS = {
    # device kind: (sm, multiprocessors, shared memory of one block, L2)
    "NVIDIA H200": (90, 132, 232448, 50 << 20),
    "NVIDIA H100 80GB HBM3": (90, 132, 232448, 50 << 20),
    "NVIDIA H100 PCIe": (90, 114, 232448, 50 << 20),
    "NVIDIA H800": (90, 132, 232448, 50 << 20),
    "NVIDIA H20": (90, 78, 232448, 60 << 20),
    "NVIDIA A100-SXM4-80GB": (80, 108, 166912, 40 << 20),
}
"""For what a device does not say: an ``AbstractDevice`` has a name and a number of cores alone."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a data sheet promises of one device."""

    kind: str  # the maker's name, a key of the table above
    bandwidth: float  # bytes of its memory a second
    flops: float  # of dense 16-bit products a second, accumulated in float32
    memory: int  # bytes


PEAKS = {
    "H200": Peaks(kind="NVIDIA H200", bandwidth=4.8e12, flops=989e12, memory=141 * 10**9),
    "H100": Peaks(kind="NVIDIA H100 80GB HBM3", bandwidth=3.35e12, flops=989e12, memory=80 * 10**9),
    "H100_PCIE": Peaks(kind="NVIDIA H100 PCIe", bandwidth=2e12, flops=756e12, memory=80 * 10**9),
    "H800": Peaks(kind="NVIDIA H800", bandwidth=3.35e12, flops=989e12, memory=80 * 10**9),
    "H20": Peaks(kind="NVIDIA H20", bandwidth=4e12, flops=148e12, memory=96 * 10**9),
    "A100": Peaks(
        kind="NVIDIA A100-SXM4-80GB", bandwidth=2.039e12, flops=312e12, memory=80 * 10**9
    ),
}
"""By short name."""


def peaks_of(name: str) -> Peaks:
    """By short name, ``H200``, or by the maker's, in any case.

    Raises:
        ArgumentError: the table has no such device.
    """
    for short, peaks in PEAKS.items():
        if name.lower() in (short.lower(), peaks.kind.lower()):
            return peaks
    raise ArgumentError("device", name, f"one of {', '.join(PEAKS)}")


_L2 = {90: 50 << 20, 80: 40 << 20}


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device as backends and tuning see it. Hashable; zeros where a fact is unknown."""

    platform: str  # cpu | gpu | tpu
    kind: str  # the maker's name of it
    sm: int = 0  # compute capability, 90 for 9.0; 0 = not an NVIDIA GPU
    sms: int = 0  # streaming multiprocessors; unknown: kernels that divide work by them refuse
    shared_memory: int = 0  # bytes one thread block may use
    l2: int = 0  # bytes of level-2 cache

    @property
    def name(self) -> str:
        """``sm90`` for an NVIDIA GPU, the platform otherwise."""
        return f"sm{self.sm}" if self.sm else self.platform

    @classmethod
    def of(cls, device: Any) -> "DeviceInfo":
        """Read a ``jax.Device``, or an ``AbstractDevice``; what they do not say is looked up."""
        platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
        kind = device.device_kind
        sm, sms, shared, l2 = _KINDS.get(kind, (0, 0, 0, 0))
        if platform == "gpu":
            capability = str(getattr(device, "compute_capability", "") or "")
            if capability.replace(".", "").isdigit():
                sm = int(capability.replace(".", ""))
            cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
            sms = cores or sms
            shared = getattr(device, "shared_memory_per_block_optin", None) or shared
            l2 = l2 or _L2.get(sm, 0)
        return cls(platform=platform, kind=kind, sm=sm, sms=sms, shared_memory=shared, l2=l2)

    @classmethod
    def current(cls) -> "DeviceInfo":
        """The device that a computation traced now is meant for.

        That is the device of the abstract mesh in use, else ``jax.default_device``, else the
        first local device.
        """
        abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        return cls.of(default_device() if abstract is None else abstract)
