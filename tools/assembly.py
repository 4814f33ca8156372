"""``python tools/assembly.py MODEL [--layers N] [--batch N] [--context N]``

The Triton kernels of a step on an H200, without one: compiled with the environment of
``tools/compile.sh``. Of each kernel its launch, what a thread and a thread block take, and its
assembly as kinds of instructions in their order, ``LDG4`` for four in a row: loads from memory
(LDG, LDGSTS), from and to shared memory (LDS, LDSM, STS, STSM), barriers (BAR), exchanges between
threads (SHFL, REDUX), products (HMMA, HGMMA), stores (STG), spills (STL, LDL). A kernel that loads
behind a barrier or an STS waits for memory more than once, and a small one takes little else.
"""

import itertools
import os
import re
import sys
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
from tests.pallas.experts import Report, dumped, resources
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
    taken: Report
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
        taken, sass = resources(program), dumped(program, "-sass")
        yield Kernel(name=name, launch=launch, taken=taken, order=order(sass))


def main() -> None:
    parser = launches.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    config = of_layers(PRESETS[given.model], given.layers)
    for kernel in kernels(config, batch=given.batch, context=given.context):
        print(f"{kernel.name}: {kernel.launch}\n    {kernel.taken}\n    {kernel.order}\n")


if __name__ == "__main__":
    main()
