"""``python -m benchmarks.expert_chain``: layers of experts of one request, one after the other.

A step of few tokens reads each layer's weights from memory once. Calls in a loop do not: a third of
one layer's weights stay in the L2 cache. So tiles are compared here in layers of other weights,
each of which waits for the one before. Each row is one way to compute the shared experts:
microseconds from one layer's end to the next, and of its kernels.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.card_trials import PATCHES
from benchmarks.timing import device_events
from mla_jax.config import ModelConfig
from mla_jax.model import moe
from mla_jax.model.presets import PRESETS
from mla_jax.model.step import GPU_OPTIONS, UNROLLED
from mla_jax.pallas.axes import AddNorm
from mla_jax.pallas.grouped_matmul import triton
from mla_jax.types import Array

CALLS = 6
SMALL = {"rows": 16, "tail": 16, "planned": False, "group": 8}
TILES = (
    (32, 128, 4, 5, 32, 128, 4, 5),
    (32, 128, 4, 4, 32, 128, 4, 4),
    (64, 64, 4, 5, 64, 64, 4, 6),
    (16, 128, 2, 6, 16, 128, 2, 8),
)
"""Of the shared experts as an expert: columns, channels, warps and steps of gate and of down. The
first is what the heuristic gives for V2-Lite."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.expert_chain", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8, help="the first of which is real")
    given = parser.parse_args()
    config = PRESETS["V2_LITE"]
    layers = [_layer(config, i) for i in range(given.layers)]
    x = np.random.default_rng(0).standard_normal((given.tokens, config.hidden))
    real = jnp.arange(given.tokens) < 1
    inputs = [state for _, state in layers], jnp.asarray(x, jnp.bfloat16), real
    for name, patch in _cases():
        program = _compiled(layers[0][0], inputs, patch)
        print(json.dumps({"case": name, "layers": given.layers} | _measured(program, inputs)))


def _layer(config: ModelConfig, seed: int) -> tuple[Any, Any]:
    return nnx.split(moe.MoE(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(seed)))


def _cases() -> Iterator[tuple[str, Any]]:
    """Names, and what of the library is replaced."""

    def alone(experts: Any, shared: Any, *args: Any, then: AddNorm, **facts: Any) -> Any:
        del shared
        return experts.onto(then, *args, **facts)

    yield "routed experts alone", mock.patch.object(moe, "routed_and_shared", alone)
    yield "shared experts by cuBLAS", mock.patch.object(*PATCHES["shared_plain"])
    for tile in TILES:
        yield f"an expert of all, {tile}", mock.patch.object(triton, "tune", _tune(tile))


def _tune(tile: tuple[int, ...]) -> Callable[..., Any]:
    """``triton.tune``, but for one expert this tile."""
    names = (f"{p}_{k}" for p in ("gate", "down") for k in ("columns", "depth", "warps", "stages"))
    wanted, tune = triton.Tuning(**SMALL, **dict(zip(names, tile, strict=True))), triton.tune

    def found(problem: Any, device: Any) -> Any:
        usual = tune(problem, device)
        return replace(usual, value=wanted) if problem["experts"] == 1 else usual

    return found


def _compiled(graph: Any, inputs: Any, patch: Any) -> Callable[..., Any]:
    def run(layers: list[Any], x: Array, real: Array) -> tuple[Array, Array]:
        h, gain = x, jnp.ones(x.shape[1], x.dtype)
        for state in layers:
            then = AddNorm(residual=h, gain=gain, eps=1e-6)
            h, x = nnx.merge(graph, state).onto(then, x, real)
        return h, x

    jax.clear_caches()  # traced operations are kept, and know nothing of the patches
    with patch:
        lowered = jax.jit(run).trace(*inputs).lower()
    return lowered.compile(GPU_OPTIONS | UNROLLED)


def _measured(program: Callable[..., Any], inputs: Any) -> dict[str, Any]:
    for _ in range(3):
        jax.block_until_ready(program(*inputs))
    with device_events() as (start, events):
        start()
        for _ in range(CALLS):
            out = program(*inputs)
        jax.block_until_ready(out)
    found = sorted((e["ts"], e["dur"], e["name"]) for e in events)
    ends = [ts + us for ts, us, name in found if name.startswith("add_norm")]
    times: dict[str, list[float]] = {}
    for _, us, name in found:
        times.setdefault(name[:30], []).append(us)
    kernels = {name: round(statistics.median(us), 1) for name, us in times.items()}
    between = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return {"layer_us": round(between, 2), "kernels_us": kernels}


if __name__ == "__main__":
    main()
