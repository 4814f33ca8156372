"""``python -m benchmarks.cache_states --trial NAME``: a decode step after other programs ran.

A step of one request has two speeds, 4 % apart. After some prompts every step is slow; after small
programs that measured the GPU every step was fast, and which of them did it is not known
(docs/log/served_step.md). One engine of ``benchmarks.serve`` serves the same number of tokens again
and again. A row has the microseconds of a step, of the first steps behind the prompt and of the
last ones. The trials:

default
    The library as it is. Once its steps are slow, each of ``resets`` is run.
written, read
    Behind each step with prompt tokens a kernel adds 1 to ``CLEARED`` bytes, or finds their
    maximum.
any other
    One of ``card_trials``, such as ``through_l1``.

With ``--turn FILE --everyone N`` N processes share the GPU, as those of ``benchmarks.run`` do: all
compile first, then they measure one after the other. Each set of processes needs a new file.
"""

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import card_trials
from benchmarks.run import turn
from benchmarks.serve import CASES, engine_of, generate, step_times
from mla_jax.engine import Engine
from mla_jax.model.step import Step

STEPS, FIRST, LAST = 100, 20, 60
RUNS, MOST = 12, 12
SLOW = 1.03
CLEARED = 2**27
SIZES = {"64 MB": 2**26, "256 MB": 2**28, "2 GB": 2**31}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cache_states", description=__doc__)
    parser.add_argument("--trial", choices=[*KINDS, *card_trials.TRIALS], default="default")
    parser.add_argument("--turn", type=Path, help="file that a process locks to use the device")
    parser.add_argument("--everyone", type=int, default=1, help="processes that share --turn")
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    with changed(given.trial):
        engine = engine_of([CASES[0]])
        generate(engine, CASES[0], 4)  # compiles what it needs
        every = resets() if given.trial == "default" else {}
        with turn(given.turn, given.everyone):
            found = [_shown(engine, given.trial, f"run {n}") for n in range(given.runs)]
            for name, reset in every.items():
                for n in range(MOST):
                    if _shown(engine, given.trial, f"before {name}, {n}") > SLOW * min(found):
                        break
                reset()
                _shown(engine, given.trial, f"after {name}")


def changed(trial: str) -> AbstractContextManager[None]:
    """Within it the library is as the trial wants it."""
    if trial in KINDS:
        return mock.patch.object(Step, "run", _cleared(KINDS[trial](CLEARED)))
    return card_trials.changed(trial)


def _cleared(clear: Callable[[], Any]) -> Callable[..., Any]:
    """``Step.run``, and that behind each step with prompt tokens."""
    run = Step.run

    def then_cleared(self: Step, caches: Any, given: Any, *rest: Any) -> Any:
        found = run(self, caches, given, *rest)
        if not getattr(given.decision, "decodes_only", False):
            clear()
        return found

    return then_cleared


def writing(size: int) -> Callable[[], Any]:
    """Adds 1 to an array of so many bytes; the device is not waited for."""
    held = [jnp.zeros(size // 2, jnp.bfloat16)]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> Any:
        held[0] = add(held[0])
        return held[0]

    jax.block_until_ready(run())
    return run


def reading(size: int) -> Callable[[], Any]:
    """Finds the maximum of so many bytes."""
    held = jnp.zeros(size // 2, jnp.bfloat16)
    most = jax.jit(jnp.max)
    jax.block_until_ready(most(held))
    return lambda: most(held)


KINDS = {"written": writing, "read": reading}


def _many_nodes() -> Callable[[], Any]:
    """A CUDA graph of 200 small kernels."""
    x = jnp.full((64, 64), 0.01)

    @jax.jit
    def run(x: Any) -> Any:
        w = x
        for _ in range(100):
            x = jnp.sin(x @ w)
        return x

    for _ in range(2):  # XLA makes the graph in the second call
        jax.block_until_ready(run(x))
    return lambda: run(x)


def _driver() -> Callable[[], Any]:
    """Lines that leave the L2 cache last become ordinary ones."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0

    def run() -> Any:
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        status = cuda.cuCtxResetPersistingL2Cache()
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        assert status == 0, status
        return ()

    return run


def resets() -> dict[str, Callable[[], Any]]:
    """What may make slow steps fast, by name."""
    every = {"nothing": lambda: (), "200 small kernels": _many_nodes()}
    if jax.default_backend() == "gpu":
        every["cuCtxResetPersistingL2Cache"] = _driver()
    for kind, make in KINDS.items():
        every |= {f"{name} {kind}": make(size) for name, size in SIZES.items()}

    def waited(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(run())

    return {name: waited(run) for name, run in every.items()}


def _shown(engine: Engine, trial: str, what: str) -> float:
    """Microseconds of the last steps of one run."""
    us, _ = step_times(CASES[0], engine, STEPS)
    first, last = statistics.mean(us[:FIRST]), statistics.mean(us[-LAST:])
    row = {"trial": trial, "what": what, "first": round(first), "last": round(last)}
    print(json.dumps(row), flush=True)
    return last


if __name__ == "__main__":
    main()
