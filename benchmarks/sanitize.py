"""``tools/sanitize.sh -m benchmarks.sanitize [PART...]``: small cases of every kernel.

Each case is compared with the reference. Those of decode and prefill run on the CPU: under a
sanitizer XLA compiles them for a GPU so slowly that its alarm goes off, and the process with it.
Parts: decode, quantised (decode over e4m3), prefill, cache, stack (a layer of a stacked cache),
sparse, steps (V4's new rows and states).
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode, v4_step
from mla_jax.cache import LatentCache, RecordCache, SparseScope
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.ops import (
    gather_latent,
    mla_decode,
    mla_prefill,
    mla_sparse_decode,
    write_latent,
    write_rows,
)

DECODE = (  # requests, queries, heads, keys: pieces of one block and of several, idle tiles, chains
    (3, 1, 16, 700),
    (2, 2, 128, 1000),
    (1, 1, 8, 6000),
    (1, 1, 128, 3000),
    (140, 1, 64, 65),
)
QUANTISED = ((3, 2, 16, 200), (3, 1, 64, 200))
PREFILL = (  # queries, keys, causal: one tile, several, none, padding behind all
    ((300, 17, 0, 129), (300, 17, 0, 129), True),
    ((5, 70, 61), (133, 200, 0), False),
)
RANK, ROPE, NOPE, V = 512, 64, 128, 128


def on_host():
    """Where the references run, and the arrays are drawn."""
    return jax.default_device(jax.devices("cpu")[0])


def run_decode(cases=DECODE, format: str = "bf16") -> None:
    """Plan, kernel and merge, by both plans."""
    for sizes in cases:
        for changes in ((), (("batch_invariant", True), ("chunk", 3))):
            case = decode.Case(*sizes, tuning=changes, format=format)
            with on_host():
                q, args = decode.inputs(case, *decode.random_arrays(case))
            given = jax.device_put(args, jax.devices()[0])
            plan = jax.jit(lambda *a, case=case: decode.plan_of(case, *a))(*given[4:])
            state = jax.jit(lambda *a, case=case: decode.attend(case, *a))(*given, plan)
            state = jax.device_put(state, jax.devices("cpu")[0])
            with on_host():
                reference = jax.jit(functools.partial(decode.reference, case))
                error = decode.error_of(case, reference, q, args, state)
            print(f"{case.name}: error {error:.1e}", flush=True)


def run_prefill() -> None:
    """Three padding rows behind all requests."""
    for queries, keys, causal in PREFILL:
        with on_host():
            qs, ks = (jnp.asarray(np.cumsum([0, *n]), jnp.int32) for n in (queries, keys))
            shapes = ((sum(queries) + 3, 2, NOPE + ROPE), (sum(keys) + 3, 2, NOPE + V))
            shapes = *shapes, (sum(keys) + 3, ROPE)
            draw = zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
            args = [jax.random.normal(k, s, jnp.bfloat16) for k, s in draw]
        args = *args, PrefillMetadata(query_starts=qs, key_starts=ks)
        attend = functools.partial(mla_prefill, scale=0.07, causal=causal, out_dtype=jnp.float32)
        found = []
        for backend, device in (("mosaic", jax.devices()[0]), ("xla", jax.devices("cpu")[0])):
            run = jax.jit(functools.partial(attend, backend=backend))
            found.append(np.asarray(run(*jax.device_put(args, device)).out))
        worst = float(np.abs(found[0] - found[1]).max())
        print(f"prefill of {queries} on {keys}: largest difference {worst:.1e}", flush=True)
        assert worst < 0.05, worst


def run_cache() -> None:
    """Rows into pages and out again, in all formats with one scale; slots to skip among them."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(20 * 16)[:117].astype(np.int32)
    slots[::9] = -1
    rows = jnp.asarray(rng.standard_normal((117, RANK + ROPE)), jnp.bfloat16)
    table = jnp.arange(60, dtype=jnp.int32).reshape(3, 20) % 20
    first, starts = jnp.asarray([3, 0, 1], jnp.int32), jnp.asarray([0, 40, 40, 57], jnp.int32)
    for format in ("bf16", "fp8_e4m3"):
        empty = LatentCache.alloc(num_pages=20, page=16, rank=RANK, rope=ROPE, format=format)
        found = []
        for backend in ("mosaic", "xla"):
            given = rows[:, :RANK], rows[:, RANK:], jnp.asarray(slots)
            cache = write_latent(empty, *given, backend=backend)
            out = gather_latent(
                cache, table, first, starts, rows=64, dtype=jnp.bfloat16, backend=backend
            )
            found.append([np.asarray(x.astype(jnp.float32)) for x in (cache.pages, out)])
        for ours, want in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, want)
        print(f"cache of {format}: equal", flush=True)


def run_stack() -> None:
    """The last layer of a stack, to its last slot: written, gathered and attended to."""
    layers, num_pages, page = 3, 12, 16
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_pages * page, RANK + ROPE))
    slots = rng.permutation(num_pages * page)
    table = np.arange(num_pages)[::-1].reshape(2, -1)
    lens, starts = np.array([90, 96]), np.array([0, 1, 2])
    for format in ("bf16", "fp8_e4m3"):
        for heads in (16, 128):
            q = rng.standard_normal((2, heads, RANK + ROPE))
            with on_host():
                given = [jnp.asarray(a, jnp.bfloat16) for a in (rows, q)]
                given += [jnp.asarray(a, jnp.int32) for a in (slots, table, lens, starts)]
                sizes = {"num_pages": num_pages, "page": page, "rank": RANK, "rope": ROPE}
                cache = LatentCache.alloc(**sizes, layers=layers, format=format)
            found = []
            for backend, device in (("mosaic", jax.devices()[0]), ("xla", jax.devices("cpu")[0])):
                run = jax.jit(functools.partial(_stack, backend, layers - 1))
                result = run(*jax.device_put((cache, *given), device))
                found.append([np.asarray(a).astype(np.float32) for a in result])
            for ours, want in zip(*found, strict=True):
                worst = float(np.abs(ours - want).max())
                assert worst < 0.05, worst
            print(f"stack of {format}, {heads} heads: close", flush=True)


def _stack(backend, layer, cache, x, q, slots, table, lens, starts):
    more = {"backend": backend, "layer": jnp.int32(layer)}
    cache = write_latent(cache, x[:, :RANK], x[:, RANK:], slots, **more)
    first, ends = jnp.zeros_like(lens), jnp.asarray([0, 90, 186], jnp.int32)
    rows = gather_latent(cache, table, first, ends, rows=190, dtype=x.dtype, **more)
    meta = DecodeMetadata(max_query_len=1, page_table=table, seq_lens=lens, query_starts=starts)
    state = mla_decode(q[..., :RANK], q[..., RANK:], cache, meta, scale=0.07, **more)
    return cache.pages, rows, state.out, state.lse


def run_sparse() -> None:
    """Lists with holes over caches of three formats, one or two; tokens whole and in pieces."""
    rng = np.random.default_rng(0)
    for form, rank, heads, tokens, more in (
        ("ds_mla", RANK, 128, 2, 0),
        ("ds_mla", RANK, 16, 140, 0),
        ("bf16", RANK, 64, 3, 0),
        ("v4", 448, 64, 3, 100),
    ):
        row, places = rank + ROPE, rng.permutation(64)
        with on_host():
            x = jnp.asarray(rng.standard_normal((64, row)), jnp.bfloat16)
            given = (x[:, :rank], x[:, rank:]), jnp.asarray(places, jnp.int32)
            caches = [write_rows(_empty(form, rank, page), *given) for page in (16, 2)]
            slots = [jnp.asarray(rng.integers(-20, 64, (tokens, n)), jnp.int32) for n in (150, 100)]
            q = jnp.asarray(rng.standard_normal((tokens, heads, row)), jnp.bfloat16)
        found = []
        for backend, device in (("mosaic", jax.devices()[0]), ("xla", jax.devices("cpu")[0])):
            run = jax.jit(functools.partial(_sparse, backend, rank, bool(more)))
            state = run(*jax.device_put((q, caches, slots), device))
            found.append(np.asarray(state.out).astype(np.float32))
        worst = float(np.abs(found[0] - found[1]).max())
        print(f"sparse over {form}, {heads} heads: largest difference {worst:.1e}", flush=True)
        assert worst < 0.05, worst


def _empty(form: str, rank: int, page: int):
    facts = {"num_pages": 64 // page, "page": page, "format": form}
    if form == "bf16":
        return LatentCache.alloc(**facts, rank=rank, rope=ROPE)
    return RecordCache.alloc(**facts)


def _sparse(backend, rank, two, q, caches, slots):
    extra = SparseScope(cache=caches[1], slots=slots[1], lengths=None, layer=None)
    return mla_sparse_decode(
        q[..., :rank], q[..., rank:], caches[0], slots[0],
        scale=0.07, value=512, extra=extra if two else None, backend=backend,
    )  # fmt: skip


def run_steps() -> None:
    """V4's new rows, and states: of steps of one token, and of a prompt longer than its ring."""
    for case in (
        v4_step.Case(tokens=5),
        v4_step.Case(tokens=5, form="bf16"),
        v4_step.Case(tokens=9, ratio=4),
        v4_step.Case(tokens=300, ratio=4),
        v4_step.Case(tokens=300, ratio=128),
    ):
        with on_host():
            made = v4_step.made(case)
        found = []
        for backend, device in (("triton", jax.devices()[0]), ("xla", jax.devices("cpu")[0])):
            held, given = jax.device_put((made.held, made.given), device)
            held, out = jax.jit(made.call(backend))(held, *given)
            with on_host():
                rows = made.rows(jax.device_put(held, jax.devices("cpu")[0]))
            found.append([np.asarray(x).astype(np.float32) for x in (*rows, *jax.tree.leaves(out))])
        worst = max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True))
        print(f"{case.name}: largest difference {worst:.1e}", flush=True)
        assert worst < 0.3, worst  # half a step of a code below 8


def main() -> None:
    """The parts that are named, or all."""
    quantised = functools.partial(run_decode, QUANTISED, "fp8_e4m3")
    parts = {
        "decode": run_decode,
        "quantised": quantised,
        "prefill": run_prefill,
        "cache": run_cache,
        "stack": run_stack,
        "sparse": run_sparse,
        "steps": run_steps,
    }
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
