"""Compile for an H200 on a machine without a GPU, and read the assembler's report.

Needs the plugin and the assembler of CUDA 12 or of CUDA 13 (extras ``compile12``, ``compile13``)
and ``JAX_PLATFORMS=cpu``; neither a driver nor a device.
"""

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from mla_jax.pallas.device import DeviceInfo

__all__ = ["CUDA", "H200", "KernelReport", "available", "compile_sm90", "cuda", "h200", "h200s"]

H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132, shared_memory=232448)
"""As a kernel's wrapper sees it."""

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "%d.%d.0"
  compile_time_toolkit_version: "%d.%d.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: %d minor: %d }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What the assembler says of one kernel."""

    name: str
    registers: int  # of a thread, at launch
    spilled: int  # bytes of spill stores of a thread
    serialized: bool  # products wait for each other: far slower
    register_limits_ignored: bool  # the kernel's own division of registers was refused
    shared: int  # bytes
    log: str


CUDA = {13: 0, 12: 9}
"""Major and minor version of each toolkit that kernels are compiled with."""


def cuda() -> int | None:
    """The CUDA whose plugin is installed here, the newer of two; None: neither is."""
    found = (n for n in CUDA if importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None)
    return next(found, None)


def available() -> str:
    """Why this machine cannot compile for an H200; empty if it can."""
    if cuda() is None:
        return "no CUDA plugin is installed (extras compile12, compile13)"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "JAX_PLATFORMS is not cpu"
    return ""


def h200() -> jax.Device:
    """An H200 that is not there: programs can be compiled for it."""
    return _topology().devices[0]


def h200s(count: int) -> list[jax.Device]:
    """Several of one host."""
    return list(_topology(count).devices)


def _topology(count: int = 1) -> topologies.TopologyDescription:
    """With versions of driver and toolkit: without them XLA makes no CUDA graph of a loop."""
    major = cuda()
    assert major is not None, available()
    config, sizes = _H200 % ((major, CUDA[major]) * 3), f"1x1x{count}"
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=sizes)


def compile_sm90(
    fn: Callable,
    *args: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    dump: Path | None = None,
) -> tuple[Any, list[KernelReport]]:
    """The compiled ``fn`` and a report on each of its Mosaic GPU kernels, in name order.

    ``donate`` are positions of arguments whose memory the results may take, ``options`` XLA's;
    the PTX of each stays in the folder ``dump``, if that is given.
    """
    mesh = topologies.make_mesh(_topology(), (1,), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with tempfile.TemporaryDirectory() as folder:
        flags = {f"MOSAIC_GPU_DUMP_{k}": "1" for k in ("PTXAS", "PTX")}
        with _environment(MOSAIC_GPU_DUMP_TO=folder, **flags):
            compiled = jax.jit(fn, donate_argnums=donate).lower(*specs).compile(options)
        reports = [_read(path) for path in sorted(Path(folder).glob("*.ptxas"))]
        if dump is not None:
            for path in Path(folder).glob("*.ptx"):
                shutil.copy(path, dump)
    return compiled, reports


@contextmanager
def _environment(**values: str):
    old = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, v in old.items():
            os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)


def _read(path: Path) -> KernelReport:
    log = path.read_text()
    resources = path.with_suffix(".resources.txt")
    text = resources.read_text() if resources.exists() else ""

    def number(pattern: str, source: str) -> int:
        found = re.search(pattern, source)
        return int(found.group(1)) if found else 0

    return KernelReport(
        name=path.stem,
        registers=number(r"Used (\d+) registers", log),
        spilled=number(r"(\d+) bytes spill stores", log),
        serialized="serialized" in log.lower(),
        register_limits_ignored="C7504" in log or "C7507" in log,
        shared=number(r"smem_scratch_bytes=(\d+)", text),
        log=log,
    )
