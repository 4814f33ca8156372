#!/usr/bin/env bash
# tools/compile.sh VENV [PYTEST ARGUMENTS]: compile every kernel for an H200 on a machine without a
# GPU, and assert what the assembler says of registers and spills. A virtual environment of its own:
# the plugin of a GPU has no place in one whose tests run on the CPU.
set -euo pipefail
venv=$1
shift
cd "$(dirname "$0")/.."

if ! tools/venv.sh "$venv" dev,compile; then
    echo "not run: the extra 'compile' cannot be installed here (see above)"
    exit 0
fi
JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest -q -k compiles tests/pallas "$@"
