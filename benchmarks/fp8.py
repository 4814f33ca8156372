"""``python -m benchmarks.fp8 [--out FILE]``: V3's routed experts with bf16 and with e4m3 weights.

Both in one process on the same rows and choices, by ``benchmarks.experts``' loop of calls.
"""

import argparse
import datetime
import json
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.experts import (
    BYTES_PER_S,
    CASES,
    chain,
    count_of,
    draw_rows,
    draw_weights,
    empty,
    poisoned,
    reference,
    seconds,
)  # fmt: skip
from benchmarks.machine import clocks
from benchmarks.random_model import block_scaled
from benchmarks.run import versions
from mla_jax import ops
from mla_jax.pallas.tuning import folder_name
from mla_jax.types import BlockScaled

METHOD = (
    "V3's routed experts (256 of 7168 x 2048, 8 of each token), bf16 and block-scaled e4m3 weights "
    "in one process; benchmarks.experts' loop; ratio: time with bf16 / with e4m3; floor: the "
    "chosen experts' bytes / 4.8 TB/s; error: to float32 with the widened weights"
)
NAMES = ("v3_t1", "v3_t32", "v3_t128")


@jax.jit
def quantised(w: jax.Array) -> BlockScaled:
    """[experts, in, out] in blocks of 128 x 128, rows outputs; expert by expert."""
    return lax.map(lambda w: block_scaled(w.T), w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kind = jax.devices()[0].device_kind
    name = f"{folder_name(kind)}_fp8_{datetime.date.today()}.json"
    out = given.out or Path(__file__).parent / "results" / name
    model = CASES[NAMES[0]][0]
    dense = draw_weights(model)
    scaled = tuple(map(quantised, dense))
    bf16 = partial(ops.routed_experts, backend="triton")
    fp8 = partial(ops.routed_experts_fp8, backend="triton")
    rows = []
    for case in NAMES:
        tokens, n = CASES[case][1], count_of(case)
        x, share, experts = draw_rows(model, tokens)
        nothing = seconds(jax.jit(partial(chain, empty, n)), x, dense, share, experts)
        us = {}
        for label, call, weights in (("bf16", bf16, dense), ("fp8", fp8, scaled)):

            def many(x, weights, share, experts, call=call, n=n):
                def body(i, rows):
                    y = call(rows, *weights, share, (experts + i) % model.experts)
                    return (x + 0.1 * y.astype(jnp.float32)).astype(x.dtype)

                return lax.fori_loop(0, n, body, x)

            us[label] = 1e6 * (seconds(jax.jit(many), x, weights, share, experts) - nothing) / n
        bytes_read = 3 * model.hidden * model.width * len(np.unique(np.asarray(experts)))
        floor = 1e6 * bytes_read / BYTES_PER_S
        rows.append(
            {
                "case": case,
                "bf16_us": us["bf16"],
                "us": us["fp8"],
                "ratio": us["bf16"] / us["fp8"],
                "of_bf16": us["fp8"] / us["bf16"],
                "floor_us": floor,
                "times_floor": us["fp8"] / floor,
                "error": _error(fp8, scaled, x, share, experts, model.experts),
            }
        )
        print(
            {k: v if isinstance(v, str) else round(v, 4) for k, v in rows[-1].items()}, flush=True
        )
    record = {"device": kind, "versions": versions(), "clocks": clocks(), "method": METHOD}
    out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


def _error(call, weights, x, share, experts, count: int) -> float:
    """Relative error of some rows, with poisoned padding."""
    x, share, experts = poisoned(x, share, experts, count)
    got = np.asarray(jax.jit(call)(x, *weights, share, experts).astype(jnp.float32))
    few = [jax.jit(lambda w: w.widened(jnp.bfloat16).swapaxes(1, 2))(w) for w in weights]
    want = np.asarray(reference(x, *few, share, experts), np.float64)[: len(got)]
    nobody = ~((np.asarray(experts) >= 0) & (np.asarray(experts) < count)).any(axis=1)
    assert not got[nobody].any(), "padding is not zero"
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert error < 0.01, error
    return error


if __name__ == "__main__":
    main()
