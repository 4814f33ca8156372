"""Loops of a traced program: what XLA's CUDA graphs need to know of them.

Kernels have loops of their own, which no graph sees; they are not looked into.
"""

from collections.abc import Iterator
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mla_jax.types import Array, Int

__all__ = ["carried_conditions", "computed_zero", "nested"]

KERNELS = ("pallas_call", "core_map", "mpmd_map")
"""Operations whose programs are kernels."""

LOOPS = ("scan", "while")

COUNTED = "scan"
"""Loops whose number of turns is known before they run: XLA unrolls no others."""


def computed_zero(numbers: Int[Array, "several"]) -> Int[Array, ""]:
    """0, computed from the first of ``numbers`` so that XLA does not know it for a constant.

    A loop that counts from a constant needs a copy of it: in a CUDA graph a node of its own, which
    kernels wait for. V2-Lite, 12 layers, one request: 1,034 -> 1,029 us a step (H200).
    """
    return lax.population_count(numbers[0]) >> 6


def nested(program: ClosedJaxpr) -> bool:
    """Whether a loop stands inside another one that XLA may unroll."""
    outer = (loop for loop in _loops(program) if loop.primitive.name == COUNTED)
    return any(next(_loops(part), None) for loop in outer for part in _parts(loop))


def carried_conditions(program: ClosedJaxpr) -> int:
    """Loops whose condition is a carried value or a constant: no kernel computes it.

    In a CUDA graph, XLA of JAX 0.11.2 reads such a condition without waiting for whatever writes
    the value, and the loop may run on other memory than its own.
    """
    return sum(_is_carried(loop) for loop in _loops(program) if loop.primitive.name == "while")


def _is_carried(loop: JaxprEqn) -> bool:
    condition = loop.params["cond_jaxpr"].jaxpr
    (result,) = condition.outvars
    return not isinstance(result, Var) or all(result not in e.outvars for e in condition.eqns)


def _loops(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Every loop, those inside of loops, branches and calls too."""
    for eqn in program.eqns:
        if eqn.primitive.name in LOOPS:
            yield eqn
        if eqn.primitive.name not in KERNELS:
            for part in _parts(eqn):
                yield from _loops(part)


def _parts(eqn: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Programs among an equation's parameters: bodies, branches, conditions."""
    for value in eqn.params.values():
        several: tuple[Any, ...] = tuple(value) if isinstance(value, tuple | list) else (value,)
        yield from (x for x in several if isinstance(x, ClosedJaxpr | Jaxpr))
