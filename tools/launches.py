"""``python tools/launches.py MODEL [--batch N] [--context N] [--new N]``

What a step launches on an H200, without one: it is compiled with the environment of
``tools/compile.sh`` and read. Each request has one new token, or ``--new``. A line for each launch,
those of a loop's turn indented: ``product`` (cuBLAS), ``triton``, ``mosaic``, ``fusion``, ``copy``,
and what it writes.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU's plugin is here, its driver need not be
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np

from mla_jax.commands.fit import Settings, program
from mla_jax.model import step as steps
from mla_jax.model.presets import PRESETS
from mla_jax.model.token_history import TokenHistory
from mla_jax.pallas.device import DeviceInfo
from mla_jax.placement import Placement
from tests import aot

FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
DONE = {"fusion-done", "copy-done"}
TARGETS = {"__cublas": "product", "triton_kernel": "triton", "mosaic_gpu": "mosaic"}


def compiled(config: Any, *, batch: int, context: int, new: int = 1) -> str:
    """The program of ``batch`` requests of ``context`` tokens, as XLA has it after scheduling."""
    placement = Placement.of(aot.h200())

    class NoHistory:
        def __init__(self, rows: int, vocab: int, placement: Placement):
            def spec(x: np.ndarray) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.everywhere)

            self.now = jax.tree.map(spec, TokenHistory.zeros(rows, vocab))

    with (
        mock.patch.object(steps, "HistoryStore", NoHistory),
        mock.patch.object(DeviceInfo, "current", return_value=aot.H200),
    ):
        settings = Settings(config=config, prefill_chunk=max(batch * new, 512))
        tokens = np.full(batch, new, np.int32)
        return program(settings, placement, tokens, context=context).as_text()


def launches(text: str) -> Iterator[tuple[int, str, str]]:
    """``(depth, kind, shape of the result)`` of what the program launches, in its order."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = bodies[found[2]] = []
            entry = found[2] if found[1] else entry
        else:
            lines.append(line.strip())

    def kind(line: str, op: str) -> str:
        """Of a fusion around a call whose operand is sliced: the call's."""
        if op == "custom-call":
            return next((k for name, k in TARGETS.items() if f'target="{name}' in line), op)
        if op.startswith("fusion") and (name := re.search(r"calls=%?([\w.\-]+)", line)):
            inner = [x for x in bodies.get(name[1], ()) if "custom-call(" in x]
            return kind(inner[0], "custom-call") if inner else "fusion"
        return op.removesuffix("-start")

    def of(name: str, depth: int) -> Iterator[tuple[int, str, str]]:
        for line in bodies[name]:
            found = re.match(r"(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
            if found is None or found[2] in FREE | DONE:
                continue
            yield depth, kind(line, found[2]), found[1]
            if body := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                yield from of(body[1], depth + 1)

    yield from of(entry, 0)


def arguments(doc: str) -> argparse.ArgumentParser:
    """Those of a decode step; ``doc`` is the tool's, whose first paragraph is its usage."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n", 1)[1])
    parser.add_argument("model", choices=sorted(PRESETS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--new", type=int, default=1)
    given = parser.parse_args()
    facts = {"batch": given.batch, "context": given.context, "new": given.new}
    text = compiled(PRESETS[given.model], **facts)
    for depth, kind, shape in launches(text):
        print(f"{'    ' * depth}{kind:8} {'' if kind == 'while' else shape}")


if __name__ == "__main__":
    main()
