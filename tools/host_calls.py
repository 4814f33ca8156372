"""``python -m tools.host_calls V3 --cards 4``: what the host calls in a step, without a GPU.

A step of decodes with the widths of a released model is compiled for H200s that are not there.
XLA then lists what its host will call: graphs, kernels, copies, sums over the cards. Calls inside
of a graph are left out; those of a loop that is in no graph stand below it, once for all turns.
Needs the environment of the compile tests (``tools/compile.sh``) and ``JAX_PLATFORMS=cpu``.
"""

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.compiling import gpu_options
from benchmarks.random_model import of_layers
from mla_jax.commands import fit
from mla_jax.model.presets import PRESETS
from mla_jax.placement import Placement
from tests import aot

DECODES, CONTEXT = 8, 8192


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.host_calls", description=__doc__)
    parser.add_argument("model", choices=PRESETS)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, of XLA")
    given = parser.parse_args()
    config = PRESETS[given.model]
    options = dict(option.split("=", 1) for option in given.option)
    settings = fit.Settings(
        config=of_layers(config, given.layers), cards=given.cards, fp8=config.fp8_block is not None
    )
    for where, calls in host_calls(settings, options).items():
        found = ", ".join(f"{n} {name}" for name, n in calls.most_common())
        print(f"{where}: {calls.total()} calls: {found}")


def host_calls(settings: fit.Settings, options: dict[str, str]) -> dict[str, Counter[str]]:
    """Calls of a step of decodes, and of a turn of each loop that is in no graph, by kind."""
    where = Placement.of(aot.h200s(settings.cards))
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with gpu_options(dump | options):
            fit.program(settings, where, np.ones(DECODES, np.int32), context=CONTEXT)
        (found,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        return _counted(found.read_text())


def _counted(listed: str) -> dict[str, Counter[str]]:
    """Of XLA's list: a call a line, indented by what it is in."""
    found: dict[str, Counter[str]] = {"the step": Counter()}
    loops, skipped = 0, None
    for line in listed.splitlines():
        call = re.match(r"( *)\d+: k(\w+)", line)
        if call is None:
            continue
        depth, kind = len(call[1]), call[2]
        if skipped is not None and depth > skipped:
            continue
        skipped = depth if kind in ("CommandBuffer", "DynamicSliceFusion", "AsyncStart") else None
        loops += kind == "While" and depth == 0
        name = f"a turn of loop {loops}" if depth else "the step"
        found.setdefault(name, Counter())[kind] += 1
    return found


if __name__ == "__main__":
    main()
