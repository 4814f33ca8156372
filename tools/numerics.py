"""Error of every operation against float64: ``python -m tools.numerics [--out FILE]``.

Inputs have fixed seeds and the widths of real models. Truth is float64 of the numbers that an
operation is given; where these are codes with scales, also float64 of what they were made from.
``docs/numerics.md`` prints the files of ``benchmarks/results/*_numerics_*.json``.
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax import ops
from mla_jax.cache import FORMATS, RECORD_FORMATS, LatentCache, RecordCache
from mla_jax.config import MoEConfig
from mla_jax.errors import UnsupportedError
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.ops import REGISTRY, gather_rows, write_rows
from mla_jax.pallas.indexer.ref import quantise_queries
from mla_jax.types import AttnState, BlockScaled
from tests.cases import V2_LITE, V3, draw, starts
from tests.compare import attention
from tests.pallas.experts import case, truth

__all__ = ["Row", "measure"]

F64 = np.float64

METHOD = (
    "Fixed seeds, normal numbers. Largest: the largest error over the largest magnitude of the "
    "truth; rms: of all errors over that of the truth. Truth: float64 of the values that the "
    "operation is given (stored), or of those that were quantised for it (original)."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation on one kind of input, by one backend."""

    op: str
    dtype: str  # of queries or rows
    stored: str  # format of the cache, or dtype of weights
    backend: str
    largest: float | None = None  # None: only what was quantised is compared
    rms: float | None = None
    original_largest: float | None = None  # None: nothing was quantised
    original_rms: float | None = None
    lse: float | None = None  # largest absolute error; None: there is none

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What is measured."""
        return self.op, self.dtype, self.stored, self.backend


def error(got, wanted) -> tuple[float, float]:
    """Largest error over largest magnitude, and the same of root mean squares."""
    got, wanted = (np.asarray(x).astype(F64) for x in (got, wanted))
    off = np.abs(got - wanted)
    rms = np.sqrt((off**2).mean() / (wanted**2).mean())
    return float(off.max() / np.abs(wanted).max()), float(rms)


def row(op, backend, dtype, stored, got, wanted, original=None, lse=None) -> Row:
    """Of a result against one truth or two; ``lse`` are the one given and the true one."""
    largest, rms = (None, None) if wanted is None else error(got, wanted)
    of_original = (None, None) if original is None else error(got, original)
    return Row(
        op=op, dtype=dtype, stored=stored, backend=backend, largest=largest, rms=rms,
        original_largest=of_original[0], original_rms=of_original[1],
        lse=None if lse is None else float(np.abs(np.asarray(lse[0], F64) - lse[1]).max()),
    )  # fmt: skip


def backends(name: str, *args, **kwargs) -> Iterator[tuple[str, object]]:
    """``(backend, result)`` of every backend of an operation that takes these arguments here."""
    op = getattr(ops, name)
    for backend in REGISTRY.of(name):
        call = functools.partial(op, **kwargs, backend=backend.name)
        try:
            yield backend.name, jax.jit(call)(*args)
        except UnsupportedError:
            continue


def written(rng, lens, *, dims, dtype, form, page=64):
    """``(cache, page table, originals, stored)`` of sequences over shuffled pages, in float64."""
    width = max(-(-n // page) for n in lens)
    ids = rng.permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width)
    pages = {"num_pages": ids.size, "page": page, "format": form}
    if form in RECORD_FORMATS:
        cache = RecordCache.alloc(**pages)
    else:
        scale = 1 / 64 if FORMATS[form].quantised else 1.0
        cache = LatentCache.alloc(**pages, rank=dims.rank, rope=dims.rope, scale=scale)
    originals, stored = [], []
    for r, n in enumerate(lens):
        x = draw(rng, n, dims.row, dtype=dtype)
        p = np.arange(n)
        slots = jnp.asarray(ids[r, p // page] * page + p % page)
        parts = tuple(jnp.asarray(v) for v in np.split(x, [dims.rank], axis=1))
        cache = write_rows(cache, parts, slots)
        originals.append(x.astype(F64))
        stored.append(np.asarray(gather_rows(cache, slots, dtype=jnp.float32), F64))
    return cache, ids, originals, stored


def quantises(form: str) -> bool:
    """Whether a cache of this format stores codes with scales."""
    return form in RECORD_FORMATS or FORMATS[form].quantised


def attended(q: np.ndarray, rows: list, *, value: int, scale: float):
    """``(out, lse)`` of each query over rows of its own, in float64."""
    return of_requests([
        attention(q[t : t + 1], k, k[:, :value], np.ones((1, len(k)), bool), scale=scale)
        for t, k in enumerate(rows)
    ])  # fmt: skip


def of_requests(parts: list) -> tuple[np.ndarray, np.ndarray]:
    out, lse = zip(*parts, strict=True)
    return np.concatenate(out), np.concatenate(lse)


def decode() -> Iterator[Row]:
    lens, dims = [130, 700, 64, 1], V2_LITE
    scale = dims.qk**-0.5
    for dtype, form in (
        ("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"),
        ("bfloat16", "fp8_e4m3"), ("float16", "fp8_e4m3"),
    ):  # fmt: skip
        rng = np.random.default_rng(1)
        cache, ids, originals, stored = written(rng, lens, dims=dims, dtype=dtype, form=form)
        q = draw(rng, len(lens), dims.heads, dims.row, dtype=dtype)
        meta = DecodeMetadata(
            max_query_len=1,
            page_table=jnp.asarray(ids),
            seq_lens=jnp.asarray(lens, jnp.int32),
            query_starts=jnp.arange(len(lens) + 1, dtype=jnp.int32),
        )

        true = functools.partial(attended, q, value=dims.rank, scale=scale)
        wanted, lse = true(stored)
        original = true(originals)[0] if quantises(form) else None
        given = jnp.asarray(q[..., : dims.rank]), jnp.asarray(q[..., dims.rank :])
        for backend, state in backends("mla_decode", *given, cache, meta, scale=scale):
            facts = backend, dtype, form, state.out, wanted, original, (state.lse, lse)
            yield row("mla_decode", *facts)


def prefill() -> Iterator[Row]:
    lens, dims = [130, 300, 1], V2_LITE
    scale = dims.qk**-0.5
    at = starts(lens)
    for dtype in ("float32", "bfloat16", "float16"):
        rng = np.random.default_rng(2)
        q = draw(rng, at[-1], dims.heads, dims.qk, dtype=dtype)
        kv = draw(rng, at[-1], dims.heads, dims.nope + dims.v, dtype=dtype)
        rope = draw(rng, at[-1], dims.rope, dtype=dtype)
        shared = np.broadcast_to(rope[:, None], (at[-1], dims.heads, dims.rope))
        k = np.concatenate([kv[..., : dims.nope], shared], axis=-1)
        wanted, lse = of_requests([
            attention(q[a:b], k[a:b], kv[a:b, :, dims.nope :], np.tri(b - a, dtype=bool),
                      scale=scale)
            for a, b in itertools.pairwise(at)
        ])  # fmt: skip
        meta = PrefillMetadata(query_starts=jnp.asarray(at), key_starts=jnp.asarray(at))
        given = *map(jnp.asarray, (q, kv, rope)), meta
        for backend, state in backends("mla_prefill", *given, scale=scale):
            yield row("mla_prefill", backend, dtype, dtype, state.out, wanted, lse=(state.lse, lse))


def sparse() -> Iterator[Row]:
    v4 = replace(V3, rank=448)
    for dtype, form, dims in (
        ("float32", "fp32", V3), ("bfloat16", "bf16", V3), ("bfloat16", "ds_mla", V3),
        ("bfloat16", "v4", v4),
    ):  # fmt: skip
        rng, tokens, heads, keys = np.random.default_rng(3), 3, 16, 300
        cache, ids, (x,), (kept,) = written(rng, [512], dims=dims, dtype=dtype, form=form)
        p = np.stack([rng.permutation(512)[:keys] for _ in range(tokens)])
        slots = ids[0, p // 64] * 64 + p % 64
        q = draw(rng, tokens, heads, dims.row, dtype=dtype)
        value, scale = dims.row if form == "v4" else dims.rank, dims.qk**-0.5

        def true(rows, p=p, q=q, value=value, scale=scale):
            return attended(q, [rows[at] for at in p], value=value, scale=scale)

        wanted, lse = true(kept)
        original = true(x)[0] if quantises(form) else None
        given = (
            jnp.asarray(q[..., : dims.rank]), jnp.asarray(q[..., dims.rank :]), cache,
            jnp.asarray(slots, jnp.int32),
        )  # fmt: skip
        for backend, state in backends("mla_sparse_decode", *given, scale=scale, value=value):
            facts = backend, dtype, form, state.out, wanted, original, (state.lse, lse)
            yield row("mla_sparse_decode", *facts)


def merge() -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng(4)
        parts = [(draw(rng, 8, 16, 128, dtype=dtype), draw(rng, 8, 16, std=3.0)) for _ in range(5)]
        lses = np.stack([lse for _, lse in parts]).astype(F64)
        lse = np.log(np.exp(lses).sum(0))
        outs = np.stack([out for out, _ in parts]).astype(F64)
        wanted = (np.exp(lses - lse)[..., None] * outs).sum(0)
        states = [AttnState(out=jnp.asarray(o), lse=jnp.asarray(x)) for o, x in parts]
        for backend, got in backends("merge_attn_states", *states):
            yield row(
                "merge_attn_states", backend, dtype, dtype, got.out, wanted, lse=(got.lse, lse)
            )


def append() -> Iterator[Row]:
    """Stored rows: the latent after its norm, the rotary key after its rotation."""
    rank, rope, tokens, eps = 512, 64, 40, 1e-6
    for dtype, form in (("float32", "fp32"), ("bfloat16", "bf16"), ("bfloat16", "fp8_e4m3")):
        rng = np.random.default_rng(5)
        q, kv = draw(rng, tokens, 4, 192, dtype=dtype), draw(rng, tokens, rank + rope, dtype=dtype)
        gain, angle = draw(rng, rank, dtype=dtype), rng.uniform(-3, 3, (tokens, rope // 2))
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        x, key = kv[:, :rank].astype(F64), kv[:, rank:].astype(F64)
        latent = gain.astype(F64) * x / np.sqrt((x**2).mean(1, keepdims=True) + eps)
        a, b = key[:, 0::2], key[:, 1::2]
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(key.shape)
        wanted = np.concatenate([latent, turned], axis=1)
        scale = 1 / 32 if FORMATS[form].quantised else 1.0  # up to 14 is not clamped
        cache = LatentCache.alloc(
            num_pages=1, page=64, rank=rank, rope=rope, format=form, scale=scale
        )
        slots = jnp.arange(tokens, dtype=jnp.int32)
        given = cache, *map(jnp.asarray, (q, kv, gain)), (jnp.asarray(cos), jnp.asarray(sin)), slots
        for backend, (_, _, after) in backends("append_latent", *given, eps=eps, interleaved=True):
            rows = gather_rows(after, slots, dtype=jnp.float32)
            both = (None, wanted) if FORMATS[form].quantised else (wanted, None)
            yield row("append_latent", backend, dtype, form, rows, *both)


def formats() -> Iterator[Row]:
    """What a cache gives back of what was written to it."""
    for form, dims in (
        ("fp8_e4m3", V3), ("ds_mla", V3), ("v4", replace(V3, rank=448)),
        ("index_key", replace(V3, rank=128, rope=0)),
    ):  # fmt: skip
        rng = np.random.default_rng(6)
        if form == "index_key":
            cache = RecordCache.alloc(num_pages=4, page=64, format=form)
            x, slots = draw(rng, 200, 128, dtype="bfloat16"), jnp.arange(200, dtype=jnp.int32)
            cache = write_rows(cache, (jnp.asarray(x),), slots)
            stored = gather_rows(cache, slots, dtype=jnp.float32)
        else:
            *_, (x,), (stored,) = written(rng, [200], dims=dims, dtype="bfloat16", form=form)
        yield row("write_rows, gather_rows", "xla", "bfloat16", form, stored, None, x)


def quantised(w: np.ndarray) -> BlockScaled:
    """A weight ``[..., out, in]`` as published: amax / 448 of each block of 128 x 128."""
    *lead, out, into = w.shape
    blocks = w.reshape(*lead, out // 128, 128, into // 128, 128)
    scale = (np.abs(blocks).max(axis=(-3, -1)) / 448).astype(np.float32)
    codes = blocks / scale[..., :, None, :, None]
    codes = codes.reshape(w.shape).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return BlockScaled(values=jnp.asarray(codes), scale=jnp.asarray(scale))


def wide(w: BlockScaled) -> np.ndarray:
    scale = np.asarray(w.scale, F64).repeat(128, axis=-2).repeat(128, axis=-1)
    return np.asarray(w.values).astype(F64) * scale


FORMS = {False: "e4m3, 128 x 128", True: "the same, rows e4m3 too"}
"""What is stored, by ``quantise_rows``."""


def products() -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng(7)
        w = rng.normal(size=(256, 512)) * 512**-0.5
        x, given = draw(rng, 17, 512, dtype=dtype), quantised(w)
        wanted, original = x.astype(F64) @ wide(given).T, x.astype(F64) @ w.T
        for flag, form in FORMS.items():
            for backend, got in backends("matmul_fp8", jnp.asarray(x), given, quantise_rows=flag):
                yield row("matmul_fp8", backend, dtype, form, got, wanted, original)


def experts() -> Iterator[Row]:
    for dtype in ("float32", "bfloat16", "float16"):
        c = case(np.random.default_rng(8), 17, hidden=256, width=128, dtype=dtype)
        for backend, got in backends("routed_experts", *c.args):
            yield row("routed_experts", backend, dtype, dtype, got, truth(c))
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng(9)
        c = case(rng, 17, hidden=256, width=128, dtype=dtype)
        exact = {k: getattr(c, k).astype(F64).swapaxes(1, 2) for k in ("gate", "up", "down")}
        coded = {k: quantised(w) for k, w in exact.items()}
        seen = replace(c, **{k: wide(w).swapaxes(1, 2) for k, w in coded.items()})
        given = (
            jnp.asarray(c.x), *coded.values(), jnp.asarray(c.weights), jnp.asarray(c.experts)
        )  # fmt: skip
        for flag, form in FORMS.items():
            for backend, got in backends("routed_experts_fp8", *given, quantise_rows=flag):
                facts = backend, dtype, form, got, truth(seen), truth(c)
                yield row("routed_experts_fp8", *facts)


def router() -> Iterator[Row]:
    """Weights of the chosen experts, whose choice equals float64's."""
    moe = MoEConfig(
        experts=256, topk=8, width=8, shared=1, method="noaux_tc", groups=8, topk_groups=8,
        normalise=True, scale=2.5,
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng(10)
        x, kernel = draw(rng, 40, 512, dtype=dtype), draw(rng, 512, 256, std=2 * 512**-0.5)
        bias = draw(rng, 256, std=0.3)
        s = 1 / (1 + np.exp(-(x.astype(F64) @ kernel.astype(F64))))
        given = *map(jnp.asarray, (x, kernel, bias)), jnp.ones(40, bool)
        for backend, (weights, chosen) in backends("route_tokens", *given, moe=moe):
            best = np.take_along_axis(s, np.asarray(chosen), axis=1)
            wanted = moe.scale * best / best.sum(1, keepdims=True)
            yield row("route_tokens", backend, dtype, "float32", weights, wanted)


def scores() -> Iterator[Row]:
    """Scores of the indexer: of values as they are, and of codes of queries and of keys."""
    rng = np.random.default_rng(11)
    q, k = draw(rng, 5, 64, 128, dtype="bfloat16"), draw(rng, 300, 128, dtype="bfloat16")
    w = draw(rng, 5, 64)

    def true(q, w, k):
        dots = np.einsum("qhd,kd->qhk", np.asarray(q).astype(F64), np.asarray(k).astype(F64))
        return np.einsum("qhk,qh->qk", np.maximum(dots, 0), np.asarray(w).astype(F64))

    original = true(q, w, k)
    for backend, got in backends("indexer_logits", *map(jnp.asarray, (q, w, k))):
        yield row("indexer_logits", backend, "bfloat16", "bfloat16", got, original)
    cache = RecordCache.alloc(num_pages=5, page=64, format="index_key")
    slots = jnp.arange(300, dtype=jnp.int32)
    cache = write_rows(cache, (jnp.asarray(k),), slots)
    keys = gather_rows(cache, slots, dtype=jnp.float32)
    codes, weights = quantise_queries(jnp.asarray(q), jnp.asarray(w))
    codes = codes.astype(jnp.float32)
    for backend, got in backends("indexer_logits", codes, weights, keys):
        wanted = true(codes, weights, keys)
        yield row("indexer_logits", backend, "e4m3", "index_key", got, wanted, original)


MEASURED: tuple[Callable[[], Iterator[Row]], ...] = (
    decode, prefill, sparse, merge, append, formats, products, experts, router, scores,
)  # fmt: skip


def measure() -> list[Row]:
    """All rows that this device can give."""
    return [found for part in MEASURED for found in part()]


def _figure(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"


def main(given: list[str] | None = None) -> int:
    """The command; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m tools.numerics", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    args = parser.parse_args(given)
    device = jax.devices()[0]
    name = device.device_kind if device.platform == "gpu" else "CPU"
    rows = measure()
    for r in rows:
        figures = (r.largest, r.rms, r.original_largest, r.original_rms, r.lse)
        print(*r.key, *(_figure(x) or "-" for x in figures))
    found = {
        "device": name,
        "versions": {k: importlib.metadata.version(k) for k in ("jax", "jaxlib")},
        "date": str(datetime.date.today()),
        "method": METHOD,
        "rows": [asdict(r) for r in rows],
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
