"""``python tools/ptx.py FILE [--against FILE] [--only WORD] [--keep FOLDER]``

Compile Mosaic GPU kernels for an H200 and write a digest of the PTX of each: without a GPU, with
the environment of ``tools/compile.sh``. ``--against`` names the kernels whose code differs from
that of an earlier file, and the exit status is 1 if there are any.

For a change that must not touch the code of a kernel. Names of source files, lines and versions
do not count, nor does white space.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU's plugin is here, its driver need not be
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from mla_jax.cache import FORMATS, RECORD_FORMATS, CacheFormat, LatentCache, RecordCache
from mla_jax.pallas.cache_io import mosaic as cache_io
from mla_jax.pallas.dense_decode import combine_sm90, plan_sm90
from mla_jax.pallas.dense_decode import mosaic as decode
from mla_jax.pallas.dense_prefill import mosaic as prefill
from mla_jax.pallas.device import DeviceInfo
from mla_jax.sparse_ops import SparseScope, mla_sparse_decode, mla_sparse_prefill
from tests import aot
from tests.cases import GLM, V2_LITE, V3

spec = jax.ShapeDtypeStruct
int32 = functools.partial(spec, dtype=jnp.int32)
PAGES = 6000
DECODES = (  # heads, queries of a request, page, dtype, cache, changes of the tuning
    (128, 1, 64, "bfloat16", "bf16", {}),
    (128, 1, 64, "bfloat16", "fp8_e4m3", {}),
    (128, 4, 16, "bfloat16", "bf16", {"batch_invariant": True}),
    (64, 1, 128, "float16", "fp16", {}),
    (64, 3, 32, "bfloat16", "bf16", {"defer": False, "prefetch": False}),
    (64, 2, 16, "float16", "fp8_e4m3", {}),
    (64, 1, 64, "bfloat16", "fp8_e4m3", {"defer": True}),
    (16, 4, 64, "bfloat16", "bf16", {}),
    (16, 2, 128, "float16", "fp8_e4m3", {"few": False}),
    (40, 1, 32, "bfloat16", "bf16", {"early_launch": False}),
    (16, 1, 64, "bfloat16", "bf16", {}),
    (16, 1, 16, "float16", "fp16", {"batch_invariant": True}),
    (8, 1, 128, "bfloat16", "bf16", {"early_launch": False}),
    (8, 2, 32, "bfloat16", "bf16", {}),
    (16, 1, 64, "bfloat16", "fp8_e4m3", {}),
    (16, 2, 16, "float16", "fp8_e4m3", {}),
    (8, 4, 128, "bfloat16", "fp8_e4m3", {}),
    (8, 1, 64, "bfloat16", "fp8_e4m3", {}),
)
PREFILLS = (  # sizes, dtype, dtype of the result, causal, changes of the tuning
    (V3, "bfloat16", "bfloat16", True, {}),
    (V3, "bfloat16", "float32", False, {}),
    (V2_LITE, "float16", "float16", True, {"dynamic": False}),
    (GLM, "bfloat16", "bfloat16", True, {}),
    (dataclasses.replace(GLM, nope=64, v=192), "bfloat16", "float32", False, {}),
)
SPARSE = (  # format, tokens, heads, keys, entries of a second list, sinks
    ("ds_mla", 128, 128, 2048, 0, False),
    ("ds_mla", 1, 16, 2048, 0, False),
    ("bf16", 32, 128, 2048, 0, True),
    ("fp16", 32, 40, 500, 0, False),
    ("v4", 128, 64, 128, 512, True),
    ("v4", 2, 128, 100, 500, False),
)
PAGE_IO = (("bf16", "bfloat16"), ("fp8_e4m3", "bfloat16"), ("fp16", "float16"))


def cases() -> Iterator[tuple[str, tuple]]:
    """A name, and what ``aot.compile_sm90`` takes."""
    for case in DECODES:
        yield "decode " + " ".join(map(str, case)), decoding(*case)
    yield "decode 128 1 64 bfloat16 bf16 of a layer", decoding(*DECODES[0], layers=(27,))
    yield "decode 16 1 64 bfloat16 fp8_e4m3 of a layer", decoding(*DECODES[-4], layers=(27,))
    for case in PREFILLS:
        yield "prefill " + " ".join(map(str, case)), prefilling(*case)
    for case in SPARSE:
        yield "sparse " + " ".join(map(str, case)), attending(*case)
    for width in (512, 576):
        yield f"sparse prefill of {width} columns", attending_rows(width)
    for format, dtype in PAGE_IO:
        for page in (16, 64):
            yield f"gather {format} page {page}", gathering(format, dtype, page)
        yield f"write {format}", writing(format, dtype)
    for rows in (16, 128, 4096):
        yield f"combine {rows} rows", combining(rows)
    for requests in (128, 300):
        yield f"plan {requests} requests", planning(requests)


def cache_format(name: str) -> CacheFormat:
    """One of latent rows, not of records."""
    found = FORMATS[name]
    assert isinstance(found, CacheFormat), name
    return found


def decoding(heads, queries, page, dtype, format, changes, layers=()) -> tuple:
    stored, dtype = cache_format(format), jnp.dtype(dtype)
    found = decode.heuristic(heads, queries, stored.quantised, workers=132)
    tuning = dataclasses.replace(found, **changes)
    more = {"max_query_len": queries, "scale": 0.1, "out_dtype": dtype, "tuning": tuning}
    fn = functools.partial(decode.dense_decode, format=stored, **more)
    tokens = 8 * queries
    args = (
        spec((tokens, heads, 512), dtype), spec((tokens, heads, 64), dtype),
        spec((*layers, PAGES, page, 576), jnp.dtype(stored.dtype)), spec(layers, jnp.float32),
        int32((8, 40)), int32((8,)), int32((9,)),
    )  # fmt: skip
    number = int32(()) if layers else None
    return lambda i, *args: fn(*args, layer=i), number, *args


def prefilling(dims, dtype, out_dtype, causal, changes) -> tuple:
    dtype, tokens = jnp.dtype(dtype), 1024
    parts = {"nope": dims.nope, "rope": dims.rope, "v": dims.v}
    sizes = tokens, tokens, dims.heads
    found = prefill.heuristic(*sizes, requests=4, causal=causal, device=aot.H200, **parts)
    more = {"out_dtype": jnp.dtype(out_dtype), "tuning": dataclasses.replace(found, **changes)}
    fn = functools.partial(prefill.dense_prefill, scale=0.1, causal=causal, **more)
    return (
        fn, spec((tokens, dims.heads, dims.qk), dtype),
        spec((tokens, dims.heads, dims.nope + dims.v), dtype), spec((tokens, dims.rope), dtype),
        int32((5,)), int32((5,)),
    )  # fmt: skip


def attending(form, tokens, heads, keys, more, sinks) -> tuple:
    """As ``mla_sparse_decode`` calls it, in a layer of a stack."""
    dtype = jnp.float16 if form == "fp16" else jnp.bfloat16
    caches = [stacked(form, 64, 512), *([stacked(form, 2, 8192)] if more else [])]
    lists = [int32((tokens, n)) for n in (keys, more) if n]
    q = [spec((tokens, heads, n), dtype) for n in (448 if form == "v4" else 512, 64)]

    def call(q, caches, lists, layer, sinks):
        extra = None
        if more:
            extra = SparseScope(cache=caches[1], slots=lists[1], lengths=None, layer=layer)
        return mla_sparse_decode(
            *q, caches[0], lists[0], scale=0.1, value=512, layer=layer, extra=extra,
            sinks=sinks, backend="mosaic",
        )  # fmt: skip

    return call, q, caches, lists, int32(()), spec((heads,), jnp.float32) if sinks else None


def attending_rows(width) -> tuple:
    q = [spec((200, 128, n), jnp.bfloat16) for n in (width - 64, 64)]
    more = {"scale": 0.1, "value": 512, "backend": "mosaic"}
    fn = lambda q, rows, indices: mla_sparse_prefill(*q, rows, indices, **more)  # noqa: E731
    return fn, q, spec((5000, width), jnp.bfloat16), int32((200, 2048))


def stacked(form, page, pages) -> LatentCache | RecordCache:
    facts = {"num_pages": pages, "page": page, "format": form, "layers": 8}
    if form in RECORD_FORMATS:
        return jax.eval_shape(lambda: RecordCache.alloc(**facts))
    return jax.eval_shape(lambda: LatentCache.alloc(**facts, rank=512, rope=64))


def gathering(format, dtype, page) -> tuple:
    stored = cache_format(format)
    fn = functools.partial(cache_io.gather_latent, rows=5000, dtype=jnp.dtype(dtype), format=stored)
    pages = spec((PAGES, page, 576), jnp.dtype(stored.dtype)), spec((), jnp.float32)
    return fn, *pages, int32((200, 40)), int32((200,)), int32((201,))


def writing(format, dtype) -> tuple:
    stored = cache_format(format)
    fn = functools.partial(cache_io.write_latent, format=stored)
    pages = spec((PAGES, 64, 576), jnp.dtype(stored.dtype)), spec((), jnp.float32)
    rows = (spec((5000, n), jnp.dtype(dtype)) for n in (512, 64))
    return fn, *pages, *rows, int32((128,))


def combining(rows) -> tuple:
    sizes = {"heads": 16, "multiprocessors": 132, "early_launch": True}
    fn = functools.partial(combine_sm90.combine, **sizes)
    return (
        fn, spec((rows, 512), jnp.bfloat16), spec((rows,), jnp.float32),
        spec((140, 1, 64, 512), jnp.bfloat16), spec((140, 1, 64), jnp.float32),
        int32((rows // 16 + 1, 8)),
    )  # fmt: skip


def planning(requests) -> tuple:
    sizes = {"tokens": requests, "block": 64, "workers": 132, "split_cost": 16}
    fn = functools.partial(plan_sm90.balanced, **sizes)
    return fn, int32((requests,)), int32((requests + 1,))


def code(text: str) -> str:
    """PTX without what says where it comes from."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?s)\.section\s+\.debug\w+\s*\{.*?\}", "", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    other = (".loc", ".file", ".version", "$L__tmp")
    return "".join(f"{line}\n" for line in lines if line and not line.startswith(other))


def main() -> int:
    parser = argparse.ArgumentParser(description="Digests of the code of Mosaic GPU kernels.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, help="where the code itself goes")
    args = parser.parse_args()
    if why := aot.available():
        raise SystemExit(why)
    DeviceInfo.current = lambda: aot.H200
    found = {}
    for name, case in cases():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            aot.compile_sm90(*case, dump=Path(folder))
            for path in sorted(Path(folder).glob("*.ptx")):
                kernel = f"{name}: {path.stem.rsplit('_', 1)[0]}"
                text = code(path.read_text())
                found[kernel] = hashlib.sha256(text.encode()).hexdigest()[:16]
                print(found[kernel], kernel, flush=True)
                if args.keep:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    name_of_file = re.sub("[^A-Za-z0-9_]+", "-", kernel)
                    (args.keep / f"{name_of_file}.ptx").write_text(text)
    args.file.write_text(json.dumps(found, indent=1) + "\n")
    if not args.against:
        return 0
    before = json.loads(args.against.read_text())
    other = [kernel for kernel in found if found[kernel] != before.get(kernel)]
    print(f"{len(found)} kernels, {len(other)} with other code", *other, sep="\n  ")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
