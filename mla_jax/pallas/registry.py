"""Which backend runs a problem: requirements are data, the choice is a pure function.

A problem is made of shapes and dtypes only, so choice, tuning and documentation share one
key, and the choice happens while tracing: the same problem on the same device always runs
the same backend. An explicit name means that backend or an error.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from mla_jax.errors import ArgumentError, UnsupportedError, shown
from mla_jax.pallas.device import DeviceInfo

__all__ = ["Backend", "OneOf", "Problem", "Registry", "Requirement", "Tuned", "Within", "differing"]

type Feature = str | int | bool


@dataclass(frozen=True)
class Problem:
    """One call of an operation, as shapes and dtypes: ``Problem.of("mla_decode", page=64)``."""

    op: str
    features: tuple[tuple[str, Feature], ...]  # in the order given

    @classmethod
    def of(cls, op: str, **features: Feature) -> "Problem":
        return cls(op, tuple(features.items()))

    def __getitem__(self, name: str) -> Feature:
        return dict(self.features)[name]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in self.features)})"


@dataclass(frozen=True)
class OneOf:
    """A finite set of values: ``OneOf(64, 128)``."""

    values: tuple[Feature, ...]

    def __init__(self, *values: Feature):
        object.__setattr__(self, "values", values)

    def __contains__(self, value: Feature) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"


@dataclass(frozen=True, kw_only=True)
class Within:
    """Integers from ``low`` to ``high``, both included, that are multiples of ``multiple``."""

    low: int = 1
    high: int | None = None
    multiple: int = 1

    def __contains__(self, value: Feature) -> bool:
        n = int(value)
        return self.low <= n and (self.high is None or n <= self.high) and n % self.multiple == 0

    def __str__(self) -> str:
        span = f"[{self.low}, {'…' if self.high is None else self.high}]"
        return span if self.multiple == 1 else f"{span} multiples of {self.multiple}"


type Allowed = OneOf | Within


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a backend needs. A feature that is not named may have any value.

    A name ``a+b`` stands for the values of both features, joined in the same way.
    """

    features: Mapping[str, Allowed] = MappingProxyType({})
    sm: Allowed | None = None  # compute capabilities; None = any device
    workers: bool = False  # has a thread block for each multiprocessor: how many must be known
    packages: tuple[str, ...] = ()  # import names of optional packages

    def missing(self, problem: Problem, device: DeviceInfo) -> tuple[str, ...]:
        """Every reason why the problem cannot run; empty if it can."""
        given = dict(problem.features)
        for joint in (name for name in self.features if "+" in name):
            given[joint] = "+".join(str(given.get(part)) for part in joint.split("+"))
        wrong = [
            f"{name}={given.get(name)} not in {allowed}"
            for name, allowed in self.features.items()
            if name not in given or given[name] not in allowed
        ]
        return (*wrong, *self.missing_here(device))

    def missing_here(self, device: DeviceInfo) -> tuple[str, ...]:
        """Every reason why no problem can run; empty if some can."""
        wrong = []
        if self.sm is not None and device.sm not in self.sm:
            wrong.append(f"device {device.name}, needs {self.device_text()}")
        elif self.workers and device.sms < 1:
            wrong.append(f"device {device.kind}: the number of its multiprocessors is unknown")
        wrong += [f"package {p} is not installed" for p in self.packages if not find_spec(p)]
        return tuple(wrong)

    def device_text(self) -> str:
        """``any``, ``sm90`` or ``sm80 or newer``."""
        match self.sm:
            case None:
                return "any"
            case OneOf(values):
                return " or ".join(f"sm{v}" for v in values)
            case Within(low=low, high=None):
                return f"sm{low} or newer"
            case other:
                return f"sm in {other}"

    def features_text(self) -> str:
        """``page in {64, 128}; rank in {512}``, or ``nothing``."""
        return "; ".join(f"{k} in {v}" for k, v in self.features.items()) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuning object and where it comes from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Backend:
    """One implementation of one operation: what it needs, and the function that runs it.

    The function is given itself or as an entry point, ``"package.module:function"``, whose module
    is imported when the backend is first chosen: Mosaic GPU takes more than a second to import, and
    Triton need not be installed. The module of a ``tunable`` one has ``Tuning``, ``tune`` and
    perhaps ``make_plan`` too.
    """

    op: str
    name: str
    function: Callable[..., Any] | str
    requirement: Requirement = field(default_factory=Requirement)
    _: KW_ONLY
    tunable: bool = False

    @functools.cached_property
    def _module(self) -> ModuleType:
        where = self.function
        name = where.partition(":")[0] if isinstance(where, str) else where.__module__
        return importlib.import_module(name)

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """The function."""
        if not isinstance(self.function, str):
            return self.function
        return getattr(self._module, self.function.partition(":")[2])

    @property
    def tuning(self) -> type | None:
        """The class of its tuning object; None = nothing to tune."""
        return self._module.Tuning if self.tunable else None

    @property
    def tune(self) -> Callable[[Problem, DeviceInfo], Tuned] | None:
        """The choice of a tuning object; None = nothing to tune."""
        return self._module.tune if self.tunable else None

    @property
    def plan(self) -> Callable[..., Any] | None:
        """Makes what calls of one step share; None = nothing."""
        return getattr(self._module, "make_plan", None) if self.tunable else None


def differing(given: Any, allowed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields in which two dataclasses of one class differ, of each of them."""
    a, b = asdict(given), asdict(allowed)
    names = [name for name in a if a[name] != b[name]]
    return {name: a[name] for name in names}, {name: b[name] for name in names}


@dataclass(frozen=True)
class Registry:
    """All backends. Of one operation's backends, an earlier one is preferred."""

    backends: tuple[Backend, ...]

    def __post_init__(self):
        names = [(b.op, b.name) for b in self.backends]
        twice = sorted({f"{op}[{name}]" for op, name in names if names.count((op, name)) > 1})
        if twice:
            raise ArgumentError("Registry: backends given twice", ", ".join(twice), "each one once")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a caller may ask for, of whichever operation."""
        return tuple(dict.fromkeys(b.name for b in self.backends))

    def of(self, op: str) -> tuple[Backend, ...]:
        """Backends of an operation in order of preference."""
        return tuple(b for b in self.backends if b.op == op)

    def choose(self, problem: Problem, device: DeviceInfo, backend: str | None = None) -> Backend:
        """The first backend that qualifies, or the named one.

        Raises:
            UnsupportedError: the named backend, or every backend, lacks something.
        """
        known = self.of(problem.op)
        lacks = {b.name: b.requirement.missing(problem, device) for b in known}
        qualified = [b for b in known if not lacks[b.name]]
        accept = tuple(b.name for b in qualified)
        if backend is None:
            if qualified:
                return qualified[0]
            reasons = [f"{name}: {', '.join(why)}" for name, why in lacks.items()]
            raise UnsupportedError(problem.op, None, reasons or ["no such operation"])
        if not isinstance(backend, str) or backend not in lacks:
            names = ", ".join(lacks) or "none"
            why = f"no backend of this name (registered: {names})"
            raise UnsupportedError(problem.op, shown(backend), [why], accept)
        if lacks[backend]:
            raise UnsupportedError(problem.op, backend, lacks[backend], accept)
        return next(b for b in known if b.name == backend)

    def explain(self, problem: Problem, device: DeviceInfo, backend: str | None = None) -> str:
        """The problem, the verdict on every backend in order of preference, and the choice."""
        lines = [f"{problem} on {device.name} ({device.kind})"]
        for b in self.of(problem.op):
            why = "; ".join(b.requirement.missing(problem, device))
            lines.append(f"  {b.name}: {'refused: ' + why if why else 'accepted'}")
        try:
            chosen = self.choose(problem, device, backend)
            lines.append(f"runs {chosen.name}")
            if chosen.tune is not None:
                found = chosen.tune(problem, device)
                lines.append(f"  {found.value}\n  {found.source}")
        except UnsupportedError as error:
            lines.append(f"refused: {error}")
        return "\n".join(lines)

    def support_matrix(self) -> str:
        """Every backend and what it requires, as a Markdown table."""
        lines = [
            "| operation | backend | device | requires | packages |",
            "|---|---|---|---|---|",
        ]
        for b in self.backends:
            r = b.requirement
            packages = ", ".join(f"`{p}`" for p in r.packages) or "none"
            cells = (
                f"`{b.op}`",
                f"`{b.name}`",
                r.device_text(),
                r.features_text(),
                packages,
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"
