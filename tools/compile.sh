#!/usr/bin/env bash
# tools/compile.sh CUDA VENV [PYTEST ARGUMENTS]: compile every kernel for an H200 on a machine without
# a GPU, with the plugin and the assembler of CUDA 12 (12.9) or 13 (13.0), and assert what the
# assembler says of registers and spills. CUDA is 12, 13 or turn: by the parity of the number of
# commits, so that one commit always gets the same. A virtual environment for each: the plugin of a
# GPU has no place in one whose tests run on the CPU. Fails if anything was not run.
set -euo pipefail
cuda=$1
venv=$2
shift 2
cd "$(dirname "$0")/.."

if [ "$cuda" = turn ]; then
    commits=$(git rev-list --count HEAD)
    cuda=$((12 + commits % 2))
    echo "CUDA $cuda, in turn: $commits commits"
fi
if [ "$cuda" != 12 ] && [ "$cuda" != 13 ]; then
    echo "CUDA: given $cuda; allowed: 12, 13 or turn" >&2
    exit 2
fi
if ! tools/venv.sh "$venv-cuda$cuda" "dev,compile$cuda"; then
    echo "not run: the extra 'compile$cuda' cannot be installed here (see above)"
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "compiling with CUDA $cuda"
JAX_PLATFORMS=cpu "$venv-cuda$cuda/bin/python" -m pytest -q -k compiles tests/pallas "$@" | tee "$log"
closing=$(tail -n 1 "$log")
if [[ $closing == *skipped* || $closing != *passed* ]]; then
    echo "not run, at least in part, with CUDA $cuda: $closing"
    exit 1
fi
