"""``python -m benchmarks.metadata_turns TREE … --out FILE``: host times of several commits in turn.

Each TREE is a folder with ``mla_jax`` and ``benchmarks`` of a commit (``git archive``). Every one
has a process of its own that waits for its turn, first or last in turn, so a machine whose speed
changes from minute to minute treats all alike. Rows are medians of turns of
``benchmarks.metadata.host_times``, the first turn left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

CHILD = """
import json, sys
from benchmarks.metadata import Batch, host_times, programs
batch = Batch.draw(512, 131072)
made = programs(batch)
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    print(json.dumps(host_times(name, batch, made[name], rounds=4)), flush=True)
"""
FIELDS = "host_us", "least_us", "row_us", "decide_us", "call_us", "warm_us", "empty_us"


def _started(tree: Path, asynchronous: bool) -> subprocess.Popen[str]:
    """A process that answers each name with a row of ``tree``."""
    packages = f"{tree.resolve()}:{os.environ.get('PYTHONPATH', '')}"
    variable = {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"} if asynchronous else {}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env=os.environ | variable | {"PYTHONPATH": packages},
    )
    assert child.stdout is not None and child.stdout.readline().strip() == "ready", tree
    return child


def _row(child: subprocess.Popen[str], name: str) -> dict:
    assert child.stdin is not None and child.stdout is not None, "opened with pipes"
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.metadata_turns", description=__doc__)
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--cases", nargs="*", default=["v3", "v32", "v4"])
    parser.add_argument("--sync", action="store_true", help="without asynchronous dispatch only")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    given = parser.parse_args()
    rows = []
    for asynchronous in (False,) if given.sync else (False, True):
        children = [_started(tree, asynchronous) for tree in given.trees]
        for name in given.cases:
            found = []
            for turn in range(given.turns):
                order = list(enumerate(children))[:: -1 if turn % 2 else 1]
                each = {i: _row(child, name) for i, child in order}
                found.append([each[i] for i in range(len(children))])
            for tree, own in zip(given.trees, zip(*found[1:], strict=True), strict=True):
                medians = {k: round(statistics.median(row[k] for row in own), 1) for k in FIELDS}
                case = f"{name}{'_async' * asynchronous}"
                rows.append({"tree": tree.resolve().name, "case": case} | medians)
                print(*(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        for child in children:
            child.terminate()
    given.out.write_text(json.dumps({"method": __doc__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
