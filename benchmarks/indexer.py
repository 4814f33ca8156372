"""Selection as a whole, scores and the best of them: paged decodes and gathered prefills."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import isolated_us, once, waited
from mla_jax.cache import RecordCache
from mla_jax.pallas.cache_io.records import write_records
from mla_jax.pallas.indexer.ref import indexer_logits, quantise_queries
from mla_jax.pallas.topk import mosaic

__all__ = ["CASES", "METHOD", "Case", "run"]

HEADS, DIM, PAGE, TOPK = 64, 128, 64, 2048
BYTES_PER_S, FLOPS_PER_S = 4.25e12, 1600e12
METHOD = (
    f"{HEADS} heads of {DIM}, {TOPK} selected, random normal; decode: 132-byte records in pages "
    f"of {PAGE}, shuffled; prefill: gathered codes and scales, all queries see all; us: summed "
    "kernel time of an isolated call (kineto), span_us: start of its first kernel to end of its "
    "last, logits_us: its kernels of scores alone; peer: DeepGEMM's scores and vLLM's selection "
    "(of decodes the fastest of the kernels that it has), each isolated, on the same "
    "arrays; agree: part of the peer's selection that ours has too, of all queries; recall: part "
    "of the best by float32 scores of what was not quantised, of two queries; floor: the larger of "
    "the keys' bytes / 4.25 TB/s and FLOPs / 1600 TFLOP/s (e4m3)"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``rows`` queries, each over ``keys``: of its own pages, or all of the same gathered ones."""

    rows: int
    keys: int
    paged: bool

    @property
    def name(self) -> str:
        return f"{'decode' if self.paged else 'prefill'}_{self.rows}x{self.keys}"

    @property
    def floor_us(self) -> float:
        """No kernel with these rates is faster."""
        read = self.keys * (132 * self.rows if self.paged else 132)
        return 1e6 * max(read / BYTES_PER_S, 2 * HEADS * DIM * self.rows * self.keys / FLOPS_PER_S)


CASES = (
    *(Case(rows=n, keys=k, paged=True) for n, k in ((64, 32768), (128, 8192), (1, 131072))),
    *(Case(rows=4096, keys=k, paged=False) for k in (8192, 32768, 131072)),
)


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases."""
    if peers:
        from benchmarks import index_peers

        index_peers.load(peers)
    for case in (c for c in CASES if c.name in chosen):
        function, arguments, exact, peer = _decode(case) if case.paged else _prefill(case)
        compiled = jax.jit(function).lower(*arguments).compile()
        with turn:
            found = np.asarray(compiled(*arguments)).reshape(case.rows, TOPK)
            recall = _recall(found, exact)
            theirs = peer() if peers else {}
            runs = {"ours": partial(once, compiled, arguments)}
            runs |= {name: partial(waited, call) for name, call in theirs.items()}
            times = isolated_us(runs)
            agree = _agree(found, [theirs[n]() for n in theirs if n != "scores"])
        ours = times.pop("ours")
        row = {
            "case": case.name,
            "us": ours.sum,
            "span_us": ours.span,
            "logits_us": sum(us for name, us in ours.totals.items() if "_ranks" in name),
            "floor_us": case.floor_us,
            "recall": recall,
            "workspace_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "kernels": ours.totals,
        }
        if times:
            logits = times.pop("scores").sum
            best = min(times, key=lambda name: times[name].sum)
            row |= {
                "peer_logits_us": logits,
                "peer_topk_us": times[best].sum,
                "peer_topk": best,
                "agree": agree,
                "ratio_logits": logits / row["logits_us"],
                "ratio": (logits + times[best].sum) / row["us"],
            }
        print(row, flush=True)
        yield row


def _agree(found: np.ndarray, chosen: list) -> list[float]:
    """Parts of selections that ours has too."""
    parts = []
    for theirs in chosen:
        pairs = zip(found, theirs.cpu().numpy(), strict=True)
        parts.append(float(np.mean([len(np.intersect1d(a, b)) / TOPK for a, b in pairs])))
    return parts


def _recall(found: np.ndarray, exact) -> float:
    parts = []
    for i in (0, len(found) - 1):
        best = np.argsort(-exact(i), kind="stable")[:TOPK]
        parts.append(len(np.intersect1d(best, found[i])) / TOPK)
    return float(np.mean(parts))


def _decode(case: Case):
    width = case.keys // PAGE
    cache = RecordCache.alloc(num_pages=case.rows * width, page=PAGE, format="index_key")
    keys = jax.random.split(jax.random.key(0), 3)
    table = np.random.default_rng(0).permutation(case.rows * width).reshape(case.rows, width)
    q = jax.random.normal(keys[0], (case.rows, 1, HEADS, DIM), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.rows, 1, HEADS), jnp.float32)
    rows = table[..., None].astype(np.int32) * PAGE + np.arange(PAGE, dtype=np.int32)

    def drawn(i):
        return jax.random.normal(jax.random.fold_in(keys[2], i), (case.keys, DIM), jnp.bfloat16)

    write = jax.jit(lambda cache, i, slots: write_records(cache, (drawn(i),), slots))
    for i in range(case.rows):
        cache = write(cache, i, jnp.asarray(rows[i].reshape(-1)))
    codes, weights = quantise_queries(q, w)
    lens = jnp.full((case.rows, 1), case.keys, jnp.int32)
    arguments = codes, weights, cache, jnp.asarray(table, jnp.int32), lens

    def exact(i):
        return np.asarray(indexer_logits(q[i], w[i], drawn(i)))[0]

    def peer():
        from benchmarks import index_peers

        given = codes, weights, cache.pages, arguments[3], lens
        return index_peers.decode(*given, page=PAGE, k=TOPK)

    return lambda *a: mosaic.select_decode(*a, k=TOPK), arguments, exact, peer


def _prefill(case: Case):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (case.rows, HEADS, DIM), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.rows, HEADS), jnp.float32)
    k = jax.random.normal(keys[2], (case.keys, DIM), jnp.bfloat16)
    codes, weights = quantise_queries(q, w)
    cache = RecordCache.alloc(num_pages=case.keys // PAGE, page=PAGE, format="index_key")
    cache = write_records(cache, (k,), jnp.arange(case.keys, dtype=jnp.int32))
    records = cache.pages.reshape(-1, PAGE * (DIM + 4))
    stored = records[:, : PAGE * DIM].reshape(-1, DIM), records[:, PAGE * DIM :].reshape(-1, 4)
    kinds = jnp.float8_e4m3fn, jnp.float32
    k8, scales = map(jax.lax.bitcast_convert_type, stored, kinds)
    starts = jnp.zeros(case.rows, jnp.int32)
    arguments = codes, weights, k8, starts, starts + case.keys, scales

    def exact(i):
        return np.asarray(indexer_logits(q[i : i + 1], w[i : i + 1], k))[0]

    def peer():
        from benchmarks import index_peers

        return index_peers.prefill(codes, weights, k8, scales, *arguments[3:5], k=TOPK)

    def select(q, w, k, starts, ends, scales):
        return mosaic.select_prefill(q, w, k, starts, ends, k=TOPK, scales=scales)

    return select, arguments, exact, peer
