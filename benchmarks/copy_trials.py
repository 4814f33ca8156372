"""``python -m benchmarks.copy_trials TRIAL SUITE …``: a suite of ``benchmarks.run``, other copies.

Sparse attention copies rows of elements to shared memory by ``cp.async.cg``. What such copies
bring may leave the L2 cache first (docs/log/served_step.md). ``through_l1`` copies by way of the L1
cache, ``as_is`` is the library as it is. Not with ``--jobs``: those processes know no trial.
"""

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks import run
from mla_jax.pallas.sparse_attention import rows_sm90

TRIALS = {"as_is": "cp.async.cg.", "through_l1": "cp.async.ca."}


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in TRIALS:
        sys.exit(f"usage: benchmarks.copy_trials {{{','.join(TRIALS)}}} SUITE …")
    by, whole = TRIALS[sys.argv.pop(1)], rows_sm90.copy

    def copy(*given: Any) -> Iterator[str]:
        return (line.replace(TRIALS["as_is"], by) for line in whole(*given))

    with mock.patch.object(rows_sm90, "copy", copy):
        run.main()


if __name__ == "__main__":
    main()
