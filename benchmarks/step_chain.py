"""``python -m benchmarks.step_chain``: how a decode step of a few layers is compiled best.

An engine's host takes longer for a step than a GPU takes for a few layers. So no engine runs here:
the step's program is called again and again with one batch, and each call needs the caches and
tokens of the one before. No profiler runs either. The trials are those of ``card_trials``: the same
weights, one program each. A row has the microseconds of a step of one request and of eight, and the
tokens that they draw. Repeated in one process a figure differs by less than 0.2 %; other machines
differ by more.
"""

import argparse
import gc
import json
import time
from typing import Any

import jax
import numpy as np

from benchmarks.card_trials import MOST, PAGE, TRIALS, changed, engine_of, weights_of
from benchmarks.decodes import chained, decodes_of
from benchmarks.random_model import of_layers
from mla_jax.config_v4 import AnyConfig
from mla_jax.metadata.packed import pack
from mla_jax.model.presets import PRESETS
from mla_jax.placement import Placement

CALLS, REPEATS, AHEAD = 150, 5, 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_chain", description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="V2_LITE")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--trials", nargs="*", choices=TRIALS, default=["default"])
    given = parser.parse_args()
    config = of_layers(PRESETS[given.model], given.layers)
    placement = Placement.of(jax.devices()[:1])
    weights = weights_of(config, placement)
    for trial in given.trials:
        row = {"trial": trial, "model": given.model, "layers": given.layers}
        jax.clear_caches()  # traced operations are kept, and know nothing of the patches
        with changed(trial):
            row |= _measured(weights, config, placement, given.context)
        print(json.dumps(row), flush=True)
        gc.collect()


def _measured(
    weights: Any, config: AnyConfig, placement: Placement, context: int
) -> dict[str, Any]:
    """Of a step of one request, and of the most."""
    engine = engine_of(weights, config, placement, longest=context + PAGE, requests=1 + MOST)
    row: dict[str, Any] = {"compile_s": 0.0}
    for requests in (1, MOST):
        batch = pack(decodes_of(engine, requests, context))
        begun = time.perf_counter()
        engine._step.compile(batch.layout, engine._caches)
        row["compile_s"] += round(time.perf_counter() - begun, 1)
        runs = [chained(engine, batch, CALLS, AHEAD) for _ in range(1 + REPEATS)]
        row[f"us_{requests}"] = [round(us, 1) for us, _ in runs[1:]]
        row[f"drawn_{requests}"] = np.asarray(runs[-1][1][0])[:requests].tolist()
    return row


if __name__ == "__main__":
    main()
