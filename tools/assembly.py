"""``python tools/assembly.py MODEL [--layers N] [--batch N] [--context N]``

The Triton kernels of a step on an H200, without one: compiled with the environment of
``tools/compile.sh``. Of each kernel its launch, what a thread and a thread block take, and its
assembly as kinds of instructions in their order, ``LDG4`` for four in a row: loads from memory
(LDG, LDGSTS), from and to shared memory (LDS, LDSM, STS, STSM), barriers (BAR), exchanges between
threads (SHFL, REDUX), products (HMMA, HGMMA), stores (STG), spills (STL, LDL). A kernel that loads
behind a barrier or an STS waits for memory more than once, and a small one takes little else.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU's plugin is here, its driver need not be
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from benchmarks.random_model import of_layers
from mla_jax.model.presets import PRESETS
from tools import launches

__all__ = ["Kernel", "kernels", "order"]

KINDS = (
    "LDGSTS", "LDG", "LDSM", "LDS", "STSM", "STS", "BAR", "SHFL", "REDUX", "HMMA", "HGMMA", "STG",
    "STL", "LDL", "EXIT",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Triton kernel as a step launches it."""

    name: str
    launch: str  # its constants, warps and stages
    taken: str  # registers and spilled bytes of a thread, shared memory of a thread block
    order: str


def order(sass: str) -> str:
    """The kinds of its instructions, each with how many of them follow each other."""
    found = re.findall(rf"\b({'|'.join(KINDS)})\b", sass)
    runs = ((kind, len(list(same))) for kind, same in itertools.groupby(found))
    return " ".join(f"{kind}{count if count > 1 else ''}" for kind, count in runs)


def kernels(config: Any, *, batch: int, context: int) -> Iterator[Kernel]:
    """Each kernel of a decode step once, in the order in which the step is traced."""
    from mla_jax.pallas import triton_lib  # needs Triton

    jax.clear_caches()  # what was traced before would compile nothing again
    made: dict[tuple[str, str], Any] = {}
    compiled = triton_lib.compiled

    def kept(kernel: Any, types: Any, constants: Any, **options: Any) -> Any:
        program = compiled(kernel, types, constants, **options)
        facts = constants + tuple(options.items())
        launch = ", ".join(f"{k}={v}" for k, v in facts if v is not None)
        made[kernel.fn.__name__, launch] = program
        return program

    with mock.patch.object(triton_lib, "compiled", kept):
        launches.compiled(config, batch=batch, context=context)
    for (name, launch), program in made.items():
        sass, taken = _read(program.asm["cubin"])
        taken = f"{taken}, shared memory {program.metadata.shared}"
        yield Kernel(name=name, launch=launch, taken=taken, order=order(sass))


def _read(cubin: bytes) -> tuple[str, str]:
    """Its assembly, and what a thread takes, by the programs that Triton brings."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = {"capture_output": True, "text": True, "check": True}
        dump = knobs.nvidia.cuobjdump.path
        sass = subprocess.run([dump, "-sass", file.name], **run).stdout
        usage = subprocess.run([dump, "--dump-resource-usage", file.name], **run).stdout
    registers, stack = (re.search(rf"{key}:(\d+)", usage) for key in ("REG", "STACK"))
    assert registers and stack, usage
    return sass, f"registers {registers[1]}, spilled bytes {stack[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("model", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    given = parser.parse_args()
    config = of_layers(PRESETS[given.model], given.layers)
    for kernel in kernels(config, batch=given.batch, context=given.context):
        print(f"{kernel.name}: {kernel.launch}\n    {kernel.taken}\n    {kernel.order}\n")


if __name__ == "__main__":
    main()
