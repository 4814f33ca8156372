"""How long an engine takes until it serves: nothing compiled before, and with stored programs.

Each row starts two processes: one with an empty folder of programs, one with the folder that the
first has filled. ``compile_s`` is the first decode program alone, from tracing to loading, before
anything else was compiled; ``cold_s`` is everything from the engine's settings to all default rungs
ready and one step run, that program included; ``warm_s`` the same with stored programs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CASES", "METHOD", "Case", "run"]

REQUESTS, LENGTH, PAGE = 128, 4096, 64
METHOD = (
    f"V2-Lite's widths, bf16, random weights (drawing them is not counted); engine of {REQUESTS} "
    f"requests of {LENGTH} tokens, pages of {PAGE}, default rungs; seconds of wall time inside a "
    "fresh process whose packages are imported; compile_s: one decode program, nothing compiled "
    "before; cold_s: settings to ready, with one step run; warm_s: the same with the folder of "
    "programs that the cold run left"
)


@dataclass(frozen=True)
class Case:
    """An engine of so many layers."""

    layers: int

    @property
    def name(self) -> str:
        return f"v2_lite_{self.layers}l_start"


CASES = tuple(map(Case, (4, 27, 61)))


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Start the engines of the chosen cases, one process after the other."""
    del peers
    with turn:
        for case in (c for c in CASES if c.name in chosen):
            with tempfile.TemporaryDirectory() as folder:
                cold = _child(case.layers, folder)
                warm = _child(case.layers, folder)
            row = {
                "case": case.name,
                "layers": case.layers,
                "programs": cold["programs"],
                "compile_s": cold["compile_s"],
                "cold_s": cold["ready_s"],
                "warm_s": warm["ready_s"],
                "import_s": cold["import_s"],
                "rungs": cold["rungs"],
            }
            print(
                f"{case.name}: {row['programs']} programs, one {row['compile_s']:.1f} s, cold "
                f"{row['cold_s']:.1f} s, warm {row['warm_s']:.1f} s",
                flush=True,
            )
            yield row


def _child(layers: int, folder: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.start", str(layers), folder]
    # The child has the card to itself; 61 layers and their cache take 101 GiB of its 140.
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | memory
    )
    return json.loads(done.stdout.splitlines()[-1])


def _start(layers: int, folder: str) -> dict:
    """One engine, from settings to the end of its first step."""
    begun = time.perf_counter()
    from benchmarks.random_model import drawn, of_layers
    from mla_jax.engine import Engine
    from mla_jax.metadata.packed import pack
    from mla_jax.model.presets import V2_LITE
    from mla_jax.model.sampling import SamplingParams
    from mla_jax.model.step import empty_batch

    config = of_layers(V2_LITE, layers)
    imported = time.perf_counter() - begun
    model = drawn(config)
    begun = time.perf_counter()
    engine = Engine(
        model,
        config,
        num_pages=1 + REQUESTS * LENGTH // PAGE,
        page=PAGE,
        max_requests=REQUESTS,
        max_model_len=LENGTH,
        programs=folder,
    )
    first = next(r for r in engine.builder.rungs() if not r.bucket.prefill_tokens)
    compiling = time.perf_counter()
    engine._step.compile(pack(empty_batch(first, ["latent"])).layout, engine._caches)
    compiled = time.perf_counter() - compiling
    engine.warm_up(
        progress=lambda s: print(
            f"{s.done}/{s.total} {s.seconds:.1f} s {s.bucket}", file=sys.stderr
        )
    )
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1, ignore_eos=True))
    return {
        "ready_s": time.perf_counter() - begun,
        "compile_s": compiled,
        "import_s": imported,
        "programs": engine.stats().compiles,
        "rungs": [str(r.bucket) for r in engine.builder.rungs()],
    }


if __name__ == "__main__":
    print(json.dumps(_start(int(sys.argv[1]), sys.argv[2])))
