"""``python -m benchmarks.kernel_trials TRIAL SUITE …``: a suite of ``benchmarks.run``, changed.

The options behind the trial are those of ``benchmarks.run``. Not with ``--jobs``: those processes
know no trial.

as_is
    The library.
holds, stages, holds_stages
    Sparse attention over elements: half of the queries in registers, slots freed in two stages.
apart
    Index scores over gathered keys: the two queries of a pair are products of their own.
"""

import dataclasses
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

from benchmarks import run
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.pallas.sparse_attention import mosaic as sparse
from mla_jax.pallas.topk import mosaic as topk


def _tuned(**changes: Any) -> Any:
    """Sparse attention with another tuning."""
    tune = sparse.tune

    def changed(problem: Problem, device: DeviceInfo) -> Tuned:
        value = dataclasses.replace(tune(problem, device).value, **changes)
        return Tuned(value=value, source=f"trial: {changes}")

    return mock.patch.object(sparse, "tune", changed)


TRIALS = {
    "as_is": nullcontext(),
    "holds": _tuned(holds=True),
    "stages": _tuned(stages=2),
    "holds_stages": _tuned(holds=True, stages=2),
    "apart": mock.patch.object(topk, "APART", True),
}


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in TRIALS:
        sys.exit(f"usage: benchmarks.kernel_trials {{{','.join(TRIALS)}}} SUITE …")
    with TRIALS[sys.argv.pop(1)]:
        run.main()


if __name__ == "__main__":
    main()
