"""``python -m benchmarks.kernel_parts {scores,sparse}``: what bounds two kernels.

``scores``: index scores over gathered codes, 4,096 queries on 8,192 keys, whole and with parts left
out. Their results are wrong; only the times are read.

all
    The kernel as it is.
products, sums
    One of them alone; sums read registers that hold no product.
apart
    Two of the four warpgroups multiply while the others sum: whether one slows down the other.
few sums
    An eighth of the heads is summed.
keys in shared memory
    Products read keys there, not in registers.
queries of zeros
    The same work at less power: power is the bound if it is faster.

``sparse``: sparse prefill of 4,096 tokens with 128 heads on 8,192 rows: random rows; rows, or all,
of zeros (less power); no rows (lists of -1); neighbours (lists of consecutive rows); one list for
all tokens.

``mhz``: cycles of a multiprocessor for each microsecond, over ``CHAIN`` calls and over one.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.indexer import scores_sm90
from mla_jax.pallas.indexer.scores_sm90 import F8, shared_as
from mla_jax.pallas.mosaic_inline import ir, llvm, vectors

CHAIN = 20
_multiply, _store, _sums = scores_sm90.multiply, scores_sm90.store_ranks, scores_sm90._sums


def _keep(x: Any) -> None:
    """Read one number of ``x``, so that the product is made."""

    @plgpu.inline_mgpu(arg_types=(lib.WGMMA,))
    def read(_, x):
        first = next(word for r in x.registers.flat for word in inline.words(r))
        code = "{ .reg .pred p; setp.eq.u32 p, $0, 0x7fedcba9; @p trap; }"  # a NaN of no product
        inline.asm(code, [first], "r,~{memory}")

    read(x)


def _no_sums(x: Any, *_: Any, **__: Any) -> None:
    """``store_ranks`` that stores nothing."""
    _keep(x)


def _no_product(k: Any, q: Any, *kinds: Any) -> jax.Array:
    """``multiply`` that leaves the registers of the result as they are."""
    shape = 64, q.shape[0]

    @plgpu.inline_mgpu(
        arg_types=kinds, return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=lib.WGMMA)
    )
    def leave(*_):
        zero, f32 = mgpu.WGMMAAccumulator.zero(*shape).value, ir.F32Type.get()
        left = np.empty_like(zero.registers)
        for i, register in np.ndenumerate(zero.registers):
            count = ir.VectorType(register.type).shape[0]
            words = [
                llvm.inline_asm(f32, [], "", "=f", has_side_effects=True) for _ in range(count)
            ]
            left[i] = vectors.from_elements(register.type, words)
        return mgpu.FragmentedArray(_registers=left, _layout=zero.layout, _is_signed=None)

    return leave(k, q)


def _multiply_apart(k: Any, q: Any, *kinds: Any) -> jax.Array:
    """Products of the first two warpgroups, of which nobody reads the result."""

    @pl.when(lax.axis_index("wg") < 2)
    def _():
        _keep(lib.landed(_multiply(k, q, *kinds), 0))

    return _no_product(k, q, *kinds)


def _sum_apart(*given: Any, **facts: Any) -> None:
    """Sums and stores of the last two warpgroups."""
    pl.when(lax.axis_index("wg") >= 2)(lambda: _store(*given, **facts))


class _Unloaded:
    """``plgpu``, but what is loaded stays in shared memory."""

    def __getattr__(self, name: str) -> Any:
        return (lambda ref, **_: ref) if name == "load" else getattr(plgpu, name)


def _from_shared(k: Any, q: Any, *_: Any) -> jax.Array:
    return _multiply(k, q, shared_as(F8), shared_as(F8))


def _few_sums(count: int, heads: int, *given: Any, **facts: Any) -> str:
    return _sums(count, heads // 8, *given, **facts)


PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "products": {"store_ranks": _no_sums},
    "sums": {"multiply": _no_product},
    "apart": {"multiply": _multiply_apart, "store_ranks": _sum_apart},
    "few sums": {"_sums": _few_sums},
    "keys in shared memory": {"multiply": _from_shared, "plgpu": _Unloaded()},
}
"""For each row of ``scores``: names in ``scores_sm90``, and what replaces them."""


def compiled(part: str, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """``function`` compiled with the replacements of ``part``."""
    jax.clear_caches()
    changed = PARTS[part]
    with mock.patch.multiple(scores_sm90, **changed) if changed else nullcontext():
        return jax.jit(lambda *a: function(*a)).lower(*given).compile()


def scores() -> None:
    from benchmarks import indexer

    case = next(c for c in indexer.CASES if not c.paged)
    function, given, *_ = indexer._prefill(case)
    runs = {part: (compiled(part, function, given), given) for part in PARTS}
    runs["queries of zeros"] = runs["all"][0], (jnp.zeros_like(given[0]), *given[1:])
    _show(case.name, runs)


def sparse() -> None:
    from benchmarks import sparse_prefill
    from mla_jax.ops import mla_sparse_prefill

    case = sparse_prefill.CASES[0]
    q, rows, slots = sparse_prefill._drawn(case)
    tokens, keys = slots.shape
    near = np.arange(keys) + np.arange(tokens)[:, None]

    def given(q: jax.Array, rows: jax.Array, slots: Any) -> tuple[Any, ...]:
        return q[..., :512], q[..., 512:], rows, jnp.asarray(slots, jnp.int32)

    several = {
        "random": given(q, rows, slots),
        "rows of zeros": given(q, jnp.zeros_like(rows), slots),
        "all of zeros": given(jnp.zeros_like(q), jnp.zeros_like(rows), slots),
        "no rows": given(q, rows, jnp.full_like(slots, -1)),
        "neighbours": given(q, rows, near),
        "one list": given(q, rows, jnp.broadcast_to(slots[:1], slots.shape)),
    }
    attend = functools.partial(mla_sparse_prefill, scale=sparse_prefill.SCALE, backend="mosaic")
    run = jax.jit(attend).lower(*several["random"]).compile()
    _show(case.name, {name: (run, x) for name, x in several.items()})


def _show(case: str, runs: dict[str, tuple[Any, tuple[Any, ...]]]) -> None:
    from benchmarks.timing import isolated_us, once

    timed = isolated_us({name: functools.partial(once, *run) for name, run in runs.items()})
    for name, us in timed.items():
        row = {"case": case, "part": name, "us": max(us.totals.values())}
        row |= {"mhz": [round(_mhz(*runs[name], n)) for n in (CHAIN, 1)]}
        print(json.dumps(row), flush=True)


def _mhz(run: Any, given: tuple[Any, ...], calls: int) -> float:
    jax.block_until_ready(run(*given))
    before = _clocks()
    jax.block_until_ready([run(*given) for _ in range(calls)][-1])
    after = _clocks()
    both = before.keys() & after.keys()
    cycles, ns = ([after[m][i] - before[m][i] for m in both] for i in range(2))
    return 1e3 * statistics.median(a / b for a, b in zip(cycles, ns, strict=True))


def _clocks() -> dict[int, tuple[int, int]]:
    """Of each multiprocessor its clock and the time in nanoseconds."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def read(out):  # pyright: ignore
        lane = tl.arange(0, 128)
        zero = tl.zeros([128], tl.int32)
        clock = tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1
        )
        time = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1
        )
        where = tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
        )
        at = out + 3 * tl.program_id(0) + 0 * lane
        tl.store(at, clock, mask=lane == 0)
        tl.store(at + 1, time, mask=lane == 0)
        tl.store(at + 2, where.to(tl.int64), mask=lane == 0)

    out = torch.zeros(1056, 3, dtype=torch.int64, device="cuda")
    read[(len(out),)](out)
    return {where: (clock, time) for clock, time, where in out.tolist()}


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    several = {"scores": scores, "sparse": sparse}
    parser.add_argument("kernel", choices=several)
    several[parser.parse_args().kernel]()


if __name__ == "__main__":
    main()
