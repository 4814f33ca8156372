"""``python -m benchmarks.sanitize [TOOL ...]``: dense decode under NVIDIA's compute-sanitizer.

Small cases of plan, kernel and merge, each compared with float32, under ``memcheck`` and
``racecheck`` unless tools are named. Every array is an allocation of its own here, so that a
read behind its end is seen. Needs ``compute-sanitizer`` in the path, or ``--program``.
"""

import argparse
import functools
import os
import subprocess
import sys

SMALL = (  # requests, queries, heads, keys: pieces of one block and of several, idle tiles, chains
    (3, 1, 16, 700),
    (2, 2, 128, 1000),
    (1, 1, 8, 6000),
    (1, 1, 128, 3000),
    (140, 1, 64, 65),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sanitize", description=__doc__)
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--program", default="compute-sanitizer")
    parser.add_argument("--run", action="store_true", help="the cases, without a sanitizer")
    given = parser.parse_args()
    if given.run:
        return run()
    found = {tool: _sanitize(given.program, tool) for tool in given.tools}
    print(found)
    sys.exit(any(found.values()))


def _sanitize(program: str, tool: str) -> int:
    """The exit status: 9 if the tool found anything."""
    command = [program, "--tool", tool, "--error-exitcode", "9"]
    command += ["--kernel-name", "kernel_substring=mla_dense_decode"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--run"]
    return subprocess.run(
        command, env=os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, check=False
    ).returncode


def run() -> None:
    """Each case by both plans, once."""
    import jax

    from benchmarks import decode

    for sizes in SMALL:
        for changes in ((), (("batch_invariant", True), ("chunk", 3))):
            case = decode.Case(*sizes, tuning=changes)
            q, args = decode.inputs(case, *decode.random_arrays(case))
            plan = jax.jit(lambda *a, case=case: decode.plan_of(case, *a))(*args[4:])
            state = jax.jit(lambda *a, case=case: decode.attend(case, *a))(*args, plan)
            reference = jax.jit(functools.partial(decode.reference, case))
            error = decode.error_of(case, reference, q, args, state)
            print(f"{case.name}: error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
