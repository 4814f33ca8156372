"""``python -m benchmarks.select_trials``: shapes of the selection's thread blocks, alone.

Random ranks are selected from in several ways. A row has the microseconds of an isolated call, of
each of its kernels, and whether the positions are those of the way in use. ``docs/log/indexer.md``
has what was measured.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import isolated_us, once
from mla_jax.pallas.topk import rows_sm90, select_sm90
from mla_jax.pallas.topk.select_sm90 import MOST, Shape, fewest_blocks

TOPK = 2048
CASES = (1024, 32768), (256, 131072), (64, 32768), (1, 131072), (4096, 8192), (128, 8192)


def _of(groups: int, *, over: int = 0, most: int = rows_sm90.COLUMNS) -> Callable[..., Shape]:
    """So many warpgroups for rows of more columns than ``over``, up to ``most``."""
    used = select_sm90.shape_of

    def shape_of(columns: int, rows: int = 1) -> Shape:
        return fewest_blocks(columns, groups) if over < columns <= most else used(columns, rows)

    return shape_of


WAYS: dict[str, tuple[int, Callable[..., Shape]]] = {
    "in use": (rows_sm90.PART, select_sm90.shape_of),
    "512 threads": (1 << 14, _of(4, over=512 * MOST)),
    "1,024 threads": (rows_sm90.PART, _of(8, over=512 * MOST)),
    "short rows: 256 threads": (rows_sm90.PART, _of(2, most=4096)),
    "short rows: 512 threads": (rows_sm90.PART, _of(4, most=4096)),
    "8,192 columns: 256 threads": (rows_sm90.PART, _of(2, most=8192)),
}
"""Columns of a part, and the shape of a row's cluster."""


@contextmanager
def chosen(way: str) -> Iterator[None]:
    """Within it rows are cut and shaped so."""
    part, shape_of = WAYS[way]
    patch = mock.patch.object
    with patch(rows_sm90, "PART", part), patch(select_sm90, "shape_of", shape_of):
        yield


def positions(ranks: jax.Array, ends: jax.Array) -> jax.Array:
    """Of the best of each row, by whichever way is chosen."""
    starts = jnp.zeros_like(ends)  # as prefills have them
    find = partial(rows_sm90.select, k=TOPK)
    return find(lambda *_: ranks, starts, ends, ranks.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.select_trials", description=__doc__)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    for rows, columns in CASES:
        drawn = rng.standard_normal((rows, columns), np.float32).view(np.int32)
        ranks = jnp.asarray(np.where(drawn < 0, drawn ^ 0x7FFFFFFF, drawn))
        ends = jnp.full((rows,), columns, jnp.int32)
        runs, found = {}, {}
        for way in given.ways:
            with chosen(way):
                run = jax.jit(lambda *a: positions(*a)).lower(ranks, ends).compile()
            runs[way], found[way] = partial(once, run, (ranks, ends)), np.asarray(run(ranks, ends))
        timed = isolated_us(runs)
        for way, us in timed.items():
            row = {"rows": rows, "columns": columns, "way": way, "us": round(us.sum, 1)}
            row |= {"span_us": round(us.span, 1), "kernels": us.kernels}
            equal = bool((found[way] == found[given.ways[0]]).all())
            print(json.dumps(row | {"equal": equal}), flush=True)


if __name__ == "__main__":
    main()
