"""Products of few rows through many layers of weights: microseconds a layer, cold L2, in one graph.

``python -m benchmarks.few_rows``: the kernel's own tiles, others, and XLA's norm with cuBLAS.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from mla_jax import ops
from mla_jax.model.step import GPU_OPTIONS, UNROLLED
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.pallas.few_rows import triton
from mla_jax.pallas.grouped_matmul.ref import swiglu

LAYERS, EPS = 48, 1e-6
SHAPES = {"qkv": (2048, 1600), "out": (2048,), "mlp": (2816, 2816, 2048)}
MEGABYTES = {"qkv": 14.9, "out": 8.4, "mlp": 34.6}


def by_kernel(kind, x, gain, w):
    if kind == "qkv":
        return ops.project_rows(x, w, gain=gain, eps=EPS, backend="triton")[0]
    if kind == "out":
        return ops.project_rows(x, w, onto=x, backend="triton")[0]
    (h,) = ops.project_rows(x, w[:2], gain=gain, eps=EPS, gated=True, backend="triton")
    return ops.project_rows(h, w[2:], onto=x, backend="triton")[0]


def by_xla(kind, x, gain, w):
    def dot(a, b):
        return jax.lax.dot(a, b, preferred_element_type=a.dtype)

    if kind == "out":
        return x + dot(x, w[0])
    rows = rms_norm(x, gain, eps=EPS)
    if kind == "qkv":
        y, more = dot(rows, w[0]), dot(rows, w[1])
        return y.at[:, :1].add(more[:, :1])
    return x + dot(swiglu(dot(rows, w[0]), dot(rows, w[1]), None), w[2])


def chain(kind, step, tokens, stacks):
    def run(x, gain, stacks):
        return jax.lax.scan(lambda x, w: (step(kind, x, gain, w), None), x, stacks)[0]

    x, gain = jnp.ones((tokens, 2048), jnp.bfloat16), jnp.ones((2048,), jnp.bfloat16)
    lowered = jax.jit(run, compiler_options=GPU_OPTIONS | UNROLLED).lower(x, gain, stacks)
    return lowered, x, gain


def timed(fn, x, gain, stacks) -> float:
    def seconds(n):
        y, begin = x, time.perf_counter()
        for _ in range(n):
            y = fn(x, gain, stacks)
        jax.block_until_ready(y)
        return time.perf_counter() - begin

    seconds(10)
    return 1e6 * (min(seconds(60) for _ in range(3)) - min(seconds(20) for _ in range(3))) / 40


TILES = (None, (32, 8, 32, 5), (32, 4, 64, 4), (16, 8, 64, 4), (16, 4, 64, 5), (64, 4, 64, 3))
"""Columns, groups, depth and stages; None: as the kernel chooses."""


def traced(kind, tile, tokens, stacks):
    """The program with these tiles, not compiled yet; or what is wrong with them."""
    own = triton.tile

    def chosen(tokens, into, outs, *, gated):
        columns, groups, depth, stages = tile
        depth = depth if into % (groups * depth) == 0 else 256 // groups
        return 16 if tokens <= 16 else 32, columns, groups, depth, stages

    triton.tile = own if tile in (None, "xla") else chosen
    try:
        return chain(kind, by_xla if tile == "xla" else by_kernel, tokens, stacks)
    except Exception as error:  # too much shared memory, say
        return f"{type(error).__name__}: {str(error)[:80]}"
    finally:
        triton.tile = own


def main() -> None:
    many = [int(n) for n in sys.argv[1].split(",")] if len(sys.argv) > 1 else [8, 32]
    for kind, outs in SHAPES.items():
        keys = jax.random.split(jax.random.key(0), len(outs))
        ins = (2048, 2048, 2816)
        stacks = tuple(
            0.02 * jax.random.normal(k, (LAYERS, i, n), jnp.bfloat16)
            for k, i, n in zip(keys, ins, outs, strict=False)
        )
        cases = [(n, t) for n in many for t in ("xla", *(TILES if n == many[0] else (None,)))]
        found = [traced(kind, tile, n, stacks) for n, tile in cases]
        with ThreadPoolExecutor(8) as pool:
            ready = list(pool.map(compiled, found))
        for (n, tile), each in zip(cases, ready, strict=True):
            if isinstance(each, str):
                print(kind, n, tile, each, flush=True)
                continue
            us = timed(*each, stacks) / LAYERS
            print(f"{kind} {n} {tile}: {us:.2f} us, {MEGABYTES[kind] / us:.2f} TB/s", flush=True)


def compiled(found):
    """The same, ready to run."""
    if isinstance(found, str):
        return found
    lowered, *rest = found
    try:
        return lowered.compile(), *rest
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


if __name__ == "__main__":
    main()
