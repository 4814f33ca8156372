"""``python -m benchmarks.sparse_trials FIELD=VALUE[,…] SUITE …``: another tuning.

Runs a suite of sparse attention, with the options of ``benchmarks.run``, and ``mosaic`` tuned so:
``holds=1,stages=2 sparse_prefill --peers DIR --cases 4096x8192_h128``. ``holds=0`` is the library
as it is. Not with ``--jobs``: those processes know no trial.
"""

import dataclasses
import sys
from unittest import mock

from benchmarks import run
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Problem, Tuned
from mla_jax.pallas.sparse_attention import mosaic


def main() -> None:
    changes = sys.argv.pop(1) if len(sys.argv) > 2 else ""
    if "=" not in changes:
        sys.exit("usage: benchmarks.sparse_trials FIELD=VALUE[,…] SUITE …")
    fields = {name: int(n) for name, n in (x.split("=") for x in changes.split(","))}
    tune = mosaic.tune

    def changed(problem: Problem, device: DeviceInfo) -> Tuned:
        value = dataclasses.replace(tune(problem, device).value, **fields)
        return Tuned(value=value, source=f"trial: {changes}")

    with mock.patch.object(mosaic, "tune", changed):
        run.main()


if __name__ == "__main__":
    main()
