"""Measured choices: the entry of a problem, else the nearest one, else nothing.

``tuned/<device>/<op>.json`` is written by ``python -m benchmarks.tune``. A record is found if its
``exact`` features are those of the problem, and each of its ``near`` features is within a factor
of ``REACH``; of several the nearest, by the sum of the distances in octaves.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mla_jax.errors import ArgumentError
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned

__all__ = [
    "Record",
    "Table",
    "at_least_one",
    "folder_name",
    "lookup",
    "packaged",
    "read",
    "tuned",
]

REACH = 2.0
"""How far a near feature may be away, as a factor."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured problem: the fastest of at least two tunings, and what they took."""

    features: dict[str, Any]  # exact and near ones
    tuning: dict[str, Any]  # fields of the kernel's tuning object that are not the device's
    us: float  # back to back
    others: dict[str, float]  # us of what was slower, by the text of the tuning


@dataclass(frozen=True, kw_only=True)
class Table:
    """All records of one operation on one kind of device."""

    measured: str  # device, versions, date, method
    exact: tuple[str, ...]
    near: tuple[str, ...]
    records: tuple[Record, ...]

    def nearest(self, problem: Problem) -> tuple[Record, float] | None:
        """The nearest record within reach and its distance in octaves; 0 is the problem itself."""
        given = dict(problem.features)
        found = []
        for record in self.records:
            if any(given.get(k) != record.features[k] for k in self.exact):
                continue
            away = [_octaves(int(given[k]), record.features[k]) for k in self.near]
            if max(away, default=0.0) <= math.log2(REACH):
                found.append((record, sum(away)))
        return min(found, key=lambda pair: pair[1], default=None)


def lookup(problem: Problem, device: DeviceInfo) -> tuple[Record, str] | None:
    """The record to use and a sentence on its origin; None: the kernel's heuristic decides."""
    table = read(problem.op, device.kind)
    found = table.nearest(problem) if table else None
    if table is None or found is None:
        return None
    record, distance = found
    which = ", ".join(f"{k}={v}" for k, v in record.features.items())
    how = "measured" if distance == 0 else f"nearest measured ({distance:.1f} octaves)"
    fastest = f"{record.us:g} us, the fastest of {1 + len(record.others)}"
    return record, f"{how}: {which}, {fastest}; {table.measured}"


def tuned[T](
    problem: Problem, device: DeviceInfo, tuning: Callable[..., T], heuristic: Callable[[], T],
    **of_device: Any,
) -> Tuned:  # fmt: skip
    """The measured choice for a problem, or the heuristic where nothing near was measured.

    ``of_device`` are fields of the tuning that no record holds.
    """
    if found := lookup(problem, device):
        record, source = found
        return Tuned(value=tuning(**record.tuning, **of_device), source=source)
    return Tuned(value=heuristic(), source=f"heuristic: nothing near was measured on {device.kind}")


def at_least_one(what: str, **fields: object) -> None:
    """Refuse fields of a tuning that are not whole numbers from 1 on."""
    for name, value in fields.items():
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{what}: {name}", value, "a whole number, 1 or more")


def folder_name(kind: str) -> str:
    """``NVIDIA H200`` to ``nvidia_h200``."""
    return kind.lower().replace(" ", "_")


@functools.cache
def packaged(name: str, kind: str) -> dict[str, Any] | None:
    """What was measured on a kind of device, ``NVIDIA H200``; None if nothing was."""
    path = resources.files("mla_jax.pallas").joinpath("tuned", folder_name(kind), f"{name}.json")
    return json.loads(path.read_text()) if path.is_file() else None


@functools.cache
def read(op: str, kind: str) -> Table | None:
    """The packaged table of an operation on a kind of device; None if there is none."""
    if (data := packaged(op, kind)) is None:
        return None
    return Table(
        measured=data["measured"],
        exact=tuple(data["exact"]),
        near=tuple(data["near"]),
        records=tuple(Record(**record) for record in data["records"]),
    )


def _octaves(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))
