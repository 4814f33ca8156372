"""``python -m benchmarks.run SUITE --peers DIR --out FILE``: check, time, print, write JSON."""

import argparse
import datetime
import fcntl
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from benchmarks.machine import clocks
from mla_jax.pallas.tuning import folder_name

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


SUITES = (
    "chunked_prefill", "decode", "fp8_matmul", "gather", "indexer", "layer", "prefill", "serve",
    "serve_prefill", "sparse_decode", "sparse_prefill", "start", "v32_dense", "v4_context",
    "v4_decode", "v4_layer", "v4_step",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--peers", type=Path, help="folder with the peers' shared objects")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/")
    parser.add_argument(
        "--cases", nargs="*", help="all by default; NAME/field=value changes the tuning"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, with --jobs")
    parser.add_argument("--turn", type=Path, help="file that a process locks to use the device")
    parser.add_argument(
        "--everyone",
        type=int,
        default=1,
        help="processes that share --turn, those of other suites too",
    )
    given = parser.parse_args()

    import jax

    suite = importlib.import_module(f"benchmarks.{given.suite}")
    extra = [c.name for c in getattr(suite, "EXTRA", ())]  # no rows of the comparison
    rows = [c.name for c in suite.CASES] + extra
    chosen = given.cases or rows
    names = rows + [c.name for c in getattr(suite, "PREFILLS", ())]  # only if asked for
    if unknown := [name for name in chosen if name.partition("/")[0] not in names]:
        parser.error(f"--cases: given {', '.join(unknown)}; allowed: {', '.join(names)}")
    kind = jax.devices()[0].device_kind
    stem = f"{folder_name(kind)}_{given.suite}_{datetime.date.today()}"
    out = given.out or Path(__file__).parent / "results" / f"{stem}.json"
    record = {
        "device": kind,
        "versions": versions(),
        "clocks": clocks(),
        "method": suite.METHOD,
        "extra": extra,
        "rows": [],
    }
    rows = (
        _spread(given, chosen)
        if given.jobs > 1
        else suite.run(given.peers, chosen, turn(given.turn, given.everyone))
    )
    for row in rows:  # what was measured so far survives a kill
        record["rows"].append(row)
        record["rows"].sort(key=lambda r: chosen.index(r["case"]))
        half = out.with_suffix(".part")
        half.write_text(json.dumps(record, indent=1) + "\n")
        half.replace(out)  # nobody reads half of it
    if given.jobs > 1 or not given.turn:
        _summarise(record)


def _summarise(record: dict) -> None:
    keys = sorted({k for r in record["rows"] for k in r if k.startswith("ratio")})
    for key in keys:
        found = [
            r[key] for r in record["rows"] if r.get(key, 0) > 0 and r["case"] not in record["extra"]
        ]
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            print(f"{key}: {len(found)} rows, geometric mean {mean:.3f}, least {min(found):.3f}")


class _Turn:
    """One process at a time, and none before all of them have compiled.

    A compiler tries products on the device: beside it every clock is wrong.
    """

    def __init__(self, path: Path, everyone: int):
        self.path, self.everyone = path, everyone

    def __enter__(self):
        _compiled(self.path, os.getpid())
        while len(list(self.path.parent.glob(f"{self.path.name}.*"))) < self.everyone:
            time.sleep(0.05)
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error):
        self.file.close()


def _compiled(path: Path, process: int) -> None:
    """Say that a process has compiled everything, or that it has ended."""
    path.with_name(f"{path.name}.{process}").touch()


def turn(path: Path | None, everyone: int = 1):
    """To be entered for every use of the device."""
    return nullcontext() if path is None else _Turn(path, everyone)


def _spread(given: argparse.Namespace, chosen: list[str]) -> Iterator[dict]:
    """Rows of several processes: they compile side by side and time one after the other."""
    end = time.monotonic() + given.limit
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{i}.json" for i in range(min(given.jobs, len(chosen)))]
        path = given.turn or Path(folder) / "turn"
        everyone = given.everyone if given.turn else len(parts)
        running = []
        for i, part in enumerate(parts):
            command = [sys.executable, "-m", "benchmarks.run", given.suite, "--out", str(part)]
            command += ["--turn", str(path), "--everyone", str(everyone)]
            command += ["--cases", *chosen[i :: len(parts)]]
            command += ["--peers", str(given.peers)] if given.peers else []
            running.append(subprocess.Popen(command))
        seen: set[str] = set()
        while (alive := [p for p in running if p.poll() is None]) and time.monotonic() < end:
            for process in set(running) - set(alive):
                _compiled(path, process.pid)
            yield from _new_rows(parts, seen)
            time.sleep(0.2)
        for process in alive:
            process.terminate()
        failed = sum(p.wait() != 0 for p in running)
        yield from _new_rows(parts, seen)
    if failed:
        print(f"{failed} of {len(running)} processes did not finish", file=sys.stderr)


def _new_rows(parts: list[Path], seen: set[str]) -> Iterator[dict]:
    """Rows that were written since the last call; ``seen`` are their cases."""
    for part in parts:
        for row in json.loads(part.read_text())["rows"] if part.exists() else []:
            if row["case"] not in seen:
                seen.add(row["case"])
                yield row


def versions() -> dict[str, str]:
    import jax
    import jaxlib
    from jax._src.lib import mosaic_gpu

    isa = mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version()
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "ptx_isa": str(isa)}


if __name__ == "__main__":
    main()
