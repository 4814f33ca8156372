"""``python -m benchmarks.flat benchmarks.cards --layers 30``: a benchmark, no loop over layers.

A trial: in the programs of steps that have decodes only every layer stands by itself, with constant
addresses in the stacks of weights. No layer's small arrays are sliced out by kernels of their own,
and no number is counted. docs/log/served_step.md says what was seen of it: by itself it is not
worth it; ``card_trials`` has it beside other ways of compiling.
"""

import runpy
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from jax import lax

from mla_jax.model import stack, step

__all__ = ["layers_apart"]


@contextmanager
def layers_apart() -> Any:
    """Within it programs of decodes are compiled so; threads compile different ones."""
    run, trace, here = stack.Stack.run, step.Step.trace, threading.local()

    def traced(self: step.Step, layout: Any, caches: Any) -> Any:
        decision = jax.tree.unflatten(layout.tree, layout.shapes).decision
        here.decodes = decision.bucket.prefills == 0
        try:
            return trace(self, layout, caches)
        finally:
            here.decodes = False

    def either(self: stack.Stack, *args: Any, **kwargs: Any) -> Any:
        return (apart if getattr(here, "decodes", False) else run)(self, *args, **kwargs)

    step.Step.trace, stack.Stack.run = traced, either
    try:
        yield
    finally:
        stack.Stack.run, step.Step.trace = run, trace


def apart(self: Any, carry: Any, layer: Callable[..., Any], *, beside: Any = None) -> Any:
    """``Stack.run`` without a loop."""
    graphs, state = zip(*map(nnx.split, self.blocks), strict=True)
    beside = [None] * len(self.blocks) if beside is None else beside
    texts = {graph: jax.jit(stack._text(graph, layer)) for graph in graphs}
    number = self.period.first
    for i in range(self.period.repeats):
        rows = jax.tree.map(
            lambda leaf, i=i: lax.index_in_dim(leaf, i, keepdims=False), (state, list(beside))
        )
        for graph, *of_block in zip(graphs, *rows, strict=True):
            carry = texts[graph](*of_block, number, carry)
            number += 1
    return carry


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with layers_apart():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
