"""``python -m benchmarks.index_trials {spans,prompts,cold}``: scores and selection of the indexer.

``spans``: decodes with several numbers of pages of a thread block, rows of full and of drawn
lengths. ``prompts``: prefills behind several numbers of cached keys. ``cold``: decodes with and
without keys of the last call in the L2 cache. A row has the microseconds of an isolated call and of
its kernels. ``docs/log/indexer.md`` has what was measured.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import indexer
from benchmarks.timing import Isolated, isolated_us, once
from mla_jax.pallas.topk import mosaic

DECODES: dict[tuple[int, int], tuple[int, ...]] = {
    (64, 32768): (52, 13, 8, 4),
    (128, 8192): (26, 10, 4),
    (256, 8192): (26, 13, 4),
    (1, 131072): (4, 2),
}
"""Rows and keys, and pages of a thread block."""

PROMPTS = (4096, 0), (8192, 0), (2048, 2048), (2048, 30720), (512, 8192), (4096, 4096)
"""Queries, and cached keys before them."""

Runs = Iterator[tuple[dict[str, Any], dict[str, Isolated]]]


def _decode(rows: int, keys: int) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """The function, its arguments, and the same with drawn lengths."""
    function, given, *_ = indexer._decode(indexer.Case(rows=rows, keys=keys, paged=True))
    lens = np.random.default_rng(1).integers(0, keys + 1, (rows, 1))
    return function, given, (*given[:-1], jnp.asarray(lens, jnp.int32))


def _compiled(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    return jax.jit(lambda *a: function(*a)).lower(*given).compile()


def spans() -> Runs:
    for (rows, keys), several in DECODES.items():
        function, full, drawn = _decode(rows, keys)
        runs = {}
        for span in several:
            with mock.patch.object(mosaic, "_span", lambda *_, span=span: span):
                run = _compiled(function, full)
            runs[f"{span}, full"] = partial(once, run, full)
            runs[f"{span}, drawn"] = partial(once, run, drawn)
        yield {"rows": rows, "keys": keys}, isolated_us(runs)


def cold() -> Runs:
    big = jnp.ones((1 << 27,), jnp.float32)  # more than the cache holds
    other = jax.jit(lambda x: 1.0001 * x)
    for rows, keys in DECODES:
        function, full, _ = _decode(rows, keys)
        run = _compiled(function, full)

        def behind_another(run: Any = run, full: tuple[Any, ...] = full) -> None:
            jax.block_until_ready(other(big))
            once(run, full)

        runs = {"warm": partial(once, run, full), "cold": behind_another}
        yield {"rows": rows, "keys": keys}, isolated_us(runs)


def prompts() -> Runs:
    heads, dim = indexer.HEADS, indexer.DIM
    for queries, cached in PROMPTS:
        count, draw = queries + cached, jax.random.split(jax.random.key(0), 4)
        shapes = (queries, heads, dim), (queries, heads), (count, dim), (count,)
        q, w, k, scales = (
            jax.random.normal(key, shape) for key, shape in zip(draw, shapes, strict=True)
        )
        ends = jnp.arange(cached, count, dtype=jnp.int32) + 1
        q, k = ((60 * x).astype(jnp.float8_e4m3fn) for x in (q, k))
        given = q, w, k, jnp.zeros_like(ends), ends, jnp.abs(scales)
        run = _compiled(
            lambda q, w, k, a, b, s: mosaic.select_prefill(q, w, k, a, b, k=indexer.TOPK, scales=s),
            given,
        )
        facts = {"queries": queries, "cached": cached}
        yield facts, isolated_us({"causal": partial(once, run, given)})


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    trials = {"spans": spans, "prompts": prompts, "cold": cold}
    parser.add_argument("trial", choices=trials)
    for facts, timed in trials[parser.parse_args().trial]():
        for name, us in timed.items():
            ours = {kernel: x for kernel, x in us.totals.items() if "mla" in kernel}
            row = facts | {"way": name, "us": sum(ours.values()), "kernels": ours}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
