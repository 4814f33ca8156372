"""``python tools/triton_ptx.py FILE [--against FILE]``: as ``tools/ptx.py``, of Triton programs.

Traces operations as an H200 would and writes a digest of the PTX of each program that they launch.
Needs no GPU, but the environment of ``tools/compile.sh``.
"""

import argparse
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from mla_jax import ops
from mla_jax.cache import LatentCache
from mla_jax.config import MoEConfig
from mla_jax.pallas import triton_lib
from mla_jax.pallas.device import DeviceInfo
from mla_jax.sparse_ops import SparseScope
from mla_jax.types import BlockScaled
from tests import aot
from tests.pallas import test_pooling as pooling
from tools.ptx import code, int32, spec, stacked

SPARSE = (  # format, heads, tokens, entries of a second list
    ("bf16", 128, 512, 0), ("bf16", 16, 4, 512), ("ds_mla", 128, 512, 0), ("ds_mla", 16, 4, 512),
    ("v4", 64, 512, 512), ("v4", 128, 4, 0),
)  # fmt: skip
ROUTERS = (
    MoEConfig(method="greedy", experts=64, topk=6, width=1408, shared=2, groups=1, topk_groups=1),
    MoEConfig(
        method="noaux_tc", experts=256, topk=8, width=2048, shared=1, groups=8, topk_groups=4
    ),
)


def cases() -> Iterator[tuple[str, tuple]]:
    for tokens in (1, 16, 128, 1024, 8192):
        for limit in (None, 7.0):
            yield f"experts {tokens} {limit}", experts(tokens, limit)
            yield f"experts fp8 {tokens} {limit}", experts_fp8(tokens, limit)
        yield f"experts, then {tokens}", followed(tokens)
    for tokens in (4, 32, 64):
        for dtype in (jnp.bfloat16, jnp.float16):
            yield f"matmul fp8 {tokens} {dtype.__name__}", product_fp8(tokens, dtype)
    for case in SPARSE:
        yield "sparse " + " ".join(map(str, case)), attending(*case)
    for format in ("bf16", "fp8_e4m3"):
        for interleaved in (False, True):
            yield f"append {format} {interleaved}", appending(format, interleaved)
        yield f"append, absorbing {format}", absorbing(format)
    for format in ("bf16", "v4"):
        for ratio in (4, 128):
            call, operands = pooling.compiled_args(format, ratio)
            yield f"pooling {format} {ratio}", (call, *operands)
    for moe in ROUTERS:
        for tokens in (8, 4096):
            yield f"router {moe.method} {tokens}", routing(moe, tokens)


def experts(tokens, limit) -> tuple:
    into, back = (spec((64, *n), jnp.bfloat16) for n in ((2048, 1408), (1408, 2048)))
    run = functools.partial(ops.routed_experts, limit=limit, backend="triton")
    return run, spec((tokens, 2048), jnp.bfloat16), into, into, back, *choices(tokens)


def followed(tokens) -> tuple:
    run, x, *rest = experts(tokens, None)

    def call(x, residual, gain, *rest):
        return run(x, *rest, then=ops.AddNorm(residual, gain, 1e-6))

    return call, x, x, spec((2048,), jnp.bfloat16), *rest


def choices(tokens) -> tuple:
    return spec((tokens, 6), jnp.float32), int32((tokens, 6))


def scaled(*shape) -> BlockScaled:
    blocks = *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)
    return BlockScaled(values=spec(shape, jnp.float8_e4m3fn), scale=spec(blocks, jnp.float32))


def experts_fp8(tokens, limit) -> tuple:
    into, back = scaled(64, 1408, 2048), scaled(64, 2048, 1408)
    run = functools.partial(ops.routed_experts_fp8, limit=limit, backend="triton")
    return run, spec((tokens, 2048), jnp.bfloat16), into, into, back, *choices(tokens)


def product_fp8(tokens, dtype) -> tuple:
    run = functools.partial(ops.matmul_fp8, backend="triton")
    return run, spec((tokens, 2048), dtype), scaled(1536, 2048)


def attending(form, heads, tokens, more) -> tuple:
    caches = [stacked(form, 64, 512), *([stacked(form, 2, 8192)] if more else [])]
    q = [spec((tokens, heads, n), jnp.bfloat16) for n in (448 if form == "v4" else 512, 64)]

    def call(q, caches, slots, layer):
        extra = None
        if more:
            extra = SparseScope(cache=caches[1], slots=slots[:, :more], lengths=None, layer=layer)
        return ops.mla_sparse_decode(
            *q, caches[0], slots, scale=0.1, value=512, layer=layer, extra=extra, backend="triton"
        )

    return call, q, caches, int32((tokens, 2048)), int32(())


def appending(format, interleaved) -> tuple:
    facts = {"num_pages": 64, "page": 64, "rank": 512, "rope": 64, "format": format}
    cache = jax.eval_shape(lambda: LatentCache.alloc(**facts))
    angles = (spec((32, 32), jnp.float32),) * 2
    run = functools.partial(ops.append_latent, eps=1e-6, interleaved=interleaved, backend="triton")
    return (
        run, cache, spec((32, 16, 192), jnp.bfloat16), spec((32, 576), jnp.bfloat16),
        spec((512,), jnp.bfloat16), angles, int32((32,)),
    )  # fmt: skip


def absorbing(format) -> tuple:
    run, cache, *_ = appending(format, False)
    angles = (spec((8, 32), jnp.float32),) * 2
    up_k = spec((16, 128, 512), jnp.bfloat16)

    def call(up_k, *given):
        return run(*given, up_k=up_k)

    return (
        call, up_k, cache, spec((8, 16, 192), jnp.bfloat16), spec((8, 576), jnp.bfloat16),
        spec((512,), jnp.bfloat16), angles, int32((8,)),
    )  # fmt: skip


def routing(moe, tokens) -> tuple:
    run = functools.partial(ops.route_tokens, moe=moe, backend="triton")
    bias = spec((moe.experts,), jnp.float32) if moe.biased else None
    kernel = spec((2048, moe.experts), jnp.float32)
    return run, spec((tokens, 2048), jnp.bfloat16), kernel, bias, spec((tokens,), jnp.bool_)


def main() -> int:
    parser = argparse.ArgumentParser(description="Digests of the code of Triton programs.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    DeviceInfo.current = lambda: aot.H200
    found, made, compiled = {}, [], triton_lib.compiled

    def recorded(*a, **k):
        made.append(compiled(*a, **k))
        return made[-1]

    triton_lib.compiled = recorded
    for name, (run, *operands) in cases():
        made.clear()
        jax.eval_shape(run, *operands)
        for i, program in enumerate(made):
            digest = hashlib.sha256(code(program.asm["ptx"]).encode()).hexdigest()[:16]
            found[f"{name}: {i} {program.metadata.name}"] = digest
            print(digest, name, program.metadata.name, flush=True)
    args.file.write_text(json.dumps(found, indent=1) + "\n")
    if not args.against:
        return 0
    before = json.loads(args.against.read_text())
    other = [program for program in found if found[program] != before.get(program)]
    print(f"{len(found)} programs, {len(other)} with other code", *other, sep="\n  ")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
