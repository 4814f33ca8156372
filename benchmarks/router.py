"""``python -m benchmarks.router``: the router's two launches by their tiles, alone and beside.

In a step of V3 the shared experts' products run beside the router. There its logits take 7 or 17
us, and where they take 7 the products take 11 to 14 instead of 6 (four H200, 2026-11-27): not all
their thread blocks are on the machine at once. One of each would fit into a multiprocessor, but for
its division of memory into cache and shared memory, perhaps: the driver chooses it for one kernel
alone. Above 48 KiB it should choose as much shared memory as there is, so ``--shared`` makes every
kernel ask for more than it needs.

Each row is one tile of ``logits``: microseconds of its launches in layers of other weights one
after the other, in CUDA graphs as steps are, and of a whole layer.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.random_model import block_scaled
from benchmarks.timing import device_events
from mla_jax.config import MoEConfig
from mla_jax.model.presets import PRESETS
from mla_jax.model.step import GPU_OPTIONS
from mla_jax.ops import matmul_fp8
from mla_jax.pallas import triton_lib
from mla_jax.pallas.router import kernels_triton as kernels
from mla_jax.pallas.router.triton import piece_depth
from mla_jax.types import Array, cdiv, power_of_two

MODELS = ("V3", "V4_FLASH", "V2_LITE")
LAYERS, CALLS = 16, 3


class Tile(NamedTuple):
    """Of a program of ``logits``; ``pieces``: in how many times the channels in use it is cut."""

    columns: int = 64
    depth: int = 32
    warps: int = 4
    stages: int = 3
    pieces: float = 1


TILES = (
    Tile(),
    Tile(stages=2),
    Tile(stages=8),
    Tile(depth=64, warps=8, stages=4),
    Tile(columns=32),
    Tile(columns=32, stages=8),
    Tile(columns=32, depth=64, stages=4),
    Tile(columns=32, depth=64, stages=2),
    Tile(columns=32, stages=4, pieces=2),
    Tile(columns=32, depth=64, warps=2, stages=4),
)
"""The first is in use."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.router", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=PRESETS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--cards", type=int, default=1, help="that divide the shared experts")
    parser.add_argument("--shared", nargs="*", type=int, default=[0, 50176], help="bytes, at least")
    given = parser.parse_args()
    for model in given.models:
        config = PRESETS[model]
        assert config.moe is not None
        width = config.moe.shared * config.moe.width // given.cards
        sizes = given.tokens, config.hidden, width
        weights = _weights(sizes, config.moe)
        cases = [*itertools.product(TILES, (False, True))]
        for shared in given.shared:
            with _at_least(shared), ThreadPoolExecutor() as pool:
                ready = [*pool.map(partial(_compiled, config.moe, weights), cases)]
            for (tile, beside), program in zip(cases, ready, strict=True):
                row = {"model": model, "tokens": given.tokens, "cards": given.cards}
                row |= {"shared": shared, "beside": beside, **tile._asdict()}
                print(json.dumps(row | _measured(program, weights)), flush=True)


@contextmanager
def _at_least(shared: int) -> Iterator[None]:
    """Kernels that are traced inside ask for so many bytes of shared memory, or more."""
    made = triton_lib.gpu_triton.TritonKernel

    def larger(name: str, warps: int, blocks: int, needed: int, *rest: Any) -> Any:
        return made(name, warps, blocks, max(needed, shared), *rest)

    triton_lib.gpu_triton.TritonKernel = larger
    try:
        yield
    finally:
        triton_lib.gpu_triton.TritonKernel = made


def _weights(sizes: tuple[int, int, int], moe: MoEConfig) -> tuple[Array, list[Any]]:
    """Rows, and each layer's router, bias and shared experts."""
    tokens, hidden, width = sizes

    def drawn(seed: int, *shape: int) -> Array:
        return 0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)

    def layer(i: int) -> tuple[Any, ...]:
        shared = (width, hidden), (width, hidden), (hidden, width)
        products = [block_scaled(drawn(4 * i + k, *shape)) for k, shape in enumerate(shared)]
        router = drawn(4 * i + 3, hidden, moe.experts)
        return router, jnp.zeros(moe.experts, jnp.float32), products

    return 50 * drawn(10**6, tokens, hidden).astype(jnp.bfloat16), [*map(layer, range(LAYERS))]


def _compiled(moe: MoEConfig, weights: Any, case: tuple[Tile, bool]) -> Callable[..., Array]:
    """The layers with this tile, and with the shared experts beside it or not."""
    tile, beside = case

    def run(x: Array, layers: list[Any]) -> Array:
        for router, bias, (gate, up, down) in layers:
            shares = _routed(x, router, bias, moe, tile)
            y = x + shares.sum().astype(x.dtype)  # the next layer waits for this one's choices
            if beside:
                h = jax.nn.silu(matmul_fp8(x, gate)) * matmul_fp8(x, up)
                y += matmul_fp8(h, down)
            x = y * 0.5
        return x

    return jax.jit(run).lower(*weights).compile(GPU_OPTIONS)


def _routed(x: Array, router: Array, bias: Array, moe: MoEConfig, tile: Tile) -> Array:
    """Weights of the chosen experts."""
    (tokens, hidden), experts = x.shape, moe.experts
    depth = int(piece_depth(hidden) / tile.pieces)
    pieces, tiles = cdiv(hidden, depth), cdiv(experts, tile.columns)
    biased = moe.method in ("noaux_tc", "sqrtsoftplus")
    logits = triton_lib.call(
        kernels.logits, x, router, tokens,
        out=jax.ShapeDtypeStruct((pieces, tokens, experts), jnp.float32),
        grid=cdiv(tokens, 16) * pieces * tiles, warps=tile.warps, stages=tile.stages,
        SIZES=(hidden, experts), PIECE=depth, COUNT=1, TILE=(16, tile.columns, tile.depth),
        PARTED=False,
    )  # fmt: skip
    shares, _ = triton_lib.call(
        kernels.choose, logits, bias if biased else logits, jnp.ones(tokens, bool), tokens,
        out=tuple(jax.ShapeDtypeStruct((tokens, moe.topk), t) for t in (jnp.float32, jnp.int32)),
        grid=tokens, warps=1, stages=1, SIZES=(moe.groups, experts // moe.groups, moe.topk,
        moe.topk_groups), PIECES=pieces, TILE=(power_of_two(moe.groups),
        power_of_two(experts // moe.groups)), METHOD=moe.method, BIASED=biased,
        NORMALISE=moe.normalise, SCALE=float(moe.scale),
    )  # fmt: skip
    return shares


def _measured(program: Callable[..., Array], weights: Any) -> dict[str, Any]:
    """Medians and most of each launch, and a layer's time, in microseconds."""
    for _ in range(2):
        jax.block_until_ready(program(*weights))
    with device_events() as (start, events):
        start()
        for _ in range(CALLS):
            jax.block_until_ready(program(*weights))
    each: dict[str, list[float]] = {}
    for event in events:
        each.setdefault(event["name"], []).append(event["dur"])
    row: dict[str, Any] = {}
    for name in ("logits", "choose", "matmul"):
        if found := each.get(name):
            row[name] = [round(statistics.median(found), 2), round(max(found), 2)]
    starts = [e["ts"] for e in events if e["name"] == "logits"]
    steps = [b - a for a, b in itertools.pairwise(starts)]
    return row | {"layer": round(statistics.median(steps), 2)}


if __name__ == "__main__":
    main()
