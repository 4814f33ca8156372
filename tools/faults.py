"""Seeded faults: ``python -m tools.faults`` breaks the code on purpose and sees that a test fails.

``tests/faults/FAMILY.toml`` lists the faults of a family. Each names a file, a text that occurs in
it once, what to put in its place, and the one test that must fail then. A fault is applied to a
copy of the tree in a temporary folder; the working tree is never changed.
"""

import argparse
import collections
import concurrent.futures
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["FOLDER", "KERNELS", "WHERE", "BUILDERS", "Fault", "faults", "occurrences", "table"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "faults"

KERNELS = {
    "dense_decode": "dense decode",
    "dense_prefill": "dense prefill",
    "sparse_attention": "sparse attention",
    "cache_io": "cache reads and writes",
    "append": "a step's new rows (`append`)",
    "append_window": "V4's new rows (`append_window`)",
    "pooling": "V4's compressed states (`pooling`)",
    "v4_steps": "V4's streams (`streams`)",
    "grouped_matmul": "routed experts (`grouped_matmul`)",
    "fp8_matmul": "products with fp8 weights (`fp8_matmul`)",
    "router": "router",
    "indexer_topk": "indexer and selection (`indexer`, `topk`)",
    "merge": "merge of attention states",
    "all_reduce": "sums over devices (`all_reduce`)",
}
"""Families of kernels, and what the documentation calls them."""

BUILDERS = {
    "builder_v3": "metadata builder of V3",
    "builder_v32": "metadata builder of V3.2",
    "builder_v4": "metadata builder of V4",
}
"""The same of metadata builders."""

WHERE = ("cpu", "interpreter", "gpu")
"""What a fault's test needs. The interpreters are Triton's and that of Pallas for Mosaic."""

TOP = ("mla_jax", "tests", "tools", "training", "benchmarks", "docs", "pyproject.toml", "README.md")
"""What a copy of the tree holds."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one file, and the test that must fail with it."""

    family: str
    name: str
    file: str
    text: str
    replacement: str
    test: str
    where: str
    limit: int = 600
    """Seconds of its test at most."""

    hangs: bool = False
    """Whether no end within the limit is a failure too: a kernel may wait for ever."""

    def __str__(self) -> str:
        return f"{self.family}/{self.name}"


def faults(folder: Path = FOLDER) -> list[Fault]:
    """All that are listed, family by family.

    Raises:
        ValueError: a family, name or place that is not allowed, or a name twice.
    """
    found: list[Fault] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            found.append(Fault(family=path.stem, **entry))
    for fault in found:
        if fault.family not in KERNELS | BUILDERS:
            allowed = ", ".join(KERNELS | BUILDERS)
            raise ValueError(f"family of a fault: given {fault.family}; allowed: {allowed}")
        if fault.where not in WHERE:
            raise ValueError(f"where of {fault}: given {fault.where}; allowed: {', '.join(WHERE)}")
    twice = [name for name, n in collections.Counter(map(str, found)).items() if n > 1]
    if twice:
        raise ValueError(f"faults of one name: {', '.join(twice)}")
    return found


def occurrences(fault: Fault, root: Path = ROOT) -> int:
    """How often the file holds the text; a fault applies if that is once."""
    path = root / fault.file
    return path.read_text().count(fault.text) if path.exists() else 0


def table(found: list[Fault]) -> str:
    """Markdown: faults of each family, by what their tests need."""
    lines = [
        "| family | on a CPU | interpreted | on a GPU | in all |",
        "|---|---|---|---|---|",
    ]
    counts = collections.Counter((f.family, f.where) for f in found)
    for family, title in (KERNELS | BUILDERS).items():
        each = [counts[family, where] for where in WHERE]
        lines.append(f"| {title} | {' | '.join(map(str, each))} | {sum(each)} |")
    each = [sum(counts[family, where] for family in KERNELS | BUILDERS) for where in WHERE]
    lines.append(f"| all | {' | '.join(map(str, each))} | {sum(each)} |")
    return "\n".join(lines)


def copy_of_the_tree(to: Path) -> Path:
    """What the tests need of the working tree, in a new folder."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in TOP:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignored)
        elif source.exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to / name)
    return to


def environment(where: str, test: str, root: Path) -> dict[str, str]:
    """That of a test's process, which imports the package from ``root``."""
    more = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)]
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *more])}
    given.pop("TRITON_INTERPRET", None)
    if where == "gpu":  # many processes share the card
        return given | {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    given |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "NPROC": "16"}
    if test.partition("::")[0].endswith("_interpreted.py"):
        given["TRITON_INTERPRET"] = "1"
    return given


def run_test(root: Path, test: str, where: str, limit: int) -> tuple[str, str]:
    """``(passed, failed, skipped, broken or hung; last lines)`` of a test in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line"]
    command += [x for name in ("xdist", "cacheprovider", "benchmark") for x in ("-p", f"no:{name}")]
    if test.partition("::")[0].endswith("_interpreted.py"):
        command += ["-W", "ignore"]
    try:
        done = subprocess.run(
            [*command, test], cwd=root, env=environment(where, test, root), timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hung", f"no end within {limit} s"
    return outcome(done.returncode, done.stdout), "\n".join(done.stdout.strip().splitlines()[-12:])


def outcome(status: int, text: str) -> str:
    """``passed``, ``failed`` or ``skipped`` as pytest says it; ``broken`` where it says neither.

    A status of 1 alone is no failed test: Python gives it too where pytest cannot be imported. What
    a process says of its GPU as it ends stands behind pytest's last line.
    """
    counts = re.compile(r"\b\d+ (passed|failed|errors?|skipped)\b.* in [\d.]+s")
    summary = next((x for x in reversed(text.splitlines()) if counts.search(x)), "")
    if status < 0:
        return "failed"  # the process died
    if status == 1 and re.search(r"\b\d+ (failed|errors?)\b", summary):
        return "failed"
    if status == 0 and "passed" in summary:
        return "passed"
    return "skipped" if status == 0 and "skipped" in summary else "broken"


def write_later(path: Path, text: str) -> None:
    """Write with a later second as time of change: Python asks size and seconds, nothing else,
    whether what it compiled of a file is still that file.
    """
    second = int(path.stat().st_mtime) + 1
    path.write_text(text)
    os.utime(path, (second, second))


def judged(fault: Fault, root: Path, *, intact: bool) -> tuple[str, str]:
    """What became of one fault in a copy of the tree, which is left as it was found."""
    if intact:
        state, last = run_test(root, fault.test, fault.where, fault.limit)
        return ("passes" if state == "passed" else f"BROKEN ({state})"), last
    if occurrences(fault, root) != 1:
        return "DOES NOT APPLY", f"{fault.file} holds its text {occurrences(fault, root)} times"
    path = root / fault.file
    before = path.read_text()
    write_later(path, before.replace(fault.text, fault.replacement))
    try:
        state, last = run_test(root, fault.test, fault.where, fault.limit)
    finally:
        write_later(path, before)
    word = {"failed": "noticed", "passed": "NOT NOTICED", "skipped": "NOT RUN", "hung": "NO END"}
    if fault.hangs:
        word["hung"] = "noticed"
    return word.get(state, "BROKEN TEST"), last


def run(chosen: list[Fault], jobs: int, *, intact: bool = False) -> int:
    """Apply all, each on its own; the exit status is 1 if any was not noticed."""
    begun = time.monotonic()
    bad = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(jobs):
            trees.put(copy_of_the_tree(Path(folder) / str(i)))

        def one(fault: Fault):
            root, start = trees.get(), time.monotonic()
            try:
                return fault, *judged(fault, root, intact=intact), time.monotonic() - start
            finally:
                trees.put(root)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(one, f) for f in chosen]):
                fault, verdict, last, seconds = done.result()
                print(f"{verdict:14} {fault} ({seconds:.0f} s)", flush=True)
                if verdict not in ("noticed", "passes"):
                    bad.append(fault)
                    print(f"    {fault.test}\n    " + last.replace("\n", "\n    "), flush=True)
    word = "tests pass without their faults" if intact else "faults noticed"
    print(f"{len(chosen) - len(bad)} of {len(chosen)} {word}, {time.monotonic() - begun:.0f} s")
    return int(bool(bad))


def main(given: list[str] | None = None) -> int:
    """The command; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--where", action="append", choices=WHERE, help="cpu and interpreter")
    parser.add_argument("--family", action="append", choices=[*KERNELS, *BUILDERS])
    parser.add_argument("--name", action="append", help="of single faults")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="tests side by side")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    parser.add_argument("--limit", type=int, help="seconds of a test at most, for a short run")
    parser.add_argument(
        "--intact", action="store_true", help="run the tests without the faults: all must pass"
    )
    args = parser.parse_args(given)
    where = args.where or ["cpu", "interpreter"]
    chosen = [
        f
        for f in faults()
        if f.where in where
        and (not args.family or f.family in args.family)
        and (not args.name or f.name in args.name)
    ]
    if args.limit is not None:
        chosen = [replace(f, limit=min(f.limit, args.limit)) for f in chosen]
    if args.sample is not None:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    if args.list:
        for f in chosen:
            print(f"{f.where:12} {f}: {f.test}")
        print(f"{len(chosen)} faults")
        return 0
    if not chosen:
        print("no such fault")
        return 2
    if args.intact:  # a test of several faults runs once
        chosen = list({f.test: f for f in chosen}.values())
    return run(chosen, min(args.jobs, len(chosen)), intact=args.intact)


if __name__ == "__main__":
    sys.exit(main())
