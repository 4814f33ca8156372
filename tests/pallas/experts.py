"""Inputs of routed experts, the truth about them, and Triton without a GPU."""

import importlib
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax.pallas.axes import AddNorm
from tests.cases import draw
from tests.compare import within


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of ``routed_experts`` as numpy arrays, already rounded to their dtypes."""

    x: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    weights: np.ndarray
    experts: np.ndarray

    @property
    def args(self):
        names = ("x", "gate", "up", "down", "weights", "experts")
        return tuple(jnp.asarray(getattr(self, name)) for name in names)

    @property
    def valid(self) -> np.ndarray:
        return (self.experts >= 0) & (self.experts < len(self.gate))

    def with_choices(self, experts) -> "Case":
        return replace(self, experts=np.asarray(experts, np.int32))

    def take(self, tokens) -> "Case":
        """Some of the tokens, in another order."""
        rows = {k: getattr(self, k)[tokens] for k in ("x", "weights", "experts")}
        return replace(self, **rows)

    def poisoned(self, *, unused_experts: bool = True) -> "Case":
        """NaN in every row, weight and, unless told otherwise, expert that nobody asks for.

        XLA's grouped product on a CPU multiplies every row with every expert and masks.
        """
        unused = np.setdiff1d(np.arange(len(self.gate)), self.experts[self.valid])
        leaves = {k: getattr(self, k).copy() for k in ("gate", "up", "down", "x", "weights")}
        for k in ("gate", "up", "down") if unused_experts else ():
            leaves[k][unused] = np.nan
        leaves["x"][~self.valid.any(axis=1)] = np.nan
        leaves["weights"][~self.valid] = np.nan
        return replace(self, **leaves)


def case(rng, tokens, *, experts=6, hidden=128, width=64, topk=3, dtype="bfloat16") -> Case:
    """Distinct random experts of each token."""
    choices = rng.random((tokens, experts)).argsort(axis=1)[:, :topk].astype(np.int32)
    return Case(
        x=draw(rng, tokens, hidden, dtype=dtype),
        gate=draw(rng, experts, hidden, width, dtype=dtype, std=2 * hidden**-0.5),
        up=draw(rng, experts, hidden, width, dtype=dtype, std=2 * hidden**-0.5),
        down=draw(rng, experts, width, hidden, dtype=dtype, std=width**-0.5),
        weights=rng.random((tokens, topk)).astype(np.float32),
        experts=choices,
    )


def truth(c: Case, limit=None, dtype=None) -> np.ndarray:
    """One pair at a time in float64; with ``dtype`` every product is rounded to it."""
    low = np.dtype(np.float64 if dtype is None else getattr(ml_dtypes, dtype, dtype))
    out = np.zeros(c.x.shape)

    def rounded(x):
        return x.astype(low).astype(np.float64)

    for t, k in zip(*np.nonzero(c.valid), strict=True):
        e = c.experts[t, k]
        x, gate, up, down = (a.astype(np.float64) for a in (c.x[t], c.gate[e], c.up[e], c.down[e]))
        g, u = rounded(x @ gate), rounded(x @ up)
        if limit is not None:
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        h = rounded(rounded(g / (1 + np.exp(-g))) * u)
        out[t] += float(c.weights[t, k]) * rounded(h @ down)
    return rounded(out)


def judge(got, c: Case, limit=None) -> None:
    """At most twice the error of the same products rounded to the dtype; padding is 0."""
    low = {"float32": "float32"}.get(str(c.x.dtype), str(c.x.dtype))
    got = np.asarray(got)
    assert got.dtype == c.x.dtype and got.shape == c.x.shape
    within(got, truth(c, limit), truth(c, limit, low), floor=1e-5)
    assert not got[~c.valid.any(axis=1)].astype(np.float32).any(), "padding is not 0"


def following(c: Case, rng) -> AddNorm:
    """A residual and a gain."""
    residual, gain = (draw(rng, *shape, std=3.0) for shape in (c.x.shape, c.x.shape[1:]))
    dtype = c.x.dtype
    return AddNorm(residual=jnp.asarray(residual, dtype), gain=jnp.asarray(gain, dtype), eps=1e-3)


def judge_added(got, y, then: AddNorm, order: float = 0.0) -> None:
    """The sum to a unit in the last place of what is added, the norm of that very sum to two.

    ``order``: units of the largest ``y`` by which ``y`` may differ from what was added. On a GPU,
    XLA adds up a product in another order in another program.
    """
    h, normed = (np.asarray(a) for a in got)
    assert h.dtype == normed.dtype == then.residual.dtype
    unit = float(jnp.finfo(h.dtype).eps)
    wide = [np.asarray(a).astype(np.float64) for a in (h, then.residual, y)]
    error = np.abs(wide[0] - (wide[1] + wide[2]))
    unlike = order * np.abs(wide[2]).max()
    assert (error <= unit * (np.abs(wide[1]) + np.abs(wide[2]) + unlike)).all()
    rms = np.sqrt((wide[0] ** 2).mean(axis=1, keepdims=True) + then.eps)
    want = np.asarray(then.gain).astype(np.float64) * wide[0] / rms
    np.testing.assert_allclose(normed.astype(np.float64), want, rtol=2 * unit, atol=unit)


def missing(*packages: str) -> str:
    """Why Triton's programs cannot be looked at here; empty if they can."""
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def module_of(backend: str) -> Any:
    """``mla_jax.pallas.<backend>``; None without Triton, where tests that need it are skipped."""
    return None if missing("triton") else importlib.import_module(f"mla_jax.pallas.{backend}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the assembler made of a Triton program."""

    registers: int
    stack: int  # bytes of a thread: what is spilled lies there
    shared: int  # bytes of a block


def compile_triton(kernel, constants: dict, *, dtype: str, sm: int, warps: int, stages: int):
    """Compile one of the experts' programs for a device that is not there."""
    from mla_jax.pallas import triton_lib

    kinds = dict.fromkeys(("experts", "rows", "tiles"), "*i32")
    kinds |= dict.fromkeys(("pairs", "tile_count"), "i32")
    kinds["weights"] = "*fp32"
    types = tuple(kinds.get(n, f"*{dtype}") for n in kernel.arg_names if n not in constants)
    constants = tuple(constants.items())
    return resources(
        triton_lib.compiled(kernel, types, constants, sm=sm, warps=warps, stages=stages)
    )


def resources(compiled) -> Report:
    """What the assembler says of a compiled Triton program."""
    text = dumped(compiled, "--dump-resource-usage")
    registers, stack = (int(re.search(rf"{k}:(\d+)", text)[1]) for k in ("REG", "STACK"))
    return Report(registers=registers, stack=stack, shared=compiled.metadata.shared)


def dumped(compiled, what: str) -> str:
    """What ``cuobjdump``, which Triton brings, says of a compiled program."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [tools / "cuobjdump", what, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
