"""Products of many rows with block-scaled e4m3 weights, rows in e4m3 too, beside DeepGEMM's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_model import block_scaled
from benchmarks.timing import isolated_us, once, waited
from mla_jax.pallas.fp8_matmul import mosaic
from mla_jax.types import BlockScaled, round_up

__all__ = ["CASES", "METHOD", "Case", "run"]

FLOPS_PER_S = 1600e12
METHOD = (
    "bf16 rows and block-scaled e4m3 weights of V3's shapes, random normal; us: summed kernel time "
    "of an isolated call of backend mosaic (kineto), rows quantised in it; product_us: its product "
    "alone; peer: DeepGEMM's fp8_gemm_nt of our quantised rows and scales; ratio: its time over "
    "product_us; bf16_us: cuBLAS's product of bf16 rows and weights; floor: FLOPs / 1600 TFLOP/s; "
    "error: to DeepGEMM's result, in parts of its root mean square"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``tokens`` rows of ``into`` channels, a weight of ``out`` columns."""

    tokens: int
    out: int
    into: int

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.into}_{self.out}"

    @property
    def floor_us(self) -> float:
        return 2e6 * self.tokens * self.out * self.into / FLOPS_PER_S


CASES = tuple(
    Case(tokens=tokens, out=out, into=into)
    for tokens in (4096, 1024)
    for out, into in ((24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (2112, 7168))
)
"""V3's query up-projection, output projection, shared expert (gate and up; down), and both of its
down-projections."""


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases."""
    if peers:
        from benchmarks import index_peers

        index_peers.load_deepgemm(peers)
    for case in (c for c in CASES if c.name in chosen):
        x, weight = _drawn(case)
        compiled = jax.jit(mosaic.matmul_fp8).lower(x, weight).compile()
        wide = jax.random.normal(jax.random.key(2), (case.into, case.out), jnp.bfloat16)
        plain = jax.jit(jnp.dot).lower(x, wide).compile()
        with turn:
            found = compiled(x, weight)
            runs = {"ours": partial(once, compiled, (x, weight))}
            runs |= {"bf16": partial(once, plain, (x, wide))}
            if peers:
                call, theirs = _deepgemm(case, x, weight)
                runs |= {"peer": call}
            times = isolated_us(runs)
        product = sum(us for name, us in times["ours"].totals.items() if "mla_fp8" in name)
        row = {
            "case": case.name,
            "us": times["ours"].sum,
            "span_us": times["ours"].span,
            "product_us": product,
            "bf16_us": times["bf16"].sum,
            "floor_us": case.floor_us,
            "kernels": times["ours"].totals,
        }
        if peers:
            want = theirs.float().cpu().numpy()
            off = np.asarray(found, np.float32) - want
            row |= {
                "peer_us": times["peer"].sum,
                "ratio": times["peer"].sum / product,
                "error": float(np.sqrt((off**2).mean() / (want**2).mean())),
                "peer_kernels": times["peer"].totals,
            }
        print(row, flush=True)
        yield row


def _drawn(case: Case) -> tuple[jax.Array, BlockScaled]:
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (case.tokens, case.into), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.out, case.into), jnp.float32)
    return x, block_scaled(w)


def _deepgemm(case: Case, x: jax.Array, weight: BlockScaled):
    """``(a timed call, its result)``."""
    import deep_gemm
    import torch

    from benchmarks.index_peers import as_torch

    room = round_up(case.tokens, 8)
    rows, scales = jax.jit(partial(mosaic.quantise, room=room))(x)
    given = (as_torch(rows)[: case.tokens], as_torch(scales)[:, : case.tokens].T)
    weights = as_torch(weight.values), as_torch(weight.scale)
    out = torch.empty(case.tokens, case.out, dtype=torch.bfloat16, device="cuda")

    call = partial(waited, partial(deep_gemm.fp8_gemm_nt, given, weights, out))
    call()
    return call, out
