"""Two clocks, the same for us and for every peer.

``kernel_us`` sums the device time of the kernels of one call (CUPTI). ``back_to_back_us`` is
the slope of wall time over the number of calls, so launches, gaps and sinking clocks count.
"""

import statistics
import time
from collections.abc import Callable

from jax._src.lib import mosaic_gpu

__all__ = ["back_to_back_us", "kernel_us"]

ROUNDS = 5
CALLS = 6  # of one traced stretch
FEW, MANY = 1, 4  # chains of the slope


def kernel_us(runs: dict[str, Callable[[], None]]) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel of a call, median over rounds; ``run()`` waits."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            for kernel, us in _traced(run).items():
                found[name].setdefault(kernel, []).append(us)
    return {
        name: {k: statistics.median(v) for k, v in kernels.items()}
        for name, kernels in found.items()
    }


def back_to_back_us(
    runs: dict[str, Callable[[int], None]], calls: dict[str, int]
) -> dict[str, float]:
    """Microseconds that one more call takes. ``run(n)`` makes ``n * calls`` calls, waits once."""
    times = {(name, n): [] for name in runs for n in (FEW, MANY)}
    for run in runs.values():
        run(MANY)
    for _ in range(ROUNDS):
        for (name, n), found in times.items():
            start = time.perf_counter()
            runs[name](n)
            found.append(time.perf_counter() - start)
    middle = {key: statistics.median(found) * 1e6 for key, found in times.items()}
    return {
        name: (middle[name, MANY] - middle[name, FEW]) / (MANY - FEW) / calls[name] for name in runs
    }


def _traced(run: Callable[[], None]) -> dict[str, float]:
    """Device microseconds of one call by kernel: the mean of a few calls in a row."""
    extension = mosaic_gpu._mosaic_gpu_ext
    extension._cupti_init()
    try:
        for _ in range(CALLS):
            run()
    finally:
        timings = extension._cupti_get_timings(False)
    total: dict[str, float] = {}
    for kernel, ms in timings:
        total[kernel[:48]] = total.get(kernel[:48], 0.0) + ms * 1e3 / CALLS
    return total
