"""The plan kernel against ``work_plan.balanced``: interpreted, compiled for an H200, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_decode import plan_sm90
from mla_jax.pallas.dense_decode import work_plan as wp
from tests import aot


def batch(rng, requests, queries, longest):
    """Lengths, some of them short, and query starts; some requests have no queries."""
    lens = rng.integers(0, longest, requests)
    lens = np.where(rng.random(requests) < rng.random(), rng.integers(0, 200, requests), lens)
    counts = rng.integers(0, queries + 1, requests)
    return jnp.asarray(lens, jnp.int32), jnp.asarray([0, *np.cumsum(counts)], jnp.int32)


def programs(requests, queries, workers, interpret=None):
    """The reference and the kernel for one shape of batch."""
    sizes = {
        "tokens": requests * queries + 2, "block": 64, "workers": workers,
        "split_cost": 16 * queries,
    }  # fmt: skip
    return [
        jax.jit(functools.partial(f, **sizes, **more))
        for f, more in ((wp.balanced, {}), (plan_sm90.balanced, {"interpret": interpret}))
    ]


def same(reference, kernel, args):
    expected, got = reference(*args), kernel(*args)
    for name in ("pieces", "tasks", "merges"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    assert (got.slots, got.workers) == (expected.slots, expected.workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "queries", "races"), [(9, 3, True), (130, 1, False), (300, 1, False)]
)
def test_interpreted(requests, queries, races, rng):
    """Requests of one, two and three vectors; race detection where it takes seconds."""
    params = plgpu.InterpretGPUParams(detect_races=races, num_tma_threads_per_device=4)
    reference, kernel = programs(requests, queries, 7, params)
    for longest in (1, 500, 30000):
        same(reference, kernel, batch(rng, requests, queries, longest))
    equal = jnp.full((requests,), 8192, jnp.int32), jnp.arange(requests + 1, dtype=jnp.int32)
    same(reference, kernel, equal)
    assert not races or not get_races().races_found


@pytest.mark.slow
@pytest.mark.skipif(bool(aot.available()), reason=aot.available() or "available")
@pytest.mark.parametrize("requests", [128, 300, 528, 1900, plan_sm90.MOST_REQUESTS])
def test_compiles_for_sm90(requests):
    """One kernel in all."""
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    kernel = programs(requests, 1, 132)[1]
    compiled, (report,) = aot.compile_sm90(kernel, spec((requests,)), spec((requests + 1,)))
    assert report.spilled == 0, report.log
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count("kind=k") + entry.count(" custom-call(") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [132, 66, 33])
@pytest.mark.parametrize(
    ("requests", "queries"), [(1, 1), (32, 4), (200, 3), (300, 1), (528, 2), (1900, 1), (2048, 1)]
)
def test_same_on_device(requests, queries, workers, rng):
    reference, kernel = programs(requests, queries, workers)
    for longest in (1, 500, 30000, 131072):
        for _ in range(4):
            same(reference, kernel, batch(rng, requests, queries, longest))
